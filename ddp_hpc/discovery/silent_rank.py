"""What the parent of a rank's program does with --idle-timeout: it watches the output of the program, and
reports where the program is while the whole run is silent (see `silence`).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_hpc.base.attempt_end import place_of_end, read_end
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.python_stacks import (
    Dumps,
    Family,
    Frame,
    Stacks,
    num_waits,
    stacks_by_py_spy,
    state_of,
)
from ddp_hpc.discovery.silence import (
    IDLE_TIMEOUT,
    Silence,
    SilentRank,
    limit_in,
    open_period_s,
    period_s,
    stacks_directory,
    write_report,
)
from ddp_hpc.discovery.world import World, short_hostname

_END_S = 30.0
# When something is written to the pipe that torch (2.8 to 2.13) creates, NCCL's process groups write their
# flight record. Not tested on a GPU.
_PIPE_STEM, _PIPE_REQUEST = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "DDP_HPC_NCCL_PIPE"


def watch_for_silence(environ: Mapping[str, str], world: World) -> RankWatch | None:
    """Returns the watch for this rank; None without --idle-timeout."""
    place, limit_s = place_of_end(environ), limit_in(environ)
    return None if place is None or limit_s is None else RankWatch(*place, limit_s, world, environ)


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float


@dataclass(frozen=True)
class _Place:
    """Since when the main thread has been at the same lines, and how often it had waited at the last look."""

    frames: tuple[Frame, ...] = ()
    since_s: float = 0.0
    num_waits: int = 0


class RankWatch:
    """Watches the program of one rank in a thread.

    Args:
        run_dir: the run directory.
        attempt: the value of DDP_HPC_THIS_ATTEMPT.
        limit_s: the limit of --idle-timeout.
        world: this rank.
        environ: the environment of the program.
    """

    def __init__(
        self, run_dir: Path, attempt: str, limit_s: float, world: World, environ: Mapping[str, str]
    ) -> None:
        self._run_dir, self._attempt, self._limit_s, self._world = run_dir, attempt, limit_s, world
        self._environ = environ
        self._silence = Silence(run_dir, limit_s, world.world_size)
        self._may_kill_s = 0.0
        self._dumps = Dumps()
        self._samples: deque[_Sample] = deque()
        self._same = _Place()
        self._report: Path | None = None
        # torch ends the program if it cannot create the pipe. The directory is therefore new, since the name
        # could be that of a file of another user, and the program gets the name only if the directory exists
        # where it runs, which can be a container (see `at_python_start`).
        self._directory = tempfile.TemporaryDirectory(prefix="ddp-hpc-", ignore_cleanup_errors=True)
        self._pipe_stem = environ.get(_PIPE_STEM) or f"{self._directory.name}/rank_"
        self._pipe = Path(f"{self._pipe_stem}{world.rank}.pipe")
        self._has_ended = threading.Event()

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the program."""
        return {**self._dumps.environ(environ), IDLE_TIMEOUT: "", _PIPE_REQUEST: self._pipe_stem}

    def begin(self, pid: int, output_bytes: Callable[[], int]) -> None:
        """Starts to watch the process; `output_bytes` returns how much it has written until now."""
        self._thread = threading.Thread(target=self._watch, args=(pid, output_bytes), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the watch after the program has ended."""
        self._has_ended.set()
        self._thread.join(_END_S)
        self._directory.cleanup()
        if self._report is not None and not self.has_hung():
            self._report.unlink(missing_ok=True)  # this rank does not answer any more

    def has_hung(self) -> bool:
        """Returns whether the supervisor ends the run because of a hang."""
        end = read_end(self._run_dir, self._attempt)
        return end is not None and end.cause is Cause.HANG

    def may_be_killed(self) -> bool:
        """Returns whether the run is ended because of a hang. Looks at once, and later now and then."""
        if time.monotonic() < self._may_kill_s:
            return False
        self._may_kill_s = time.monotonic() + open_period_s(self._world.world_size)
        return self.has_hung()

    def _watch(self, pid: int, output_bytes: Callable[[], int]) -> None:
        num_bytes = 0
        while not self._has_ended.wait(period_s(self._limit_s, self._world.world_size)):
            before, num_bytes = num_bytes, output_bytes()
            with suppress(OSError):  # a process has just ended, for example
                self._look(pid, is_active=num_bytes > before)

    def _look(self, pid: int, *, is_active: bool) -> None:
        silent_s = self._silence.look(is_active=is_active)
        if silent_s < self._limit_s / 2:
            self._samples.clear()
            self._same = _Place()
            if self._report is not None:
                self._report.unlink(missing_ok=True)
                self._report = None
            return
        now_s, family = time.monotonic(), Family.of(pid)
        self._samples.append(_Sample(now_s, family.cpu_s()))
        while len(self._samples) > 2 and now_s - self._samples[1].at_s >= self._limit_s / 2:
            self._samples.popleft()
        if silent_s < self._limit_s or self.has_hung():
            return
        main_pid = family.python() or pid
        before = num_waits(main_pid)
        stacks = stacks_by_py_spy(family, self._environ) or self._dumps.stacks(family) or Stacks("", ())
        if stacks.main != self._same.frames or before != self._same.num_waits:
            self._same = _Place(stacks.main, since_s=now_s)
        self._same = replace(self._same, num_waits=num_waits(main_pid))  # py-spy makes it wait
        # The report on a program that is being ended because of the hang would replace the useful one.
        if self.has_hung() or state_of(main_pid) == "Z":
            return
        if self._report is None:
            self._request_flight_record()
        first, last = self._samples[0], self._samples[-1]
        report = SilentRank(
            rank=self._world.rank,
            world_size=self._world.world_size,
            host=short_hostname(),
            state=state_of(main_pid),
            cpu_share=(last.cpu_s - first.cpu_s) / max(last.at_s - first.at_s, 1e-3),
            same_s=now_s - self._same.since_s,
            frames=stacks.main,
        )
        self._report = write_report(stacks_directory(self._run_dir, self._attempt), report, stacks.text)

    def _request_flight_record(self) -> None:
        with suppress(OSError):  # the program does not use NCCL
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(pipe, "wb", buffering=0) as file:
                file.write(b"1")
