"""`ddp-hpc bench scaling --submit` and `--gather` with fake scheduler commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scaling_points import STEPS, WARM_UP, write_point
from tests.conftest import clean_environ
from tests.queue.answers import pbs, qstat_text, slurm
from tests.queue.conftest import (
    Programs,
    Run,
    no_pauses,
    nothing_set,
    programs,
    python_of_the_system,
    run,
    work,
)

__all__ = ["no_pauses", "nothing_set", "programs", "python_of_the_system", "run", "work"]

SITE = ["--profile", "generic_slurm", "--gpus-per-node", "4", "--walltime", "00:10:00"]
SHORT = ["--steps", str(STEPS), "--warm-up", str(WARM_UP), "--batch-size", "8", "--mode", "weak"]
FOUR, EIGHT = "ranks4-batch8", "ranks8-batch8"


def scaling(run: Run, *args: str) -> Any:
    return run("bench", "scaling", "--submit", *SITE, *SHORT, *args)


@pytest.fixture
def cluster(work: Path, programs: Programs) -> Programs:
    """Job IDs start with 12; scontrol prints the job's file in `jobs`, and an error for other jobs."""
    (work / "jobs").mkdir()
    programs.program(
        "sbatch",
        f'mapfile -t calls <"{programs.calls}"; n=11; for c in "${{calls[@]}}"; do '
        '[[ $c != sbatch* ]] || n=$((n + 1)); done; echo "$n"',
    )
    programs.program(
        "scontrol",
        f'cat "{work}/jobs/${{!#}}" 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id '
        'specified" >&2; exit 1; }',
    )
    return programs


def set_job(work: Path, job_id: str, **changes: str) -> None:
    """Sets the state of a job that the scheduler reports."""
    (work / "jobs" / job_id).write_text(slurm(job_id=job_id, work=str(work), log=f"{work}/log", **changes))


def test_a_dry_run_prints_the_script_of_render_for_each_point(
    work: Path, programs: Programs, run: Run
) -> None:
    done = scaling(run, "--nodes", "1,2", "--trace-steps", "3", "--dry-run", "--", "--amp", "bf16")
    assert done.code == 0, done.err
    rendered, commands = "", []
    for nodes, name in (("1", FOUR), ("2", EIGHT)):
        ranks, folder = 4 * int(nodes), f"scaling/{name}"
        training = ["--amp", "bf16", "--num-samples", "2048", "--batch-size", "8"]
        training += ["--max-steps", "10", "--epochs", "10", "--no-snapshots"]
        training += ["--metrics", f"{folder}/metrics.jsonl", "--summary", f"{folder}/summary.json"]
        training += ["--trace-dir", f"{folder}/trace", "--trace-window", "6,1,3,1", "--trace-ranks", "all"]
        request = [*SITE, "--nodes", nodes, "--ranks-per-node", "4", "--name", f"ddp-{ranks}x8"]
        request += ["--run-dir", folder, "--", "python", "-m", "ddp_hpc.train", *training]
        rendered += run("render", *request).out
        commands.append(f"would run: sbatch --parsable {work}/{folder}/job-")
    assert done.out == rendered
    printed = [line for line in done.err.splitlines() if line.startswith("would run: ")]
    assert [line[: -len("01234567.sh")] for line in printed] == commands
    assert not list(work.iterdir())


def test_nodes_are_filled_one_after_the_other(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--ranks", "1,4,16", "--dry-run")
    lines = [
        line for line in done.out.splitlines() if line.startswith(("#SBATCH --nodes", "#SBATCH --ntasks"))
    ]
    assert [line.rpartition("=")[2] for line in lines] == ["1", "1", "1", "4", "4", "4"]
    done = scaling(run, "--ranks", "1,4,6", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "--ranks 6 is not a multiple of 4, the number of ranks per node" in done.err


def test_each_point_is_a_job_and_only_ids_are_printed(work: Path, cluster: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "1,2")
    assert (done.code, done.out) == (0, "12\n13\n"), done.err
    assert "4 ranks, batches of 8: job 12\n8 ranks, batches of 8: job 13\n" in done.err
    for name, job_id in ((FOUR, "12"), (EIGHT, "13")):
        folder = work / "scaling" / name
        [script] = folder.glob("job-*.sh")
        assert f"sbatch --parsable {script}" in cluster.called("sbatch")
        assert json.loads((folder / "submitted").read_text())["job_id"] == job_id


def test_points_that_are_pending_running_or_done_are_not_resubmitted(
    work: Path, cluster: Programs, run: Run
) -> None:
    assert scaling(run, "--nodes", "1,2,4").code == 0
    set_job(work, "12", state="COMPLETED")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    set_job(work, "13", state="PENDING", reason="Priority")
    set_job(work, "14", state="FAILED", exit="1:0")
    done = scaling(run, "--nodes", "1,2,4")
    assert (done.code, done.out) == (0, "15\n"), done.err
    assert (
        "4 ranks, batches of 8: 64.0 samples/s\n8 ranks, batches of 8: waiting, job 13: PENDING, P"
        in done.err
    )
    set_job(work, "15")
    done = scaling(run, "--nodes", "1,2,4")
    assert (done.code, done.out) == (0, "")
    assert "all points are done or submitted" in done.err


def test_gathering_lists_the_points_that_are_not_done(work: Path, cluster: Programs, run: Run) -> None:
    scaling(run, "--nodes", "1,2,4")
    set_job(work, "12", state="COMPLETED")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    set_job(work, "13", state="RUNNING")
    set_job(work, "14", state="PENDING", reason="Resources")
    done = run("bench", "scaling", "--gather")
    assert done.code == 75
    assert [line.split()[:2] for line in done.out.splitlines()[1:]] == [["weak", "4"]]
    assert done.err.splitlines()[1:] == [
        "8 ranks, batches of 8: running, job 13: RUNNING",
        "16 ranks, batches of 8: waiting, job 14: PENDING, Resources",
    ]
    (work / "log").write_text("[rank 3/8 n1] error: out of luck; try another\n")
    set_job(work, "13", state="FAILED", exit="1:0")
    (work / "jobs" / "14").unlink()
    done = run("bench", "scaling", "--gather")
    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        "8 ranks, batches of 8: failed, job 13: exit code 1: "
        "[rank 3/8 n1] error: out of luck; try another; see ddp-hpc status 13",
        "16 ranks, batches of 8: failed, job 14 is no longer known to the scheduler; no summary",
    ]


def test_nothing_is_resubmitted_if_the_scheduler_does_not_respond(
    work: Path, cluster: Programs, run: Run
) -> None:
    scaling(run, "--nodes", "1")
    cluster.answers("scontrol", "", code=1, err="slurm_load_jobs error: Unable to contact slurm controller\n")
    done = scaling(run, "--nodes", "1")
    assert (done.code, done.out) == (1, "")
    assert len(cluster.called("sbatch")) == 1
    done = run("bench", "scaling", "--gather")
    assert (done.code, done.out) == (75, "")
    assert "waiting, job 12, whose scheduler does not respond: scontrol failed 3 times" in done.err


def test_an_error_after_some_submissions_reports_their_number(
    work: Path, cluster: Programs, run: Run
) -> None:
    refuses = 'echo "sbatch: error: no" >&2; exit 1'
    cluster.program("sbatch", f"if [[ $* == *{EIGHT}* ]]; then {refuses}; fi; echo 12")
    done = scaling(run, "--nodes", "1,2")
    assert (done.code, done.out) == (1, "12\n")
    line = "error: 8 ranks, batches of 8: 1 of 2 jobs were submitted; run the same command again"
    assert line in done.err.splitlines()[-1]


def test_points_can_be_pbs_jobs(work: Path, programs: Programs, run: Run) -> None:
    programs.answers("qsub", "12.pbs-srv\n")
    programs.answers("qstat", qstat_text(pbs(job_state="Q", comment="Not Running: no nodes", Job_Name="ddp")))
    request = ["--submit", "--profile", "polaris", "--queue", "debug", "--walltime", "00:10:00", *SHORT]
    done = run("bench", "scaling", *request, "--nodes", "1", "--account", "P")
    assert (done.code, done.out) == (0, "12.pbs-srv\n"), done.err
    done = run("bench", "scaling", "--gather")
    assert (done.code, done.out) == (75, "")
    assert done.err == "4 ranks, batches of 8: waiting, job 12.pbs-srv: Q, Not Running: no nodes\n"


def test_without_a_scheduler_no_directory_is_created(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "1")
    assert (done.code, done.out) == (2, "")
    assert "sbatch was not found on the PATH; the jobs are for Slurm" in done.err
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--submit requires --nodes or --ranks, such as --nodes 1,2,4"),
        (["--nodes", "1", "--json", "s.json"], "--json cannot be used with --submit"),
        (["--nodes", "1", "--setup", "for"], "--setup 'for' is not valid bash"),
        (["--nodes", "1", "--launcher", "srunn"], 'did you mean "srun"?'),
        (["--nodes", "1", "--profile", "local"], "the scheduler of the profile is 'local'"),
        (["--nodes", "1", "--dir", "a$(touch b)"], "cannot be determined from its script"),
    ],
)
def test_an_invalid_request_is_one_line(
    work: Path, cluster: Programs, run: Run, args: list[str], message: str
) -> None:
    done = scaling(run, *args)
    assert (done.code, done.out) == (2, ""), done.err
    assert message in done.err.splitlines()[-1]
    assert not cluster.called()
    assert not (work / "scaling").exists()


def test_torch_is_not_required_on_a_login_node(work: Path, cluster: Programs, run: Run) -> None:
    scaling(run, "--nodes", "1")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    blocked = ["torch", "mpi4py", "h5py", "numpy", "msgspec"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from ddp_hpc.cli import main; main()"
    for args in (["--submit", *SITE, *SHORT, "--nodes", "1,2", "--dry-run"], ["--gather"]):
        argv = [sys.executable, "-c", code, "bench", "scaling", *args]
        done = subprocess.run(argv, cwd=work, env=clean_environ(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "note: communication is not shown, since numpy is not installed; "
    )
