"""Registry of checks. A check has a stable id, a severity, a title and a function that yields findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from ddp_hpc.base.text_table import cut
from ddp_hpc.lint.files_beside import options_on_submission
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.lint.placeholders import has_placeholder, stands_for_number, without_comment
from ddp_hpc.lint.template_files import Template, template_of
from ddp_hpc.schedulers.registry import NO_SCHEDULER, SCHEDULERS, is_same_scheduler
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.schedulers.script_options import whole_number
from ddp_hpc.sites.site import Site

# `nearest_known` compares at most this number of words, because a comparison takes about a millisecond.
_MAX_UNKNOWN = 100

Severity = Literal["error", "warning", "note"]


class Problem(NamedTuple):
    """One problem in a script: its line number, what was found, and how to fix it.

    `severity` is set if the problem is less severe than other problems of the same check. `is_to_fill_in`
    means that a person may replace a placeholder before the script is submitted.
    """

    line: int
    what: str
    remedy: str
    severity: Severity | None = None
    is_to_fill_in: bool = False


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """One problem in a script: its line, a description and a fix."""

    check: str
    severity: Severity
    line: int
    what: str
    remedy: str
    is_to_fill_in: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A script to check, with its site and the requested number of nodes if they are known.

    `directory` is the directory from which the script will be submitted, and `path` its file.
    `installed_version` is the version of the scheduler on this machine, which is used if the profile contains
    none. `shell` is what runs scripts of /bin/sh there, such as bash or dash; empty if it is unknown.
    """

    script: Script
    site: Site | None = None
    asked_nodes: int | None = None
    directory: Path | None = None
    path: Path | None = None
    installed_version: str = ""
    shell: str = ""

    @cached_property
    def template(self) -> Template | None:
        """The template in the file; None if it is a script."""
        return template_of(self.script, self.path)

    @cached_property
    def given_on_submission(self) -> frozenset[str]:
        """The options that programs and READMEs beside the script give to sbatch or qsub with it."""
        return options_on_submission(self.path, self.scheduler.reader)

    @cached_property
    def uses_chunks(self) -> bool:
        """Whether the script requests resources with `select` or `place`, which Torque does not have."""
        return any(name in ("select", "place") for _, name, _ in self.script.resources())

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the script's directives, or NO_SCHEDULER if it has none."""
        return SCHEDULERS.get(self.script.scheduler, NO_SCHEDULER)

    @cached_property
    def placeholder_lines(self) -> frozenset[int]:
        """The lines of directives that contain a placeholder of a template."""
        # A placeholder may contain a blank or `#`, where the scheduler ends the option.
        texts = {d.line: without_comment(d.text) for d in self.script.read()}
        marked = {
            line
            for line, text in texts.items()
            if has_placeholder(text, is_path=True) or stands_for_number(text)
        }
        empty = {line for line, text in texts.items() if text.rstrip().endswith("=")}
        return frozenset(marked | (empty if len(empty) > 2 else set()))  # a form to be filled in

    @cached_property
    def known_site(self) -> Site | None:
        """The site, if its profile says anything about queues or nodes, unlike that of any Slurm machine."""
        site = self.site
        return site if site and (site.queues or site.node.cores or site.node.devices) else None

    @property
    def scheduler_version(self) -> str:
        """The version of the site's scheduler, such as 23.02; empty if it is unknown."""
        site = self.site
        is_for_site = site is not None and is_same_scheduler(site, self.script.scheduler)
        known = self.scheduler.reader.version_of(site) if site and is_for_site else ""
        return known or self.installed_version

    @cached_property
    def num_nodes(self) -> int | None:
        """The number of requested nodes; None if the directives do not set it or give a range."""
        return self.asked_nodes or self.scheduler.reader.num_nodes(self.script)

    def value_of(self, word: str, depth: int = 4) -> str:
        """Returns the value of a variable such as $NGPUS or ${SLURM_NNODES} if known, otherwise the word.

        A value may be computed from other variables, or from itself, so they are read at most `depth` deep.
        """
        match = re.fullmatch(r"\"?\$\{?(\w+)(?::[-=]\w*)?\}?\"?", word)
        if product := re.fullmatch(r"\$\(\(\s*\$?\{?(\w+)\}?\s*\*\s*\$?\{?(\w+)\}?\s*\)\)", word):
            one, other = (
                whole_number(self.value_of(factor if factor.isdecimal() else f"${factor}", depth))
                for factor in product.groups()
            )
            return word if one is None or other is None else str(one * other)
        if re.fullmatch(r"\$\(.*PBS_NODEFILE.*\)", word) and "wc -l" in word and self.num_nodes:
            return str(self.num_nodes * (1 if re.search("sort -u|uniq", word) else self.ranks_per_node or 1))
        if not match or depth == 0:
            return word
        of_node = self.num_nodes and self.ranks_per_node and self.num_nodes * self.ranks_per_node
        tasks = whole_number(self.script.value("--ntasks")) or of_node
        known = {
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_NNODES": self.num_nodes,
            "SLURM_JOB_NUM_NODES": self.num_nodes,
            "SLURM_NTASKS_PER_NODE": self.ranks_per_node,
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_CPUS_PER_TASK": whole_number(self.script.value("--cpus-per-task")),
        }
        value = known.get(match[1]) if match[1] in known else self.script.set_once.get(match[1])
        found = "" if value is None else str(value)
        found = self.value_of(found, depth - 1) if found.startswith("$(") else found
        return word if "$" in found else found or word

    @cached_property
    def ranks_per_node(self) -> int | None:
        """The number of ranks per node: tasks per node on Slurm, mpiprocs of the chunk on PBS."""
        return self.scheduler.reader.ranks_per_node(self.script)

    @property
    def has_many_tasks(self) -> bool:
        """Whether the job has several tasks, in all or per node."""
        tasks = (self.ranks_per_node, whole_number(self.script.value("--ntasks")))
        return any(count is not None and count > 1 for count in tasks)

    @cached_property
    def gpus_per_node(self) -> int | None:
        """The number of GPUs per node; None if the directives do not set it."""
        total = self.total_gpus
        of_total = total // self.num_nodes if self.num_nodes else total if total == 1 else 0
        return self.scheduler.reader.gpus_per_node(self.script) or of_total or None

    @cached_property
    def total_gpus(self) -> int:
        """The number of GPUs in `--gpus`; 0 if the directives do not set it."""
        return whole_number((self.script.value("--gpus") or "").rpartition(":")[2]) or 0

    @cached_property
    def walltime(self) -> tuple[int, str] | None:
        """The line number and text of the requested walltime; None if the script requests none."""
        return self.scheduler.reader.walltime(self.script)

    @cached_property
    def walltime_s(self) -> int | None:
        """The walltime in seconds, as the scheduler reads it; None if it is missing or invalid."""
        return self.scheduler.reader.walltime_s(self.walltime[1]) if self.walltime else None

    @cached_property
    def queue(self) -> tuple[int, str] | None:
        """The line number and name of the queue, partition or QOS, depending on the site, or None."""
        return self.scheduler.reader.queue(self.script, self.site)

    @property
    def qos(self) -> str:
        """The QOS that is requested in addition to a partition; empty if there is none."""
        return self.scheduler.reader.qos(self.script, self.site)

    def line_of(self, *flags: str) -> int:
        """Returns the line of the last directive with one of these flags or `-l` resources; 1 by default."""
        lines = [d.line for d in self.script.read() if d.flag in flags]
        lines += [d.line for d, name, _ in self.script.resources() if name in flags]
        return max(lines, default=1)

    def in_foreground(self, names: str) -> Iterator[Command]:
        """Yields the commands with names of this form that run in the foreground of the script."""
        commands = self.script.commands
        # For each command, the operator after the last command of its pipeline, computed from the end.
        ends = [command.ends for command in commands]
        for index in range(len(ends) - 2, -1, -1):
            if ends[index] == "|":
                ends[index] = ends[index + 1]
        for command, end in zip(commands, ends, strict=True):
            if end != "&" and re.fullmatch(names, command.name):
                yield command


Run = Callable[[Subject], Iterator[Problem]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """A registered check; `scheduler` is empty if it applies to the scripts of all schedulers."""

    id: str
    severity: Severity
    title: str
    run: Run
    scheduler: str = ""

    def findings(self, subject: Subject) -> Iterator[LintFinding]:
        """Yields the findings of this check."""
        if self.scheduler not in ("", subject.script.scheduler):
            return
        for line, what, remedy, severity, is_to_fill_in in self.run(subject):
            yield LintFinding(
                check=self.id,
                severity=severity or self.severity,
                line=line,
                what=what,
                remedy=remedy,
                is_to_fill_in=is_to_fill_in,
            )


CHECKS: dict[str, Check] = {}


def check(id_: str, severity: Severity, title: str) -> Callable[[Run], Run]:
    """Returns a decorator that registers a function as a check.

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


def nearest_known(words: Iterable[str], known: Sequence[str], cutoff: float) -> dict[str, str]:
    """Maps each distinct word to the most similar known word, or to an empty string.

    Words after the first _MAX_UNKNOWN are left out.
    """
    distinct = islice(dict.fromkeys(words), _MAX_UNKNOWN)
    return {
        word: next(iter(get_close_matches(word[:80], known, n=1, cutoff=cutoff)), "") for word in distinct
    }


def table(text: str) -> list[list[str]]:
    """Returns the rows of a text, with @ between their columns; an indented line continues its row."""
    rows = (re.sub(r"\n +", "", row) for row in re.split(r"\n(?! )", text.strip()))
    return [re.split(r"\s*@ ", row) for row in rows]


def is_one_edit(word: str, other: str) -> bool:
    """Returns whether one letter was left out, added, replaced, or exchanged with the next one."""
    if abs(len(word) - len(other)) > 1 or word == other:
        return False
    first = next(
        (i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other))
    )
    rest, others = word[first:], other[first:]
    return (
        rest[1:] == others
        or rest == others[1:]
        or rest[1:] == others[1:]
        or (rest[2:] == others[2:] and rest[:2] == others[1::-1])
    )


def shown(text: str) -> str:
    """Returns text from a script quoted and shortened for a one-line message."""
    return ascii(cut(text, 80))


def plain(text: str) -> str:
    """Returns text from a script shortened for a one-line message, like `shown` but without quotes."""
    return shown(text)[1:-1].replace("\\'", "'").replace('\\"', '"')
