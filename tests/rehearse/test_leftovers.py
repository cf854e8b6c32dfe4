"""A rehearsal leaves no processes, and only files that the user wants to keep."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.rehearse.conftest import Rehearse, leftovers

Script = Callable[..., Path]
HANGS = "trap '' TERM INT HUP; echo up; while :; do sleep 0.1; done"
JOBS = [
    ("pbs", ["-l select=1", "-k doe", f"mpiexec -n 2 bash -c \"{HANGS}\" &", HANGS]),
    ("slurm", ["--nodes=1", f'srun bash -c "{HANGS}" &', HANGS]),
    ("", [f'mpiexec -n 2 bash -c "{HANGS}" &', HANGS]),
]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.check)])
@pytest.mark.parametrize(("scheduler", "lines"), JOBS, ids=["pbs", "slurm", "local"])
def test_an_interrupted_rehearsal_leaves_no_process(
    launch: Launch, script: Script, temp: Path, scheduler: str, lines: list[str], number: signal.Signals
) -> None:
    words = ["python", "-m", "ddp_hpc", "rehearse", script(scheduler, *lines)]
    process = launch.start(words, env={"TMPDIR": str(temp)})
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    ended = launch.end(process, timeout_s=15.0)
    if number == signal.SIGKILL:  # the process could not remove the directory
        end_s = time.monotonic() + 10.0
        while len(left := leftovers(temp)) > 1 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert len(left) == 1, left
        return
    assert leftovers(temp) == []
    assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (130, "interrupted")


@pytest.mark.check
def test_a_script_is_submitted_from_the_current_directory(
    rehearse: Rehearse, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('mine')\n")
    for scheduler, asks in (("pbs", "-l select=1 -j oe"), ("slurm", "--nodes=1"), ("", "")):
        done = rehearse(script(scheduler, asks, 'cd "${PBS_O_WORKDIR:-.}"', "python train.py"))
        assert done.stdout == "mine\n", done.stderr
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made[0] == "job.sh"
    assert re.fullmatch(r"job.sh.o\d{6}", made[1])
    assert made[2].startswith("slurm-")
    assert made[3:] == ["train.py"]


def test_with_empty_the_job_changes_no_files_of_the_user(
    rehearse: Rehearse, script: Script, tmp_path: Path
) -> None:
    job = script("slurm", "--nodes=1", "ls job.sh || touch new")
    assert rehearse(job, "--empty").exit_code == 0
    assert list(tmp_path.iterdir()) == [job]


def test_the_users_run_directory_is_neither_read_nor_changed(
    rehearse: Rehearse, script: Script, tmp_path: Path
) -> None:
    state = tmp_path / "runs" / "own" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("requeue 5000 SIGTERM\n")
    lines = [
        'export DDP_HPC_RUN_DIR="$PWD"/runs/own',
        'mkdir "$DDP_HPC_RUN_DIR"',
        'echo >"$DDP_HPC_RUN_DIR"/state',
    ]
    done = rehearse(script("slurm", "--nodes=1", *lines))
    assert done.exit_code == 0, done.stdout + done.stderr
    assert state.read_text() == "requeue 5000 SIGTERM\n"


def test_the_users_home_and_job_variables_do_not_reach_the_job(
    launch: Launch, script: Script, temp: Path, tmp_path: Path
) -> None:
    job = script("slurm", "--nodes=1", 'echo "$HOME ${RANK-} ${PBS_JOBID-} ${DDP_HPC_RUN_DIR-} ${MINE-}"')
    env = {"TMPDIR": str(temp), "RANK": "3", "PBS_JOBID": "7", "DDP_HPC_RUN_DIR": "/old", "MINE": "kept"}
    done = launch(["python", "-m", "ddp_hpc", "rehearse", job], env=env, cwd=tmp_path)
    assert done.stdout.startswith(str(temp))
    assert done.stdout.endswith("/home    kept\n")


@pytest.mark.check
def test_a_missing_setup_file_is_reported_and_skipped(rehearse: Rehearse, script: Script) -> None:
    lines = ["set -e", "source /opt/nowhere/setup.sh", "module load cuda", "conda activate base", "echo on"]
    for scheduler, asks in (("pbs", "-l select=1 -j oe"), ("slurm", "--nodes=1"), ("", "")):
        done = rehearse(script(scheduler, asks, *lines))
        assert "source /opt/nowhere/setup.sh: skipped, the file does not exist on this machine" in done.stdout
        assert done.stdout.endswith("on\n")
