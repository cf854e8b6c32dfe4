"""The output of a rank: all of it goes to a file that this node writes, and a part to the log of the job.

The launcher sends what ranks print through the first node, which thousands of ranks can overload. With
`--rank-logs`, the log of the job gets only the output of rank 0, and the warnings and errors of all ranks.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.attempt_end import place_of_end, rank_log
from ddp_hpc.discovery.problem_lines import MAX_LINES, ProblemLines
from ddp_hpc.discovery.silence import limit_in
from ddp_hpc.discovery.world import short_hostname

RANK_LOGS = "DDP_HPC_RANK_LOGS"
_CHUNK_BYTES = 64 * 1024
_POLL_MS = 500
# The program has ended, but a hanging file system can delay the rest of its output.
_REST_S = 10.0
_STDOUT, _STDERR = 1, 2


def open_output(environ: Mapping[str, str], rank: int) -> RankOutput | None:
    """Returns where the output of this rank goes; None if nothing reads it before the launcher does."""
    place, host = place_of_end(environ), short_hostname()
    if place is None:
        return None
    run_dir, attempt = place
    if environ.get(RANK_LOGS) == "1":
        return RankOutput(run_dir / rank_log(attempt.split()[0], host, rank), rank, host)
    return RankOutput(None, rank, host) if limit_in(environ) is not None else None


class RankOutput:
    """Copies what the program of one rank writes to the file `path`, and a part to the log of the job.

    Without a file, or if it cannot be written, the log of the job gets everything.
    """

    def __init__(self, path: Path | None, rank: int, host: str) -> None:
        self._path, self._is_rank_0, self._label = path, rank == 0, f"[rank {rank} {host}] ".encode()
        self._problems = {_STDOUT: ProblemLines(), _STDERR: ProblemLines()}
        self._num_forwarded = 0
        self.num_bytes = 0
        """The size of the output until now."""
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self._streams = {out: _STDOUT, err: _STDERR}
        self._file: int | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                self._give_up(error)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    @property
    def failure(self) -> tuple[str, str]:
        """The last exception of the program, such as `ValueError: bad width`, and its traceback."""
        return self._problems[_STDERR].exception, self._problems[_STDERR].traceback

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the program. A crash would lose what Python keeps in its buffer."""
        return {"PYTHONUNBUFFERED": "1", **environ, RANK_LOGS: "0"}

    def begin(self) -> None:
        """Starts to copy; the program has been started with `stdout` and `stderr`."""
        os.close(self.stdout)
        os.close(self.stderr)
        self._thread.start()

    def end(self) -> None:
        """Copies the rest after the end of the program. Its child processes may still have the streams."""
        self._has_ended.set()
        self._thread.join(_REST_S)

    def _copy(self) -> None:
        poll, num_open = select.poll(), len(self._streams)
        for fd in self._streams:
            poll.register(fd, select.POLLIN)
        while num_open:
            has_ended = self._has_ended.is_set()
            ready = poll.poll(0 if has_ended else _POLL_MS)
            if has_ended and not ready:
                break
            for fd, _ in ready:
                chunk = os.read(fd, _CHUNK_BYTES)
                self.num_bytes += len(chunk)
                self._write(self._streams[fd], chunk)
                if not chunk:
                    poll.unregister(fd)
                    num_open -= 1

    def _write(self, stream: int, chunk: bytes) -> None:
        """Writes a part of the output; an empty one is the end, and completes the last line."""
        if self._file is not None:
            try:
                _write_all(self._file, chunk)
            except OSError as error:
                self._give_up(error)
        problems = self._problems[stream].new(chunk or b"\n")
        if self._is_rank_0 or self._file is None:
            _to_job_log(stream, chunk)
            return
        for line in problems[: MAX_LINES - self._num_forwarded]:
            self._num_forwarded += 1
            _to_job_log(stream, (b"" if line.startswith(b"[rank ") else self._label) + line + b"\n")
            if self._num_forwarded == MAX_LINES:
                self._say(f"further warnings and errors of this rank are only in {self._path}")

    def _give_up(self, error: OSError) -> None:
        self._file = None
        self._say(
            f"warning: {self._path} cannot be written ({error.strerror}); the output of this rank goes to "
            "the log of the job"
        )

    def _say(self, text: str) -> None:
        _to_job_log(_STDERR, self._label + text.encode("utf-8", "surrogateescape") + b"\n")


def _to_job_log(stream: int, content: bytes) -> None:
    with suppress(OSError):  # the program continues if the disk is full
        _write_all(stream, content)


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]
