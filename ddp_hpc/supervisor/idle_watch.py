"""Watches whether the ranks of an attempt are silent for too long (--idle-timeout)."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from ddp_hpc.base.attempt_end import AttemptEnd
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
        self._look: threading.Thread | None = None
        self._found: AttemptEnd | None = None
        self._next_s, self._listed_s, self._read_s = 0.0, 0.0, 0.0
        self._saved: object = (progress.before_ns, files.state().stamp)
        self._was_said = False
        with suppress(OSError):  # of a start with the same number that was refused
            for path in self._directory.glob("rank-*.txt"):
                path.unlink()

    def hang(self) -> str:
        """Returns why the run hangs, and records it as the end of the attempt; empty if it does not.

        It looks in a thread, because checkpoints and reports can be many files on a slow file system, and
        signals must not wait for them.
        """
        if self._look is None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._period_s
            self._look = threading.Thread(target=self._find, daemon=True)
            self._look.start()
        if self._look is None or self._look.is_alive():
            return ""
        self._look = None
        if self._found is None:
            return ""
        self._files.write_end(self._attempt, self._found)
        return f"hang: {self._found.reason}"

    def _find(self) -> None:
        silent_s = self._silence.look(is_active=self._has_saved())
        if silent_s < self._limit_s:
            self._was_said = False
            return
        if time.monotonic() < self._read_s:
            return
        reports = read_reports(self._directory)
        num_ranks = reports[0].world_size if reports else 0
        report_s = period_s(self._limit_s, num_ranks)
        self._read_s = time.monotonic() + report_s
        if len(reports) < (num_ranks or 1) and silent_s < self._limit_s + 2 * report_s + _ANSWER_S:
            return
        self._found = hang_of(reports, self._limit_s, self._directory) if reports else None
        if self._found is None and not self._was_said:
            self._was_said = True
            what = "but all ranks are using CPU time, so the run continues"
            if not reports:
                what = "and no rank reports its position, so hangs cannot be detected; use ddp-hpc exec"
            say(f"ddp-hpc: no output or checkpoint for {silent_s:.0f} s, {what}")

    def _has_saved(self) -> bool:
        if time.monotonic() < self._listed_s + period_s(self._limit_s):
            return False
        before, self._saved = self._saved, (self._progress.last_change_ns(), self._files.state().stamp)
        self._listed_s = time.monotonic()
        return self._saved != before
