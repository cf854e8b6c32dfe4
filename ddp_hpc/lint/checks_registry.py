"""Registry of checks. A check has a stable id, a severity, a title and a function that yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.schedulers.base import Scheduler, ScriptCheck, ScriptProblem, Severity
from ddp_hpc.schedulers.registry import NO_SCHEDULER, SCHEDULERS
from ddp_hpc.sites.site import Site
from ddp_hpc.text_table import cut

# `nearest_known` compares at most this number of words, because a comparison takes about a millisecond.
_MAX_UNKNOWN = 100


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """One problem in a script: its line, a description and a fix."""

    check: str
    severity: Severity
    line: int
    what: str
    remedy: str


class Problem(NamedTuple):
    """One problem found by a check; `Check.findings` adds the id and the severity."""

    line: int
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A script to check, with its site and the requested number of nodes if they are known."""

    script: Script
    site: Site | None = None
    asked_nodes: int | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the script's directives, or NO_SCHEDULER if it has none."""
        return SCHEDULERS.get(self.script.scheduler, NO_SCHEDULER)

    @cached_property
    def num_nodes(self) -> int | None:
        """Number of requested nodes; None if the directives do not set it or give a range."""
        return self.asked_nodes or self.scheduler.num_nodes(self.script)

    @cached_property
    def ranks_per_node(self) -> int | None:
        """Number of ranks per node: tasks per node on Slurm, mpiprocs of the chunk on PBS."""
        return self.scheduler.ranks_per_node(self.script)

    @cached_property
    def gpus_per_node(self) -> int | None:
        """Number of GPUs per node; None if the directives do not set it."""
        return self.scheduler.gpus_per_node(self.script)

    @cached_property
    def walltime(self) -> tuple[int, str] | None:
        """Line number and text of the requested walltime; None if the script requests none."""
        return self.scheduler.walltime(self.script)

    @cached_property
    def walltime_s(self) -> int | None:
        """The walltime in seconds, as the scheduler reads it; None if it is missing or invalid."""
        return self.scheduler.walltime_s(self.walltime[1]) if self.walltime else None

    @cached_property
    def queue(self) -> tuple[int, str] | None:
        """Line number and name of the queue, partition or QOS, depending on the site; None if not given."""
        return self.scheduler.queue(self.script, self.site)

    @property
    def qos(self) -> str:
        """The QOS that is requested in addition to a partition; empty if there is none."""
        return self.scheduler.qos(self.script, self.site)

    def line_of(self, *flags: str) -> int:
        """Return the line number of the last directive with one of these flags or `-l` resources, or 1."""
        lines = [d.line for d in self.script.read() if d.flag in flags]
        lines += [d.line for d, name, _ in self.script.resources() if name in flags]
        return max(lines, default=1)

    def in_foreground(self) -> Iterator[Command]:
        """Yield the launcher commands that run in the foreground of the script."""
        commands = self.script.commands
        # For each command, the operator after the last command of its pipeline, computed from the end.
        ends = [command.ends for command in commands]
        for index in range(len(ends) - 2, -1, -1):
            if ends[index] == "|":
                ends[index] = ends[index + 1]
        for command, end in zip(commands, ends, strict=True):
            if end != "&" and command.name in ("srun", "mpiexec", "mpirun", "torchrun"):
                yield command


Run = Callable[[Subject], Iterator[Problem | ScriptProblem]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """A registered check; `scheduler` is empty if it applies to the scripts of all schedulers."""

    id: str
    severity: Severity
    title: str
    run: Run
    scheduler: str = ""

    def findings(self, subject: Subject) -> Iterator[LintFinding]:
        """Yield the findings of this check."""
        if self.scheduler in ("", subject.script.scheduler):
            for seen in self.run(subject):
                yield LintFinding(
                    check=self.id, severity=self.severity, line=seen.line, what=seen.what, remedy=seen.remedy
                )


CHECKS: dict[str, Check] = {}


def check(id_: str, severity: Severity, title: str) -> Callable[[Run], Run]:
    """Return a decorator that registers a function as a check.

    If the id begins with the name of a scheduler, such as `PBS001`, the check applies only to its scripts.
    """

    def register(run: Run) -> Run:
        if id_ in CHECKS:
            raise ValueError(f"two checks have the id {id_}")
        letters = id_.rstrip("0123456789").lower()
        scheduler = letters if letters in SCHEDULERS else ""
        CHECKS[id_] = Check(id=id_, severity=severity, title=title, run=run, scheduler=scheduler)
        return run

    return register


def register_checks(checks: Iterable[ScriptCheck]) -> None:
    """Register the checks that a scheduler defines for its own scripts."""
    for one in checks:

        def run(subject: Subject, one: ScriptCheck = one) -> Iterator[ScriptProblem]:
            return one.run(subject.script)

        check(one.id, one.severity, one.title)(run)


def nearest_known(words: Iterable[str], known: Sequence[str], cutoff: float) -> dict[str, str]:
    """Map each distinct word to the most similar known word, or to an empty string.

    Words after the first _MAX_UNKNOWN are left out.
    """
    distinct = islice(dict.fromkeys(words), _MAX_UNKNOWN)
    return {
        word: next(iter(get_close_matches(word[:80], known, n=1, cutoff=cutoff)), "") for word in distinct
    }


def shown(text: str) -> str:
    """Return text from a script quoted and shortened for a one-line message."""
    return ascii(cut(text, 80))


def plain(text: str) -> str:
    """Return text from a script shortened for a one-line message, like `shown` but without quotes."""
    return shown(text)[1:-1]
