"""The types of a check: its input and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_hpc.base.text_table import cut, printable
from ddp_hpc.schedulers.registry import scheduler_of_job

STATUSES = ("ok", "warn", "fail")  # from best to worst


@dataclass(frozen=True)
class Here:
    """The context of a check: environment variables, and the size of the job."""

    environ: Mapping[str, str]
    num_nodes: int = 1
    is_rank: bool = False  # a launcher started this process as a rank

    @property
    def in_job(self) -> bool:
        """True if this process runs in a job, where a missing component would affect the training."""
        return self.is_rank or scheduler_of_job(self.environ) is not None


@dataclass(frozen=True)
class Result:
    """The result of a check: `what` was seen, and the `remedy` if the status is not "ok".

    The name of the check is empty until it has ended.
    """

    name: str
    status: str
    what: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The result as one line, such as `warn  open-files   1024; ulimit -n 65536`."""
        # The text may contain output of other programs, so line breaks and control characters are removed.
        text = "; ".join(part for part in (self.what, self.remedy) if part)
        return f"{self.status:4}  {self.name:14}  {one_line(text)}"


@dataclass(frozen=True)
class Check:
    """A check with its name and its time limit."""

    name: str
    about: str
    run: Callable[[Here], Result]
    limit_s: float = 20.0


def ok(what: str) -> Result:
    """Returns a result without a problem."""
    return Result("", "ok", what)


def warn(what: str, remedy: str) -> Result:
    """Returns a result that may affect jobs, but does not prevent them."""
    return Result("", "warn", what, remedy)


def fail(what: str, remedy: str) -> Result:
    """Returns a result that prevents jobs from running correctly."""
    return Result("", "fail", what, remedy)


def one_line(text: str) -> str:
    """Returns the text as one line of at most 500 characters, without control characters."""
    return cut(printable(" ".join(text.split())), 500)


def first_line(error: object) -> str:
    """Returns the first line of an error's message, or its type if it has no message."""
    return one_line(str(error).strip().partition("\n")[0] or type(error).__name__)
