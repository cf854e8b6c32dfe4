"""What a check is given, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

STATUSES = ("ok", "warn", "fail")  # the better ones first


@dataclass(frozen=True)
class Here:
    """What a check may look at, beside the machine itself."""

    environ: Mapping[str, str]
    folder: Path = Path()  # where runs would write: the working folder
    num_nodes: int = 1
    local_size: int = 1  # ranks on this node
    is_rank: bool = False  # a launcher started this process

    @property
    def in_job(self) -> bool:
        """True in a job: what is missing here, training will miss."""
        return self.is_rank or any(name in self.environ for name in ("SLURM_JOB_ID", "PBS_JOBID"))


@dataclass(frozen=True)
class Finding:
    """A check's answer: `what` was seen, and the `remedy` where it is not "ok".

    `same` is what nodes of one job are compared by: `what`, unless that holds
    numbers that differ from node to node by nature.
    """

    status: str
    what: str
    remedy: str = ""
    same: str | None = None

    @property
    def compared_by(self) -> str:
        """The text that is equal on nodes that are alike."""
        return f"{self.status} {self.what if self.same is None else self.same}"


@dataclass(frozen=True)
class Result:
    """A finding with the name of its check."""

    name: str
    status: str
    what: str
    remedy: str = ""
    compared_by: str = ""

    @property
    def line(self) -> str:
        """`warn  open-files   1024; ulimit -n 65536`."""
        # Other programs' words are quoted here: one line, no control characters.
        text = "; ".join(part for part in (self.what, self.remedy) if part)
        return f"{self.status:4}  {self.name:14}  {printable(text)}"


@dataclass(frozen=True)
class Check:
    """A check by name, with the seconds after which it is given up."""

    name: str
    about: str
    run: Callable[[Here], Finding]
    limit_s: float = 20.0


def ok(what: str, same: str | None = None) -> Finding:
    """Nothing to mend."""
    return Finding("ok", what, "", same)


def warn(what: str, remedy: str, same: str | None = None) -> Finding:
    """Jobs may run all the same."""
    return Finding("warn", what, remedy, same)


def fail(what: str, remedy: str, same: str | None = None) -> Finding:
    """A job would not run, or not as it should."""
    return Finding("fail", what, remedy, same)


def printable(text: str) -> str:
    """The text on one line of at most 500 characters, without anything that steers a terminal."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= 500 else line[:497] + "..."


def first_line(error: object) -> str:
    """The first line of an error's text, or its type where it has none."""
    return printable(str(error).strip().partition("\n")[0] or type(error).__name__)
