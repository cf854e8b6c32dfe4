"""The options of `ddp-hpc lint`: which checks run, and the formats of the findings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.lint.select_checks import split_codes
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import ROOT, run_cli

SLURM = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
# An error in line 3, a warning in line 4.
BAD = SLURM + "#SBATCH --mem=16 GB\nexport MASTER_PORT=29500\n"
NOTE = "#!/bin/bash\n#SBATCH --time=12:00\nsrun ./a.out\n"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> None:
    (tmp_path / "bad.sh").write_text(BAD)
    (tmp_path / "note.sh").write_text(NOTE)


def checks_of(output: bytes) -> list[str]:
    return re.findall(r"^\S+:\d+: \w+ (\w+):", output.decode(), re.MULTILINE)


@pytest.mark.parametrize(
    ("select", "ignore", "expected"),
    [
        ([], [], ["SLURM017", "RANK008"]),
        (["RANK"], [], ["RANK008"]),
        (["rank008,JOB"], [], ["RANK008"]),
        ([], ["SLURM"], ["RANK008"]),
        (["SLURM"], ["SLURM017"], []),
    ],
)
def test_only_the_selected_checks_run(select: list[str], ignore: list[str], expected: list[str]) -> None:
    findings = lint_script(BAD, select=split_codes(select), ignore=split_codes(ignore))
    assert [finding.check for finding in findings] == expected


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_check_is_refused_with_a_suggestion(option: str, tmp_path: Path) -> None:
    done = run_cli("lint", option, "SLRUM017", "bad.sh", cwd=tmp_path)
    assert done.returncode == 2
    assert b"SLURM017" in done.stderr


@pytest.mark.parametrize(
    ("severity", "expected", "message"),
    [
        ("note", ["JOB012"], ""),
        ("warning", [], "no errors or warnings found\n"),
        ("error", [], "no errors found\n"),
    ],
)
def test_findings_below_the_severity_are_not_printed(
    severity: str, expected: list[str], message: str, tmp_path: Path
) -> None:
    done = run_cli("lint", "--severity", severity, "note.sh", cwd=tmp_path)
    assert (checks_of(done.stdout), done.returncode) == (expected, 0)
    assert done.stderr.decode().endswith(message)


def test_several_scripts_are_checked(tmp_path: Path) -> None:
    done = run_cli("lint", "note.sh", "bad.sh", cwd=tmp_path)
    assert checks_of(done.stdout) == ["JOB012", "SLURM017", "RANK008"]
    assert done.returncode == 1


def test_a_profile_is_looked_up_and_named_once_for_several_scripts(tmp_path: Path) -> None:
    done = run_cli("lint", "--profile", "generic_slurm", "bad.sh", "note.sh", cwd=tmp_path)
    assert done.stderr.decode().count("profile generic_slurm:") == 1


def test_json_contains_the_path_of_each_finding(tmp_path: Path) -> None:
    found = json.loads(run_cli("lint", "--json", "note.sh", "bad.sh", cwd=tmp_path).stdout)
    assert [(one["path"], one["line"], one["check"]) for one in found] == [
        ("note.sh", 2, "JOB012"),
        ("bad.sh", 3, "SLURM017"),
        ("bad.sh", 4, "RANK008"),
    ]


@pytest.mark.parametrize(
    ("comment", "silenced"),
    [
        ("# ddp-hpc: ignore[RANK008]", True),
        ("# ddp-hpc: ignore[JOB001, RANK008] - one job per node", True),
        ("#ddp-hpc: ignore[rank]", True),
        ("# ddp-hpc: ignore", False),
    ],
)
@pytest.mark.parametrize("place", ["line", "before", "far"])
def test_a_comment_silences_a_check_on_its_line(comment: str, silenced: bool, place: str) -> None:
    line = "export MASTER_PORT=29500"
    text = {
        "line": f"{line} {comment}\n",
        "before": f"{comment}\n{line}\n",
        "far": f"{comment}\nhostname\n{line}\n",
    }[place]
    found = {one.check for one in lint_script(SLURM + text)}
    assert ("RANK008" not in found) == (silenced and place != "far")


def test_a_comment_for_the_file_silences_all_findings_of_a_check() -> None:
    text = SLURM + "export MASTER_PORT=1\nMASTER_PORT=2\n# ddp-hpc: ignore-file[RANK008]\n"
    assert lint_script(text) == []


def test_the_log_directory_of_a_script_in_the_current_directory_is_checked(tmp_path: Path) -> None:
    text = SLURM + "#SBATCH --output=logs/%j.out --error=logs/%j.err\nsrun ./a.out\n"
    (tmp_path / "job.sh").write_text(text)
    assert checks_of(run_cli("lint", "job.sh", cwd=tmp_path).stdout) == ["SLURM020"]
    (tmp_path / "logs").mkdir()
    assert checks_of(run_cli("lint", "job.sh", cwd=tmp_path).stdout) == []


def test_the_pre_commit_hook_selects_job_scripts() -> None:
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    pattern = re.search(r"^  files: (.*)$", text, re.MULTILINE)
    assert pattern is not None
    assert "\n  entry: ddp-hpc lint\n" in text
    names = ["a.sbatch", "jobs/b.slurm", "c.pbs", "d.sh", "e.sbatch.txt"]
    assert [name for name in names if re.search(pattern[1], name)] == names[:3]


def test_a_rendered_script_is_checked_for_its_own_site() -> None:
    """srun's --gpu-bind=closest is a fault on other machines, but Frontier's guide requires it."""
    done = run_cli("lint", str(ROOT / "tests" / "golden" / "frontier-2-nodes.sbatch"))
    assert b"profile frontier: named by DDP_HPC_PROFILE in the script" in done.stderr
    assert b"SLURM006" not in done.stdout


@pytest.mark.parametrize(
    ("program", "command", "is_found"),
    [
        ("import torch.distributed as dist\ndist.init_process_group('nccl')\n", "srun python train.py", True),
        ("from accelerate import Accelerator\nAccelerator()\n", "mpiexec -n 8 python train.py", True),
        ("dist.init_process_group()\n", "srun ddp-hpc exec -- python train.py", False),
        ("dist.init_process_group()\n", "srun torchrun --nnodes 2 train.py", False),
        ("dist.init_process_group()\n", "srun --ntasks=1 python train.py", False),
        ("dist.init_process_group()\n", "srun bash -c 'RANK=$SLURM_PROCID python train.py'", False),
        ("dist.init_process_group(rank=int(os.environ['SLURM_PROCID']))\n", "srun python train.py", True),
        (
            "r = environ['SLURM_PROCID']\nenviron['MASTER_ADDR'] = a\ndist.init_process_group(rank=r)\n",
            "srun python train.py",
            False,
        ),
        ("os.environ['MASTER_ADDR'] = 'localhost'\n", "srun python train.py", True),
        (
            "if 'RANK' not in os.environ:\n    os.environ['MASTER_ADDR'] = '127.0.0.1'\n",
            "srun python train.py",
            False,
        ),
        ("os.environ['MASTER_ADDR'] = 'localhost'\n", "srun -N 1 python train.py", False),
        ("rank = dist.get_rank()\ntorch.cuda.set_device(rank)\n", "srun torchrun --nnodes 2 train.py", True),
        (
            "rank = dist.get_rank()\ntorch.cuda.set_device(rank % 4)\n",
            "srun torchrun --nnodes 2 train.py",
            False,
        ),
        ("import ddp_hpc\n", "srun python train.py", False),
        ("r = int(os.environ['RANK'])\ninit_process_group('nccl', rank=r)\n", "srun python train.py", True),
        ("r = int(os.getenv('RANK', 0))\ninit_process_group(rank=r)\n", "mpirun -np 8 python train.py", True),
        (
            "r = int(os.environ['RANK'])\ninit_process_group(rank=r)\n",
            "MASTER_ADDR=a RANK=0 srun python train.py",
            False,
        ),
        (
            "r = int(os.environ.get('RANK', os.environ['SLURM_PROCID']))\ninit_process_group(rank=r)\n",
            "MASTER_ADDR=a srun python train.py",
            False,
        ),
        ("print('no ranks')\n", "srun python train.py", False),
    ],
)
def test_a_program_without_the_variables_of_torchrun_is_reported(
    program: str, command: str, is_found: bool, tmp_path: Path
) -> None:
    """Each rank of such a program fails, or trains alone on all of the data. One knows its rank, but not the
    address of the first.
    """
    (tmp_path / "train.py").write_text(program)
    directives = "#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=01:00:00\n"
    script = f"#!/bin/bash\n{directives}{command}\n"
    found = [one.check for one in lint_script(script, directory=tmp_path)]
    assert ("RANK016" in found) is is_found


def test_a_file_without_directives_is_named(tmp_path: Path) -> None:
    """Otherwise the exit code 0 would look as if the request to the scheduler had been checked."""
    (tmp_path / "run.sh").write_text("#!/bin/bash\npython train.py\n")
    done = run_cli("lint", "run.sh", cwd=tmp_path)
    assert done.returncode == 0
    assert b"note: run.sh has no directives of PBS or Slurm, so only its commands were checked" in done.stderr


def test_a_wrapper_that_selects_the_gpu_allows_any_order_of_the_cores(tmp_path: Path) -> None:
    launch = "mpiexec -n 4 --ppn 4 --cpu-bind list:0-7:8-15:16-23:24-31"
    text = "#!/bin/bash\n#PBS -l select=1:system=polaris\n{} python train.py\n"
    site = load_site("polaris")
    assert "SITE014" in {one.check for one in lint_script(text.format(launch), site)}
    wrapped = text.format(f"{launch} ./set_affinity_gpu_polaris.sh")
    assert "SITE014" not in {one.check for one in lint_script(wrapped, site)}


@pytest.mark.parametrize(("options", "said"), [([], "no problems found\n"), (["--json"], "")])
def test_a_script_without_findings_is_confirmed_on_stderr(
    tmp_path: Path, options: list[str], said: str
) -> None:
    run_cli("render", "--profile", "local", "-o", "job.sh", cwd=tmp_path)
    done = run_cli("lint", *options, "job.sh", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.decode().partition("note: ")[2].partition("\n")[2] == said
    assert done.stdout == (b"[]\n" if options else b"")
