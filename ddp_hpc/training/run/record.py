"""What is recorded on disk about a run: its state, its options, and how the attempt ended.

Rank 0 writes the state of a run that proceeds, and the rank that reports an error that of a run that fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.attempt_end import AttemptEnd, is_replaced, place_of_end, remove_end, write_end
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import COMPLETE, State, Stop
from ddp_hpc.base.run_state import RunState, read_state, write_state
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.base.toml_options import as_toml
from ddp_hpc.training.config import TrainConfig

_HUNG_DISK_S = 2.0


@dataclass(frozen=True)
class Spent:
    """The seconds in which this process has waited for snapshots and for data until the time `at_s`."""

    at_s: float
    save_s: float
    data_s: float


class RunRecord:
    """The files of one attempt in the run directory; None stands for a run that is not recorded.

    `say` prints a line. `is_taken_over` is whether another job has taken over the directory; then the
    files belong to it.
    """

    def __init__(self, run: Path | None, *, is_rank_0: bool, say: Callable[[str], None]) -> None:
        self._run, self._is_rank_0, self._say = run, is_rank_0, say
        self.is_taken_over: Callable[[], bool] = lambda: False
        self._start_step: int | None = None  # None until the attempt has resumed
        self._restore_s = 0.0
        self._is_open = self.has_begun = self._has_failed = False
        self._writing = threading.Lock()  # prevents the saving thread from overwriting `failed`

    def opened(self) -> None:
        """From now on, this attempt owns the run directory, so that a failure is recorded there."""
        self._is_open = True

    def resumed(self, step: int, restore_s: float) -> None:
        """Sets the step at which this attempt starts. Another job resumes a failed run only if it has passed
        this step. `restore_s` is the time for reading the snapshot.
        """
        self._start_step, self._restore_s = step, restore_s

    def begun(self, config: TrainConfig) -> None:
        """Records that the run is running. Call it when no more errors of the user are possible: a start
        that is refused must not change the state of the run.
        """
        assert self._start_step is not None  # `resumed` was called
        self.has_begun = True
        if self._is_rank_0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            _forget_end()
        if self._run is not None and self._is_rank_0:
            keep_config(self._run, config)
        self._write(State.RUNNING, self._start_step, f"since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._note(Moment.STEPS_BEGAN, {"step": self._start_step, "restore_s": self._restore_s})

    def saved(self, step: int, spent: Spent, *, is_rank_lost: bool) -> None:
        """Records the step of a complete snapshot. Called in the thread that saves."""
        self._note(Moment.SAVED, {"step": step, **asdict(spent)})
        with self._writing:
            state, reason = State.RUNNING, "saved a snapshot"
            if self._has_failed or is_rank_lost:
                # Keep the state that a rank has written about its failure, but not its step: the run would
                # not be resumed after its first snapshot.
                if self.is_taken_over():
                    return
                state, reason = self._failure() or (state, reason)
            self._write(state, step, reason)

    def _failure(self) -> tuple[State, str] | None:
        before = None
        if self._run is not None:
            with suppress(DdpHpcError):
                before = read_state(self._run)
        return (before.state, before.reason) if before is not None and before.state.is_final else None

    def steps_ended(self, step: int, spent: Spent) -> None:
        """Records that there are no more steps, and that their result is complete."""
        self._note(Moment.STEPS_ENDED, {"step": step, **asdict(spent)})

    def ended(self, step: int, stop: Stop | None) -> None:
        """Records that the training is complete, or why it stops early with its state saved."""
        if self._is_rank_0:
            ended = record_stop(os.environ, stop or COMPLETE, step)
            self._write(ended.state, ended.step, ended.reason)

    def failing(self) -> None:
        """From now on, snapshots that become complete no longer change the state."""
        self._has_failed = True

    def failed(self, end: AttemptEnd) -> None:
        """Records that the attempt has ended with an error; any rank may call this."""
        self.failing()
        place = place_of_end(os.environ)
        if self.is_taken_over() or (place is not None and is_replaced(*place)):
            return
        record_end(os.environ, end)
        if self._run is None or not self._is_open:
            return
        # If the disk hangs, the saving thread keeps the lock: write without it, so that this process ends.
        locked = self._writing.acquire(timeout=_HUNG_DISK_S)
        with suppress(DdpHpcError):  # report the first error
            self._write_failed(self._run, end)
        if locked:
            self._writing.release()

    def _write_failed(self, run: Path, end: AttemptEnd) -> None:
        before = read_state(run)
        step = before.step if before is not None else 0
        state = end.cause.state_of_run(
            has_progressed=self._start_step is not None and step > self._start_step
        )
        if state is None:
            return
        if before is not None and not before.state.may_become(state, in_same_attempt=self.has_begun):
            return  # the run has already ended, or another rank has reported its failure
        write_state(run, RunState(state, step, end.reason))

    def _note(self, moment: Moment, details: dict[str, Any]) -> None:
        if self._is_rank_0 and (place := place_of_end(os.environ)):
            note(*place, moment, **details)

    def _write(self, state: State, step: int, reason: str) -> None:
        if self._run is None or not self._is_rank_0:
            return
        try:
            write_state(self._run, RunState(state, step, reason))
        except DdpHpcError as error:
            self._say(f"WARNING: {error}. The job script will not know that the run has reached step {step}")


def record_stop(environ: Mapping[str, str], stop: Stop, step: int) -> RunState:
    """Records that this attempt ends on purpose, with its state saved; returns the state of the run."""
    end = AttemptEnd(cause=stop.cause, exit_code=stop.cause.exit_code, reason=stop.reason, step=step)
    record_end(environ, end, replace=True)
    return RunState(stop.state, step, stop.reason)


def record_end(environ: Mapping[str, str], end: AttemptEnd, *, replace: bool = False) -> None:
    """Records the end of this attempt for the supervisor of the job, if there is one."""
    if place := place_of_end(environ):
        with suppress(DdpHpcError):  # report the first error
            write_end(*place, end, replace=replace)


def _forget_end() -> None:
    """Removes the end that this attempt recorded before torchrun restarted its ranks."""
    if place := place_of_end(os.environ):
        remove_end(place[0])


def record_done_without_snapshots(environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Tells the supervisor of the job that the training is complete, although the run is not resumed.

    Otherwise, it could not distinguish this end from that of ranks that were lost without a message.
    """
    run = environ.get("DDP_HPC_RUN_DIR", "")
    if run and "DDP_HPC_THIS_ATTEMPT" in environ:
        try:
            write_state(Path(run), RunState(State.DONE, 0, "training complete, without snapshots"))
        except DdpHpcError as error:
            say(f"WARNING: {error}. The job will not know that the training is complete")


def keep_config(run: Path, config: TrainConfig) -> None:
    """Writes the options of this attempt to `config.toml` in the run directory, for `--config`."""
    # If tomli_w is not installed, for example, the run continues without the record of its options.
    with suppress(DdpHpcError, ModuleNotFoundError):
        write_atomically(run / "config.toml", as_toml(config).encode(), "config")
