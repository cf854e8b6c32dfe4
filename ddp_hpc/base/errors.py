"""Errors for users, each with its exit code.

Library code raises them, and only entry points print them. A message states
what was found, what is needed and what to do, on one line.
"""

from __future__ import annotations

from typing import NoReturn

from ddp_hpc.base.run_outcomes import Cause

EXIT_DONE = Cause.DONE.exit_code
EXIT_FAILED = Cause.FAILED.exit_code
EXIT_WRONG_REQUEST = Cause.REFUSED.exit_code
EXIT_REQUEUE = Cause.STOPPED.exit_code
EXIT_INTERRUPTED = Cause.INTERRUPTED.exit_code


class DdpHpcError(Exception):
    """Base class of this package's errors. The base class itself is raised for failures after work has begun:
    exit code 1.

    The cause determines the exit code, and whether another job resumes the run. `on_all_ranks` is true if
    every rank raises the error, so that no rank waits for another one.
    """

    cause = Cause.FAILED
    on_all_ranks = False
    traceback_text = ""
    """The traceback, if the user's own code raised the error; entry points write it to a file."""

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends with this error."""
        return self.cause.exit_code

    def __str__(self) -> str:
        """Returns the message and the messages of its causes on one line, so that grep finds all of it."""
        parts = [super().__str__()]
        cause = self.__cause__
        while cause is not None:
            text = str(cause) or type(cause).__name__
            if text not in parts[-1]:
                parts = [*parts[:-1], parts[-1].removesuffix("."), text]
            cause = cause.__cause__
        return " ".join(": ".join(parts).split())


class RequestError(DdpHpcError):
    """The request itself is wrong and nothing was started: exit code 2."""

    cause = Cause.REFUSED


class LaunchError(RequestError):
    """The rank of this process cannot be determined, or two sources contradict each other: exit code 2."""


class DataError(RequestError):
    """A data file is missing, damaged, or does not have the requested shape: exit code 2."""


class RendezvousError(DdpHpcError):
    """The ranks could not connect to each other, or have lost contact: exit code 1."""

    cause = Cause.LOST_RANK


class ReportedElsewhereError(DdpHpcError):
    """This rank stops because of an error that another rank has already reported; it prints nothing."""

    def __init__(self, message: str, cause: Cause = Cause.FAILED) -> None:
        super().__init__(message)
        self.cause = cause
        self.on_all_ranks = True


def stop_together(rank: int, error: DdpHpcError) -> NoReturn:
    """Ends all ranks with the same error, which only rank 0 prints.

    Collective: every rank must call this.
    """
    if rank != 0:
        raise ReportedElsewhereError(str(error), error.cause)
    error.on_all_ranks = True
    raise error


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Returns a hint such as ` (did you mean "walltime"?)`, or nothing if no known word is similar."""
    from difflib import get_close_matches

    similar = get_close_matches(word, known, n=1, cutoff=0.6)
    return f' (did you mean "{similar[0]}"?)' if similar else ""
