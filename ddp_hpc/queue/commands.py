"""A scheduler's commands as processes: with a limit on time and output, and gentle second tries.

Nothing goes through a shell. A question is asked again where the scheduler was too
busy to answer; a submission only where it cannot have arrived, or there would be two jobs.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ddp_hpc.errors import DdpHpcError, RequestError

QUESTION_LIMIT_S = 30.0
# A busy controller takes its time to accept a job.
SUBMISSION_LIMIT_S = 60.0
# What a program has left running, such as a wrapper's logger, may hold its output open long after it.
DRAIN_S = 1.0
_LOOK_S = 0.1
# Before the second and the third try.
PAUSES_S = (1.0, 3.0)
# A job of 10,000 nodes has an answer of some 100 kB.
MAX_BYTES = 8 * 1024 * 1024

# Slurm's slurm_errno.c; PBS's pbs_error.h and its clients: the server was not there to take the request.
_UNREACHED = re.compile(
    r"unable to contact slurm controller \(connect|connection refused|cannot connect to server|"
    r"failed to connect|no route to host|network is unreachable",
    re.IGNORECASE,
)
# It may have taken it, and its answer was lost. Their own sentences: a refusal may say "try again later" too.
_LOST = re.compile(
    r"unable to contact slurm controller|(?:socket|connection|operation) timed out|"
    r"zero bytes were transmitted|resource temporarily unavailable|slurm temporarily unable|"
    r"transport endpoint is not connected|communication failure|^(?:q[a-z]+: )?end of file|server is busy",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Answer:
    """How a command ended; its output with what is no UTF-8 as surrogates."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its complaint on one line, without what a terminal would act upon."""
        lines = [plain(line.strip()) for line in (self.err or self.out)[:4000].splitlines()]
        text = "; ".join(line for line in lines if line)
        return text[:400] or f"nothing, and exit code {self.code}"


class NoAnswerError(DdpHpcError):
    """The scheduler could not be asked, or did not answer: exit code 1."""


def plain(text: str) -> str:
    """`text` without control characters and broken bytes: what others wrote must not steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def need(program: str, why: str) -> None:
    """Raises RequestError unless the program is on the PATH."""
    if shutil.which(program) is None:
        raise RequestError(
            f"{program} was looked for on the PATH and is not there; {why}; run this on a login node of such "
            "a machine, or load the module that has it"
        )


def ask(*argv: str) -> Answer:
    """What a question to the scheduler gives, asked up to three times while nobody answers.

    Raises:
        NoAnswerError: none of the tries was answered, or with more than MAX_BYTES.
    """

    def again(answer: Answer) -> bool:
        return answer.code != 0 and bool(_UNREACHED.search(answer.err) or _LOST.search(answer.err))

    return _patiently(argv, QUESTION_LIMIT_S, again)


def submit(*argv: str) -> Answer:
    """What a request that changes something gives; tried again only where it cannot have arrived.

    Raises:
        NoAnswerError: whether it arrived is not known, or the scheduler cannot be reached.
    """

    def again(answer: Answer) -> bool:
        return answer.code != 0 and bool(_UNREACHED.search(answer.err))

    answer = _patiently(argv, SUBMISSION_LIMIT_S, again)
    if answer.code != 0 and _LOST.search(answer.err):
        raise NoAnswerError(
            f"{argv[0]} says: {answer.said}; whether the request was taken is not known: look at your jobs "
            "before you try again"
        )
    return answer


@contextmanager
def held_interrupt(program: str) -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C waits, for a job may be queued by now; gives a function that tells whether it came.

    Raises:
        NoAnswerError: a second Ctrl-C does not wait, and nobody knows then.
    """
    came: list[int] = []

    def hold(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            raise NoAnswerError(
                f"interrupted before {program} had answered; whether a job was queued is not known: look at "
                "your jobs before you try again"
            )
        os.write(
            2, f"\nwaiting for {program}, which may have the job already; Ctrl-C again gives up\n".encode()
        )

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


def _patiently(argv: Sequence[str], limit_s: float, again: Callable[[Answer], bool]) -> Answer:
    for pause_s in (*PAUSES_S, None):
        answer = _run(argv, limit_s)
        if not again(answer):
            return answer
        if pause_s is not None:
            time.sleep(pause_s)
    raise NoAnswerError(
        f"{argv[0]} was tried {len(PAUSES_S) + 1} times and says: {answer.said}; try again later, or ask "
        "the site whether its scheduler is up"
    )


def _run(argv: Sequence[str], limit_s: float) -> Answer:
    environ = dict(os.environ)
    # It would change how scontrol and sacct spell a time.
    environ.pop("SLURM_TIME_FORMAT", None)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # killed with all its children
        )
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"{argv[0]} cannot be started; is the scheduler's module loaded?") from error
    with process:
        try:
            out, err = _read(process, argv[0], limit_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return Answer(process.returncode, out, err)


def _read(process: subprocess.Popen[bytes], name: str, limit_s: float) -> tuple[str, str]:
    """Both outputs to their ends, or until shortly after the program's.

    Not communicate(): a program that never stops writing would fill memory.
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
                    f"{name} gave no answer within {limit_s:g} s; if it was to change something, look "
                    "whether it has; else try again later"
                )
            for key, _ in selector.select(min(left_s, _LOOK_S)):
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fileobj)
                key.data.extend(piece)
            if len(out) + len(err) > MAX_BYTES:
                raise NoAnswerError(f"{name} answers with more than {MAX_BYTES} bytes; that is no answer")
    try:
        process.wait(max(0.1, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{name} did not end within {limit_s:g} s; try again later") from None
    return out.decode("utf-8", "surrogateescape"), err.decode("utf-8", "surrogateescape")
