"""Errors for users, each with its exit code.

Library code raises them, and only entry points print them. A message states
what was found, what is needed and what to do, on one line.
"""

from __future__ import annotations

from typing import NoReturn

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


class DdpHpcError(Exception):
    """Base class of this package's errors. The base class itself is raised for failures after work has begun:
    exit code 1.

    `on_all_ranks` is true if every rank raises the error, so that no rank waits for another one.
    """

    exit_code = EXIT_FAILED
    on_all_ranks = False
    traceback_text = ""
    """The traceback, if the user's own code raised the error; entry points write it to a file."""

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

    exit_code = EXIT_WRONG_REQUEST


class LaunchError(RequestError):
    """The rank of this process cannot be determined, or two sources contradict each other: exit code 2."""


class DataError(RequestError):
    """A data file is missing, damaged, or does not have the requested shape: exit code 2."""


class RendezvousError(DdpHpcError):
    """The ranks could not connect to each other within the time limit: exit code 1."""


class ReportedElsewhereError(DdpHpcError):
    """This rank stops because of an error that another rank has already reported; it prints nothing."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.on_all_ranks = True


def stop_together(rank: int, error: DdpHpcError) -> NoReturn:
    """Ends all ranks with the same error, which only rank 0 prints.

    Collective: every rank must call this.
    """
    if rank != 0:
        raise ReportedElsewhereError(str(error), error.exit_code)
    error.on_all_ranks = True
    raise error


def failure_of(message: str, exit_code: int) -> DdpHpcError:
    """Returns the error with this message whose class has the given exit code (1 or 2)."""
    return RequestError(message) if exit_code == RequestError.exit_code else DdpHpcError(message)


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Returns a hint such as ` (did you mean "walltime"?)`, or nothing if no known word is similar."""
    from difflib import get_close_matches

    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f' (did you mean "{found[0]}"?)' if found else ""
