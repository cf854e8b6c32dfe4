"""Programs that know nothing of ddp-hpc, run by the supervisor: which of them another job resumes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import calls, folder, job, running
from tests.batch.test_scripts_run import script, slurm

__all__ = ["job"]

TOUCH = 'touch "$DDP_HPC_PROGRESS_FILE"; '


def run(
    job: Sandbox, then: str, left_s: float = 3600.0, job_id: str = "7", **options: object
) -> subprocess.CompletedProcess[bytes]:
    """Slurm job 7, whose srun runs the bash text `then`."""
    job.launcher("srun", then=then)
    end = {"SLURM_JOB_END_TIME": str(int(time.time() + left_s))}
    text = script("generic_slurm", command=("./program",), **options)
    return job.run(text, **slurm(job, 1, SLURM_JOB_ID=job_id, **end))


def state(job: Sandbox) -> str:
    return (folder(job) / "state").read_text()


# Exit code 75


def test_exit_code_75_after_a_checkpoint_requeues_the_job(job: Sandbox) -> None:
    done = run(job, f"{TOUCH} exit 75")
    assert (done.returncode, calls(job, "scontrol")) == (75, ["requeue 7"])
    assert state(job) == "requeue - the program exited with code 75\n", "the program does not record its step"
    assert (
        b"ddp-hpc: stopped: the program exited with code 75; "
        b"this job is requeued, and attempt 2 resumes the run\n"
    ) in done.stdout


def test_exit_code_75_without_a_checkpoint_requeues_nothing_and_explains_what_to_do(job: Sandbox) -> None:
    done = run(job, "exit 75")
    assert (done.returncode, calls(job, "scontrol")) == (75, [])
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("error: the program exited with code 75, but no checkpoint was recorded; ")
    assert "touch the file $DDP_HPC_PROGRESS_FILE, or name the checkpoints with --progress" in line


# Completion


def test_a_program_that_has_completed_is_not_run_again_by_a_requeued_job(job: Sandbox) -> None:
    assert run(job, "exit 0").returncode == 0
    assert state(job) == "done 0\n"
    job.record.unlink()
    done = run(job, "exit 0")
    assert done.stdout == b"ddp-hpc: the program has completed; attempt 2 has nothing to do\n"
    assert not job.record.exists()


def test_a_script_that_is_submitted_again_runs_a_completed_program_again(job: Sandbox) -> None:
    run(job, "exit 0")
    job.record.unlink()
    assert run(job, "exit 0", job_id="8").returncode == 0
    assert job.record.exists()


# The signal before the end of the walltime

# A program that saves on SIGTERM and then exits with this code.
SAVES = f"""trap '{TOUCH} exit {{code}}' TERM
echo $$ >rank.tmp; mv rank.tmp rank
for ((i = 0; i < 400; i++)); do sleep 0.05; done"""
SCANCEL = '#!/bin/bash\n[[ $1 == --signal=* ]] && kill "-${1#--signal=}" "$(cat rank)"\n'


def test_with_requeue_on_signal_a_program_ended_by_the_deadline_is_resumed(job: Sandbox) -> None:
    job.program("scancel", SCANCEL)
    done = run(job, SAVES.format(code=1), left_s=4.0, requeue="on-signal", signal="TERM@2")
    assert (done.returncode, calls(job, "scontrol")) == (75, ["requeue 7"])
    assert state(job) == "requeue - the walltime is about to end\n"


def test_a_user_who_cancels_the_job_is_obeyed_also_with_requeue_on_signal(job: Sandbox) -> None:
    job.launcher("srun", then=SAVES.format(code=1))
    job.program("scancel", SCANCEL)
    environ = slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    text = script("generic_slurm", command=("./program",), requeue="on-signal")
    with running(job, text, environ) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert (process.returncode, calls(job, "scontrol")) == (1, [])


# Wrong requests


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing option '--scheduler'"),
        (["--scheduler", "slurm", "--script", "x"], "no launch command was given"),
        (["--scheduler", "slurm", "--script", "x", "--", "true"], "--script x cannot be read"),
        (["--scheduler", "slurn", "--script", "x", "--", "true"], "'slurn' is not one of"),
        (["--scheduler", "slurm", "--script", "x", "--walltime", "1x", "--", "true"], "1x"),
        (
            ["--scheduler", "slurm", "--script", "x", "--signal", "HUP@5", "--", "true"],
            "is not NAME@SECONDS with TERM, INT, USR1 or USR2",
        ),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    argv = [sys.executable, "-m", "ddp_hpc.job", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("from mpi4py import MPI\nimport torch\ntorch.rand(MPI.COMM_WORLD.size)\n", True),
        ("from mpi4py import MPI\nimport torch\ntorch.distributed.init_process_group()\n", False),
        ("from mpi4py import MPI\nimport own_package\n", False),  # which may use torch
    ],
)
def test_torchrun_does_not_start_a_program_whose_ranks_would_be_separate_mpi_worlds(
    job: Sandbox, text: str, is_refused: bool
) -> None:
    (job.work / "uses_mpi.py").write_text(text)
    job.launcher("srun")
    command = ("python", "uses_mpi.py")
    done = job.run(script("generic_slurm", launcher="torchrun", command=command), **slurm(job, 1))
    assert (done.returncode, job.record.exists()) == ((2, False) if is_refused else (0, True))
    assert (b"error: the program uses mpi4py and not torch.distributed, but MPI does" in done.stderr) == (
        is_refused
    )
