"""ddp_hpc.deadline: when a training loop stops, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.base.errors import RequestError
from ddp_hpc.library.deadline import JobDeadline
from tests.conftest import Launch
from tests.integrations.conftest import state

# A loop of many short steps. Rank 1 receives the signal that the first argument names.
LOOP = """
import os, signal, sys, time
import torch.distributed as dist
import ddp_hpc
dist.init_process_group("gloo")
deadline = ddp_hpc.deadline(margin_s=10)
for step in range(1, 100_000):
    if step == 20 and len(sys.argv) > 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0.01)
    if deadline.should_stop():
        sys.stdout.write(f"stopped after {step}\\n")
        sys.stdout.flush()
        deadline.requeue(step)
"""
EXEC = (sys.executable, "-m", "ddp_hpc.exec", sys.executable, "-c", LOOP)
PAST = {"DDP_HPC_DEADLINE": "1"}
REASON = "the job's time limit is near (DDP_HPC_DEADLINE; stopping 10 s early to save)"


@pytest.fixture(autouse=True)
def _handlers_are_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def requeued(environ: dict[str, str], step: object = 3) -> int | str | None:
    """Returns the exit code of a program of one process that stops at `step`."""
    deadline = JobDeadline(10.0, environ)
    deadline.should_stop()
    with pytest.raises(SystemExit) as raised:
        deadline.requeue(step)  # type: ignore[arg-type]
    return raised.value.code


@pytest.mark.check
@pytest.mark.parametrize("name", ["SIGUSR2"])
def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(
    launch: Launch, mpiexec: Path, tmp_path: Path, name: str
) -> None:
    env = {"DDP_HPC_RUN_DIR": str(tmp_path)}
    ended = launch([mpiexec, "-n", "2", *EXEC, name], env=env, timeout_s=90)
    assert ended.exit_code == 75, ended.stderr
    word, step, reason = state(tmp_path)
    assert (word, reason.strip()) == ("requeue", f"rank 1 received {name}")
    assert ended.stdout.count(f"stopped after {step}\n") == 2


@pytest.mark.check
def test_under_torchrun_the_exit_code_is_0_and_no_rank_is_restarted(launch: Launch, tmp_path: Path) -> None:
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        program,
    ]
    ended = launch(argv, env={**PAST, "DDP_HPC_RUN_DIR": str(tmp_path)}, timeout_s=90)
    assert ended.exit_code == 0, ended.stderr
    assert state(tmp_path) == ["requeue", "1", f"{REASON}\n"]
    assert ended.stdout.count("stopped after 1") == 2


def test_a_program_ends_only_after_gloo_has_freed_the_last_collective() -> None:
    """If gloo's thread was late, torch aborted the rank, and torchrun restarted all ranks."""
    script = (
        "import ddp_hpc, torch.distributed as dist\n"
        "from ddp_hpc.training.process_group import wait_for_gloo as module\n"
        "module.wait_for_gloo = lambda: print('waits for gloo')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "ddp_hpc.deadline().should_stop()\n"
        "dist.destroy_process_group()\n"
        "print('the script has ended')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert ended.stdout == "the script has ended\nwaits for gloo\n", ended.stderr


def test_a_deadline_in_the_past_stops_the_program_after_the_first_step() -> None:
    deadline = JobDeadline(10.0, PAST)
    assert deadline.reason == ""
    assert deadline.should_stop()
    assert deadline.reason == REASON


def test_the_program_goes_on_while_more_than_the_margin_is_left() -> None:
    deadline = JobDeadline(10.0, {"DDP_HPC_DEADLINE": str(int(time.time()) + 3600)})
    assert not any(deadline.should_stop() for _ in range(1000))
    assert 3000 < deadline.left_s() <= 3600


def test_a_deadline_that_is_not_a_time_is_refused() -> None:
    with pytest.raises(RequestError, match="DDP_HPC_DEADLINE must be a time in seconds since the Unix epoch"):
        JobDeadline(10.0, {"DDP_HPC_DEADLINE": "soon"})


@pytest.mark.parametrize("margin_s", [-1.0, float("nan")])
def test_a_margin_that_is_not_a_duration_is_refused(margin_s: float) -> None:
    with pytest.raises(RequestError, match="margin_s must be a number of seconds"):
        ddp_hpc.deadline(margin_s)


def test_several_ranks_without_a_process_group_are_refused() -> None:
    with pytest.raises(RequestError, match="without a process group, but WORLD_SIZE is 2"):
        JobDeadline(10.0, {"WORLD_SIZE": "2"}).should_stop()


@pytest.mark.parametrize("step", [True, -1, "3"])
def test_a_step_that_is_not_a_number_of_steps_is_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(RequestError, match="pass the number of completed steps"):
        JobDeadline(10.0, {"DDP_HPC_RUN_DIR": str(tmp_path)}).requeue(step)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def in_thread(function: object) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()  # type: ignore[operator]
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_requeue_is_refused_in_a_thread_that_would_not_end_the_program(tmp_path: Path) -> None:
    deadline = JobDeadline(10.0, {"DDP_HPC_RUN_DIR": str(tmp_path)})
    assert isinstance(in_thread(ddp_hpc.deadline), RequestError)
    assert isinstance(in_thread(lambda: deadline.requeue(3)), RequestError)
    assert not list(tmp_path.iterdir())


def test_the_step_is_recorded_in_the_state_and_in_the_progress_file(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    env = {**PAST, "DDP_HPC_RUN_DIR": str(tmp_path), "DDP_HPC_PROGRESS_FILE": str(progress)}
    assert requeued(env) == 75
    assert (state(tmp_path), progress.read_text()) == (["requeue", "3", f"{REASON}\n"], "3\n")


def test_files_that_cannot_be_written_are_reported_and_the_exit_code_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    env = {
        "DDP_HPC_RUN_DIR": str(tmp_path / "file"),
        "DDP_HPC_PROGRESS_FILE": str(tmp_path / "missing" / "p"),
    }
    assert requeued(env) == 75
    error = capsys.readouterr().err
    assert f"warning: {tmp_path}/missing/p: cannot be written: " in error
    assert f"warning: {tmp_path}/file/state: " in error


def test_the_handlers_from_before_are_restored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    deadline = JobDeadline(10.0, {})
    deadline.handle_signals()
    deadline.restore_signals()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    assert after == before
