"""Every shipped job trains in a rehearsal, with the launcher for which it was written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Launch
from tests.rehearse.conftest import Rehearse

JOBS = PROJECT / "jobs"
LAUNCHERS = {
    "generic_pbs_ddp.pbs": "pals",
    "generic_slurm_ddp.sbatch": "slurm",
    "generic_slurm_torchrun.sbatch": "torchrun",
    "local_ddp.sh": "hydra",
    "perlmutter_ddp.sbatch": "slurm",
    "polaris_ddp.pbs": "pals",
    "polaris_torchrun.pbs": "torchrun",
    "torchrun_script.sh": "torchrun",
}
TINY = "--model linear --num-samples 128 --batch-size 8 --max-steps 2"


def test_every_shipped_job_is_tested() -> None:
    assert {path.name for path in JOBS.iterdir() if path.is_file()} == LAUNCHERS.keys()


# They differ from generic_slurm_ddp or polaris_ddp only in the profile of the site, and tests/slurm runs a
# job like generic_slurm_torchrun.
ALIKE = {"generic_pbs_ddp.pbs", "polaris_ddp.pbs", "generic_slurm_torchrun.sbatch", "perlmutter_ddp.sbatch"}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.check) for name in sorted(LAUNCHERS.keys() - ALIKE)),
        *(pytest.param(name, marks=pytest.mark.soak) for name in sorted(ALIKE)),
    ],
)
def test_a_shipped_job_trains(rehearse: Rehearse, name: str) -> None:
    done = rehearse(JOBS / name, "--args", TINY, "--ranks-per-node", "1", timeout_s=120.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert re.search(r"^done: 2 steps", done.stdout, re.MULTILINE)
    assert re.search(rf"^world: .*{LAUNCHERS[name]}", done.stdout, re.MULTILINE)


def test_the_polaris_job_trains_on_two_nodes_with_the_variables_of_pals(rehearse: Rehearse) -> None:
    done = rehearse(JOBS / "polaris_ddp.pbs", "--args", TINY, "--ranks-per-node", "1", timeout_s=120.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert re.search(r"^ddp-hpc: job \d+.rehearsal: .*mpiexec -n 8 ", done.stdout, re.MULTILINE)
    assert (
        "rehearse: starting 2 of 8 ranks, because 2 nodes with at most 1 ranks each are simulated"
        in done.stdout
    )
    assert re.search(r"^world: 2 ranks .*pals.*gloo on cpu", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("done: 2 steps, 32 samples")
    assert re.search(r"rehearse: job \d+.rehearsal: Exit_status 0 \(finished\)", done.stderr)


def test_the_simulation_is_described_once_and_not_in_the_jobs_log(rehearse: Rehearse, tmp_path: Path) -> None:
    script = tmp_path / "job.pbs"
    script.write_text(
        "#!/bin/bash\n#PBS -l select=3:ncpus=1 -l walltime=00:10:00 -j oe\nmodule load x\necho hello\n"
    )
    done = rehearse(script, "--nodes", "1", "--ranks-per-node", "2")
    assert done.stdout == "rehearse: module load x (nothing is loaded)\nhello\n"
    assert (
        done.stderr.count(
            "PBS is simulated with 1 of 3 nodes, all on this machine, and at most 2 ranks per node"
        )
        == 1
    )


@pytest.mark.check
def test_two_concurrent_rehearsals_are_independent(launch: Launch, temp: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text('#!/bin/bash\n#SBATCH --nodes=1\necho "$SLURM_JOB_ID"\n')
    words = ["python", "-m", "ddp_hpc", "rehearse", script]
    both = [launch.start(words, env={"TMPDIR": str(temp)}, cwd=tmp_path) for _ in range(2)]
    # Ranks without MPI find each other by the id of the job.
    assert len({launch.end(process).stdout for process in both}) == 2


def test_a_rendered_script_does_not_activate_a_virtual_environment_over_the_stand_ins(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("exit 9\n")
    words = ["python", "-m", "ddp_hpc", "render", "--profile", "generic_slurm", "--walltime", "00:05:00"]
    line = 'echo "$DDP_HPC_RUN_DIR"'
    (tmp_path / "job.sbatch").write_text(launch([*words, "--", "bash", "-c", line]).stdout)
    done = rehearse(tmp_path / "job.sbatch")
    run_dir = done.stdout.splitlines()[-1]
    assert f"rehearse: the run directory is {run_dir}, which is removed at the end" in done.stderr
    assert "--max-steps" not in done.stderr


BAD_NODE = """
import os, pathlib, sys
progress = pathlib.Path(os.environ["DDP_HPC_PROGRESS_FILE"])
if not progress.exists():
    progress.write_text("1")
sys.exit(3 if os.environ["DDP_HPC_SIMULATED_NODE"] == "node1" else 0)
"""


@pytest.mark.check
def test_a_bad_node_is_replaced_in_a_rehearsal_and_its_run_directory_can_be_kept(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(BAD_NODE)
    words = ["python", "-m", "ddp_hpc", "render", "--profile", "generic_slurm", "--walltime", "00:20:00"]
    words += ["--spare-nodes", "1", "--rank-logs", "--", "python", "bad.py"]
    (tmp_path / "job.sbatch").write_text(launch(words).stdout)
    done = rehearse("--keep", "kept", "job.sbatch")
    assert done.exit_code == 0, done.stderr
    assert "node node1: two attempts have failed on it; replaced by node2" in done.stdout
    logs = {str(path.relative_to(tmp_path / "kept" / "logs")) for path in tmp_path.glob("kept/logs/*/*/*")}
    assert logs == {
        f"attempt-{number}/{node}/rank-0.log" for number, node in ((1, "node1"), (2, "node1"), (3, "node2"))
    }
    again = rehearse("--keep", "kept", "job.sbatch")
    assert again.exit_code == 2
    assert "--keep kept is not an empty directory" in again.stderr
