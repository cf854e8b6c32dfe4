"""The errors users see, each with the exit code it ends in.

Library code raises these; only `cli.py`, `train.py` and `data_gen/__main__.py`
turn them into text. A message says what was seen, what was needed and what to
do, on one line.
"""

from __future__ import annotations

from typing import NoReturn

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130


class DdpHpcError(Exception):
    """Something failed after work had begun: exit code 1.

    `on_all_ranks` says that all ranks raised it together, so none has to be torn out of a wait.
    """

    exit_code = EXIT_FAILED
    on_all_ranks = False
    traceback_text = ""
    """Of the user's own code, where that raised: entry points keep it in a file."""

    def __str__(self) -> str:
        """The message and the messages of its causes, on one line, so that grep over ranks works."""
        parts = [super().__str__()]
        cause = self.__cause__
        while cause is not None:
            text = str(cause) or type(cause).__name__
            if text not in parts[-1]:
                parts.append(text)
            cause = cause.__cause__
        return " ".join(": ".join(parts).split())


class RequestError(DdpHpcError):
    """The request itself is wrong and nothing was started: exit code 2."""

    exit_code = EXIT_WRONG_REQUEST


class LaunchError(RequestError):
    """This process cannot tell which rank it is, or is told two different things: exit code 2."""


class DataError(RequestError):
    """A data file is missing, damaged or of another shape than asked for: exit code 2."""


class RendezvousError(DdpHpcError):
    """The ranks did not find each other within the time limit: exit code 1."""


class ReportedElsewhereError(DdpHpcError):
    """This rank stops because of what another rank has already said: nothing more is printed."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.on_all_ranks = True


def stop_together(rank: int, error: DdpHpcError) -> NoReturn:
    """Raises on every rank what all of them know, so that only rank 0 prints it.

    Collective: every rank must call this.
    """
    if rank != 0:
        raise ReportedElsewhereError(str(error), error.exit_code)
    error.on_all_ranks = True
    raise error


def failure_of(message: str, exit_code: int) -> DdpHpcError:
    """The error that ends in that exit code."""
    return RequestError(message) if exit_code == RequestError.exit_code else DdpHpcError(message)


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """A hint such as ` (did you mean "walltime"?)`, or nothing where no known word is near."""
    from difflib import get_close_matches

    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f' (did you mean "{found[0]}"?)' if found else ""
