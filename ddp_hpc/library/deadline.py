"""`ddp_hpc.deadline`: tells a training loop that saves its own checkpoints when to stop."""

from __future__ import annotations

import atexit
import math
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, SupportsIndex

from ddp_hpc.base.errors import EXIT_DONE, EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import REQUESTED, Stop
from ddp_hpc.base.run_state import write_state
from ddp_hpc.discovery.launcher_environment import ADDED_BY_EXEC
from ddp_hpc.schedulers.deadline import current_end_s, find_deadline
from ddp_hpc.training.health.rank_report import RankReport
from ddp_hpc.training.run.record import record_stop
from ddp_hpc.training.run.stop_protocol import MOST_STEPS_OF_SCRIPT, ExchangeSchedule, OwnRequest

# SIGINT is not among these signals, because Ctrl-C interrupts the program as usual.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def deadline(margin_s: float = 120.0) -> JobDeadline:
    """Returns the deadline of this job, and lets `should_stop` react to SIGTERM, SIGUSR1 and SIGUSR2.

    Call it once on every rank, in the main thread. docs/how-to/frameworks.md has an example.

    Args:
        margin_s: how long before the end of the walltime `should_stop` returns True. The time must suffice
            for one training step and for saving a checkpoint.

    Raises:
        RequestError: the margin is negative, DDP_HPC_DEADLINE is not a time, or this is not the main thread.
    """
    return JobDeadline(margin_s, os.environ)


class JobDeadline:
    """The end of this job's walltime. Created by `ddp_hpc.deadline`."""

    def __init__(self, margin_s: float, environ: Mapping[str, str]) -> None:
        if not 0 <= margin_s < math.inf:
            raise RequestError(f"margin_s must be a number of seconds of at least 0 (got {margin_s})")
        self._margin_s = margin_s
        self._environ = environ
        # The other ranks follow rank 0, which asks the scheduler for changes.
        self._is_first = environ.get("RANK", "0") == "0"
        ends = find_deadline(environ, may_ask=self._is_first)
        self._own = OwnRequest(ends, partial(current_end_s, environ) if self._is_first else None)
        self._calls = 0
        self._exchanges = ExchangeSchedule(1, most_steps=MOST_STEPS_OF_SCRIPT)
        self._stop: Stop | None = None
        self._replaced: dict[int, Any] = {}
        self.handle_signals()
        atexit.register(_wait_for_gloo)

    def handle_signals(self) -> None:
        """Installs the signal handlers again, if other code has replaced them.

        Raises:
            RequestError: this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RequestError("ddp_hpc.deadline() handles signals; call it in the process's main thread")
        for number in _SIGNALS:
            replaced = signal.signal(number, self._on_signal)
            self._replaced.setdefault(number, signal.SIG_DFL if replaced is None else replaced)

    def restore_signals(self) -> None:
        """Restores the signal handlers from before `ddp_hpc.deadline`. Call this after the last step."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def left_s(self) -> float:
        """Returns the seconds until the end of the walltime; infinite if it is unknown."""
        return (self._own.deadline_s or math.inf) - time.time()

    @property
    def reason(self) -> str:
        """Why the program must stop; empty until `should_stop` has returned True."""
        return self._stop.reason if self._stop is not None else ""

    def should_stop(self) -> bool:
        """Returns whether the program must save a checkpoint and stop, with the same result on all ranks.

        True if the walltime ends within `margin_s`, or if a rank has received a signal. Ranks exchange
        this once per second, or in each call if the calls are further apart; other calls return at once.

        Collective: every rank must call this the same number of times, such as after each training step.

        Raises:
            RequestError: WORLD_SIZE is greater than 1, and there is no process group.
        """
        self._calls += 1
        if self._stop is not None or not self._exchanges.is_due(self._calls):
            return self._stop is not None
        interval_s = self._exchanges.mean_step_s(self._calls)
        request = float(self._own.number(self._margin_s))
        own = RankReport(
            request, 0.0, interval_s, interval_s, self._own.deadline_s if self._is_first else 0.0
        )
        reports = _gathered(own, self._environ)
        self._own.follow(max(report.deadline_s for report in reports))
        self._exchanges.exchanged(self._calls, max(report.step_s for report in reports))
        for rank, report in enumerate(reports):
            if report.stop_request:
                self._stop = self._own.stop_for(int(report.stop_request), rank, self._margin_s)
                break
        return self._stop is not None

    def requeue(self, step: SupportsIndex) -> NoReturn:
        """Ends the program after it has saved a checkpoint, so that another job resumes it.

        Raises SystemExit with exit code 75 on rank 0 and 0 on the others. In jobs of `ddp-hpc render`
        and `submit`, the supervisor then requeues the job or submits a successor.

        Collective: every rank must call this.

        Args:
            step: the number of completed steps. A run whose step does not increase is not resumed.

        Raises:
            RequestError: `step` is not a non-negative integer, or this is not the main thread.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)  # also accepts integers of NumPy
        except TypeError:
            number = -1
        if not 0 <= number < 10**18:
            raise RequestError(f"requeue({step!r:.80}): pass the number of completed steps, 0 or greater")
        if threading.current_thread() is not threading.main_thread():
            raise RequestError("requeue() ends the program; call it in the process's main thread")
        rank, torchrun = 0, _is_torchrun(self._environ)
        if group := _process_group():
            group.barrier()  # wait until all ranks have saved their parts of the checkpoint
            rank = group.get_rank()
        if rank:
            raise SystemExit(EXIT_DONE)
        stop = self._stop or REQUESTED
        _record(number, stop, self._environ)
        _complain(stop.line("Checkpoint saved", f" at step {number}"))
        # torchrun restarts ranks that exit with a code other than 0; the supervisor reads the file `state`.
        raise SystemExit(EXIT_DONE if torchrun else EXIT_REQUEUE)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._own.signal = number


def _is_torchrun(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and ADDED_BY_EXEC not in environ


def _process_group() -> ModuleType | None:
    """Returns torch.distributed if the program has a process group."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group: ModuleType = torch.distributed
    return group


def _wait_for_gloo() -> None:
    """At the exit of Python: torch aborts a process that ends while gloo's thread frees a collective, such as
    that of `should_stop`. torchrun would then restart the ranks of a program that has completed.

    DDP can keep gloo's threads alive after the process group was destroyed.
    """
    if "torch" in sys.modules:
        from ddp_hpc.training.process_group.wait_for_gloo import wait_for_gloo

        wait_for_gloo()


def _gathered(own: RankReport, environ: Mapping[str, str]) -> list[RankReport]:
    """Returns the reports of all ranks. Collective."""
    group = _process_group()
    if group is None:
        size = environ.get("WORLD_SIZE", "1")
        if size != "1":
            raise RequestError(
                f"should_stop() was called without a process group, but WORLD_SIZE is {size[:20]}; call "
                "torch.distributed.init_process_group() first, so that all ranks stop after the same step"
            )
        return [own]
    import torch

    values = torch.tensor(own, dtype=torch.float64, device=_device(group, torch))
    rows = [torch.empty_like(values) for _ in range(group.get_world_size())]
    group.all_gather(rows, values)
    return [RankReport(*row) for row in torch.stack(rows).tolist()]


def _device(group: ModuleType, torch: ModuleType) -> Any:
    """Returns a device of the process group: the CPU if possible, which does not wait for the GPU."""
    # For example "cpu:gloo,cuda:nccl", or "gloo" for all devices.
    kinds = group.get_backend_config()
    is_on_cpu = "cpu:" in kinds or kinds in ("gloo", "mpi")
    return torch.device("cpu") if is_on_cpu else torch.accelerator.current_accelerator()


def _record(step: int, stop: Stop, environ: Mapping[str, str]) -> None:
    """Writes the state of the run for the supervisor of the job. Without one, nothing is written."""
    if progress := environ.get("DDP_HPC_PROGRESS_FILE", ""):
        try:
            Path(progress).write_text(f"{step}\n", encoding="utf-8")
        except OSError as error:
            _complain(f"warning: {progress}: cannot be written: {error}")
    if run_dir := environ.get("DDP_HPC_RUN_DIR", ""):
        try:
            write_state(Path(run_dir), record_stop(environ, stop, step))
        except DdpHpcError as error:  # the exit code still requests that the job is run again
            _complain(f"warning: {error}")


def _complain(line: str) -> None:
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
