"""Watches whether the ranks of an attempt are silent for too long (--idle-timeout)."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from ddp_hpc.discovery.silence import Silence, period_s, read_reports, stacks_directory
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.hang_reason import hang_of
from ddp_hpc.supervisor.job_log import say
from ddp_hpc.supervisor.run_files import RunFiles

_PERIOD_S = 2.0
# py-spy reads the stack of a large program, and a busy file system creates the reports.
_ANSWER_S = 30.0


class IdleWatch:
    """The watch of one attempt.

    Args:
        limit_s: the limit of --idle-timeout.
        files: the files of the run.
        attempt: this attempt.
        progress: the checkpoints of the program.
    """

    def __init__(self, limit_s: float, files: RunFiles, attempt: Attempt, progress: Progress) -> None:
        self._limit_s, self._files, self._attempt, self._progress = limit_s, files, attempt, progress
        self._directory = stacks_directory(files.path, attempt.key)
        self._period_s = min(period_s(limit_s), _PERIOD_S)
        self._silence = Silence(files.path, limit_s)
        self._silence.look(is_active=True)
        self._next_s, self._walked_s = 0.0, 0.0
        self._walk: threading.Thread | None = None
        self._newest_ns = self._seen_ns = progress.before_ns
        self._stamp = files.state().stamp
        self._was_said = False
        with suppress(OSError):  # of a start with the same number that was refused
            for path in self._directory.glob("rank-*.txt"):
                path.unlink()

    def hang(self) -> str:
        """Returns why the run hangs, and records it as the end of the attempt; empty if it does not."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + self._period_s
        silent_s = self._silence.look(is_active=self._has_saved(now_s))
        if silent_s < self._limit_s:
            self._was_said = False
            return ""
        if self._walk is not None and silent_s < 2 * self._limit_s:  # it may find a checkpoint
            return ""
        self._next_s = now_s + period_s(self._limit_s)  # the reports of thousands of ranks are read
        reports = read_reports(self._directory)
        num_ranks = reports[0].world_size if reports else 0
        if (
            len(reports) < (num_ranks or 1)
            and silent_s < self._limit_s + 2 * period_s(self._limit_s) + _ANSWER_S
        ):
            return ""
        end = hang_of(reports, self._limit_s, self._directory) if reports else None
        if end is not None:
            self._files.write_end(self._attempt, end)
            return f"hang: {end.reason}"
        if not self._was_said:
            self._was_said = True
            what = "but all ranks use CPU time, so that the run continues"
            if not reports:
                what = "and no rank reports where it is, so that hangs are not noticed; use ddp-hpc exec"
            say(f"ddp-hpc: no output or checkpoint for {silent_s:.0f} s, {what}")
        return ""

    def _has_saved(self, now_s: float) -> bool:
        before, self._stamp = self._stamp, self._files.state().stamp
        return self._has_saved_files(now_s) or self._stamp != before

    def _has_saved_files(self, now_s: float) -> bool:
        # A directory can contain many checkpoints on a slow file system, and signals must not wait meanwhile.
        if self._walk is None and now_s >= self._walked_s + period_s(self._limit_s):
            self._walk = threading.Thread(target=self._find_newest, daemon=True)
            self._walk.start()
        if self._walk is None or self._walk.is_alive():
            return False
        self._walk, self._walked_s = None, now_s
        before, self._seen_ns = self._seen_ns, self._newest_ns
        return self._seen_ns != before

    def _find_newest(self) -> None:
        self._newest_ns = self._progress.last_change_ns()
