"""Runs scheduler commands, with limits on time and output, and with retries.

No shell is used. Queries are retried if the scheduler was too busy to answer.
To avoid duplicate jobs, submissions are retried only if they cannot have reached the scheduler.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.text_table import printable

QUESTION_LIMIT_S = 30.0
# A busy controller may take long to accept a job.
SUBMISSION_LIMIT_S = 60.0
# A background process, such as the logger of a wrapper, may keep the output open after the program ends.
DRAIN_S = 1.0
_LOOK_S = 0.1
# Delays in seconds before the second and the third attempt.
PAUSES_S = (1.0, 3.0)
# The same delays for a job that ends soon, and cannot be resumed later.
_LONG_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_LEAST_LIMIT_S = 2.0
_running: set[int] = set()
# Limit on the output. For a job array of 10,000 tasks, the limit of OpenPBS, qstat was seen to print 15 MB.
MAX_BYTES = 64 * 1024 * 1024

# Messages of Slurm (slurm_errno.c) and PBS (pbs_error.h, clients) if the server could not be reached.
_UNREACHED = re.compile(
    r"unable to contact slurm controller \(connect|connection refused|cannot connect to server|"
    r"failed to connect|no route to host|network is unreachable",
    re.IGNORECASE,
)
# The server may have received the request, but the reply was lost. Only full messages are matched, since
# rejections may contain "try again later" too. `scontrol requeue` of Slurm 22.05 hides all errors of the
# connection behind "Unexpected message received".
_LOST = re.compile(
    r"unexpected message received|unable to contact slurm controller|slurm temporarily unable|"
    r"(?:socket|connection|operation) timed out|zero bytes were transmitted|communication failure|"
    r"resource temporarily unavailable|transport endpoint is not connected|server is busy|"
    r"^(?:q[a-z]+: )?end of file",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command. Bytes that are not UTF-8 become surrogates."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The error message of the command on one line, without control characters and the last full stop."""
        lines = [printable(line.strip()) for line in (self.err or self.out)[:4000].splitlines()]
        text = "; ".join(line for line in lines if line)
        return text[:400].rstrip(".") or f"no message, exit code {self.code}"


class NoAnswerError(DdpHpcError):
    """The scheduler could not be reached or did not answer; exit code 1."""


def need(program: str, why: str) -> None:
    """Checks that the program is on the PATH, and raises RequestError otherwise."""
    if shutil.which(program) is None:
        raise RequestError(
            f"{program} was not found on the PATH; {why}. Run this on a login node of the cluster, or "
            f"load the module that provides {program}."
        )


def ask(*argv: str) -> Answer:
    """Runs a query, with up to three attempts if the scheduler does not answer.

    Raises:
        NoAnswerError: no attempt was answered, or the output exceeds MAX_BYTES.
    """
    return _patiently(argv, QUESTION_LIMIT_S, (_UNREACHED, _LOST))


def submit(*argv: str, environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Answer:
    """Runs a command that queues or cancels a job. It is retried only if it did not reach the scheduler.

    Raises:
        NoAnswerError: it is unknown whether the scheduler got the request, or it cannot be reached.
    """
    return _checked(argv, _patiently(argv, SUBMISSION_LIMIT_S, (_UNREACHED,), environ, cwd))


def submit_until(
    argv: Sequence[str],
    until_s: float,
    on_unreachable: Callable[[str], None],
    *,
    may_repeat: bool = False,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Answer:
    """Runs a command that queues a job until the scheduler can be reached, at the latest until `until_s`.

    `until_s` is a time of `time.monotonic`. `on_unreachable` is called once, with the first error message.
    With `may_repeat`, the command is also repeated if its answer was lost, because it has no effect twice.

    Raises:
        NoAnswerError: it is unknown whether the scheduler got the request.
    """
    for number, pause_s in enumerate(chain(_LONG_PAUSES_S, repeat(_LONG_PAUSES_S[-1]))):
        limit_s = min(SUBMISSION_LIMIT_S, max(_LEAST_LIMIT_S, until_s - time.monotonic()))
        problem: Answer | NoAnswerError
        try:
            problem = run(argv, limit_s, environ, cwd)
            if problem.code == 0 or not _UNREACHED.search(problem.err):
                return _checked(argv, problem)
        except NoAnswerError as error:
            if not may_repeat:
                raise
            problem = error
        left_s = until_s - time.monotonic()
        if left_s < _LEAST_LIMIT_S:
            if isinstance(problem, NoAnswerError):
                raise problem
            return problem
        if number == 0:
            on_unreachable(problem.said if isinstance(problem, Answer) else str(problem))
        time.sleep(min(pause_s, left_s / 2))
    raise AssertionError("unreachable")


@contextmanager
def held_interrupt(program: str) -> Iterator[Callable[[], bool]]:
    """Defers the first Ctrl-C, because a job may be queued; yields a function that returns whether Ctrl-C was
    pressed.

    Raises:
        NoAnswerError: a second Ctrl-C interrupts, and it is unknown whether a job was queued.
    """
    came: list[int] = []

    def hold(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            raise NoAnswerError(
                f"interrupted before {program} answered. It is unknown whether a job was queued. Check "
                "your jobs before you try again."
            )
        os.write(
            2,
            f"\nwaiting for {program}, as the job may be queued already; press Ctrl-C again to give "
            "up\n".encode(),
        )

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


def _checked(argv: Sequence[str], answer: Answer) -> Answer:
    if answer.code != 0 and _LOST.search(answer.err):
        raise NoAnswerError(
            f"{argv[0]} reports: {answer.said}. It is unknown whether the request was accepted. Check "
            "your jobs before you try again."
        )
    return answer


def _patiently(
    argv: Sequence[str],
    limit_s: float,
    retried: Sequence[re.Pattern[str]],
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Answer:
    for pause_s in (*PAUSES_S, None):
        answer = run(argv, limit_s, environ, cwd)
        if answer.code == 0 or not any(pattern.search(answer.err) for pattern in retried):
            return answer
        if pause_s is not None:
            time.sleep(pause_s)
    raise NoAnswerError(
        f"{argv[0]} failed {len(PAUSES_S) + 1} times: {answer.said}. Try again later, or ask the site's "
        f"support whether the scheduler is running."
    )


def running() -> set[int]:
    """Returns the processes of the commands that are running now, for example in other threads."""
    return set(_running)


def run(
    argv: Sequence[str], limit_s: float, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> Answer:
    """Runs a command once.

    Raises:
        NoAnswerError: it cannot be started, does not end within `limit_s`, or prints more than MAX_BYTES.
    """
    environ = dict(environ)
    # With this variable, scontrol and sacct would print times in a format that ddp-hpc cannot read.
    environ.pop("SLURM_TIME_FORMAT", None)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            cwd=cwd,
            start_new_session=True,  # so that its children can be killed too
        )
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"cannot start {argv[0]}; check that the scheduler's module is loaded") from error
    with process:
        _running.add(process.pid)
        try:
            out, err = _read(process, argv[0], limit_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            _running.discard(process.pid)
    return Answer(process.returncode, out, err)


def _read(process: subprocess.Popen[bytes], name: str, limit_s: float) -> tuple[str, str]:
    """Returns stdout and stderr up to their ends, or up to DRAIN_S after the program has ended.

    communicate() is not used, since a program that never stops writing would fill the memory.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    end_s, ended = time.monotonic() + limit_s, False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, err)
        while selector.get_map():
            if not ended and process.poll() is not None:
                ended, end_s = True, min(end_s, time.monotonic() + DRAIN_S)
            left_s = end_s - time.monotonic()
            if left_s <= 0 and ended:
                break
            if left_s <= 0:
                raise NoAnswerError(
                    f"{name} did not answer within {limit_s:g} s. If it submits or cancels a job, check "
                    "whether it did; otherwise try again later."
                )
            for key, _ in selector.select(min(left_s, _LOOK_S)):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
            if len(out) + len(err) > MAX_BYTES:
                raise NoAnswerError(
                    f"{name} printed more than {MAX_BYTES} bytes, which cannot be a valid answer. Run it "
                    "manually to see its output."
                )
    try:
        process.wait(max(0.1, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{name} did not end within {limit_s:g} s. Try again later.") from None
    return out.decode("utf-8", "surrogateescape"), err.decode("utf-8", "surrogateescape")
