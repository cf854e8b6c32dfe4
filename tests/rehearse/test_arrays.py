"""A rehearsal runs one task of a job array, with the variables and the job ID that the scheduler gives it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]
SHOW = ["env | sort | grep -E '_ARRAY_|^PBS_JOBID' || true"]


def variables(output: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.splitlines() if re.match(r"[A-Z_]+=", line))


def test_the_first_task_of_an_array_of_pbs_runs(rehearse: Rehearse, script: Script) -> None:
    done = rehearse(script("pbs", "-J 2-8:2", "-j oe", "-k doe", *SHOW))
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "job.sh is a job array, of which only the task with index 2 runs" in done.stderr
    found = variables(done.stdout)
    assert found["PBS_ARRAY_INDEX"] == "2"
    assert re.fullmatch(r"[0-9]+\[\]\.rehearsal", found["PBS_ARRAY_ID"])
    assert found["PBS_JOBID"] == found["PBS_ARRAY_ID"].replace("[]", "[2]")
    assert re.findall("^rehearse: job (.*): Exit_status 0", done.stderr, re.MULTILINE) == [found["PBS_JOBID"]]


@pytest.mark.parametrize(("scheduler", "name"), [("slurm", "12_7"), ("pbs", "12[7]")])
def test_a_task_is_resumed_by_another_job_in_its_own_run_directory(
    rehearse: Rehearse, tmp_path: Path, scheduler: str, name: str
) -> None:
    program = tmp_path / "program.sh"
    program.write_text(
        'echo "in ${DDP_HPC_RUN_DIR##*/}"; [[ -e $DDP_HPC_RUN_DIR/begun ]] && exit 0\n'
        'touch "$DDP_HPC_RUN_DIR/begun"; echo 5 >"$DDP_HPC_PROGRESS_FILE"; exit 75\n'
    )
    argv = [sys.executable, "-m", "ddp_hpc", "render", "--profile", f"generic_{scheduler}", "-o"]
    argv += [
        str(tmp_path / "job.sh"),
        "--walltime",
        "00:05:00",
        "--array",
        "5-9:2",
        "--",
        "bash",
        str(program),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    done = rehearse("job.sh", "--array-index", "7", timeout_s=120.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert re.findall("^in (.*)$", done.stdout, re.MULTILINE) == ["task-7", "task-7"]
    first = re.findall(r"^ddp-hpc: job (\S+):", done.stdout, re.MULTILINE)[0]
    assert re.sub("^[0-9]+", "12", first).removesuffix(".rehearsal") == name


REFUSED = [
    ("slurm", ["--array=0-3"], "4", "the array of job.sh has the indices 0 to 3; use one of these"),
    ("slurm", ["--array=1,5"], "2", "--array-index 2 is not an index of the array of job.sh; use for exam"),
    ("slurm", ["--nodes=1"], "2", "--array-index was given, but job.sh is not a job array; omit the option"),
    ("slurm", ["--array=3-1"], "", "Batch job submission failed: Invalid job array specification"),
    ("pbs", ["-J 3-3"], "", "qsub: illegal -J value"),
]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "lines", "index", "said"), REFUSED, ids=[one[3] for one in REFUSED])
def test_an_invalid_array_or_index_is_refused_in_one_line(
    rehearse: Rehearse, script: Script, scheduler: str, lines: list[str], index: str, said: str
) -> None:
    option = ["--array-index", index] if index else []
    done = rehearse(script(scheduler, *lines, "true").name, *option)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]
