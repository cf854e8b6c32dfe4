"""What every check is: a stable id, a severity, a title, and a function from a subject to what it saw."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ddp_hpc.batch.script import Command, Script
from ddp_hpc.batch.site import Site
from ddp_hpc.errors import RequestError
from ddp_hpc.units import parse_walltime_s

Severity = Literal["error", "warning", "note"]

# sbatch(1), --time; pbs_resources(7), walltime. Days and hours are Slurm's alone.
_BARE = re.compile(r"\d{1,9}")
_MINUTES_SECONDS = re.compile(r"(\d{1,9}):(\d{1,2})")
_DAYS_HOURS = re.compile(r"(\d{1,6})-(\d{1,2})(?::(\d{1,2}))?")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a script: where, what, and how to mend it."""

    check: str
    severity: Severity
    line: int
    what: str
    remedy: str


class Seen(NamedTuple):
    """What a check hands back for each place it objects to."""

    line: int
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A script and, where they are known, the site it is meant for and the nodes that were asked for."""

    script: Script
    site: Site | None = None
    asked_nodes: int | None = None

    @cached_property
    def num_nodes(self) -> int | None:
        """Nodes that the directives ask for; None where they do not say, or give a range."""
        if self.asked_nodes:
            return self.asked_nodes
        if self.script.scheduler == "slurm":
            return whole(self.script.value("--nodes"))
        return self._chunks[0] if self._chunks else None

    @cached_property
    def ranks_per_node(self) -> int | None:
        """Tasks a node on Slurm, mpiprocs of the chunk on PBS."""
        if self.script.scheduler == "slurm":
            return whole(self.script.value("--ntasks-per-node"))
        return whole(self._chunks[1].get("mpiprocs")) if self._chunks else None

    @cached_property
    def gpus_per_node(self) -> int | None:
        """GPUs of each node; None where the directives do not say."""
        if self.script.scheduler == "slurm":
            for value in (self.script.value("--gpus-per-node"), _gres_gpus(self.script.value("--gres"))):
                if value is not None:
                    return whole(value.rpartition(":")[2])
            return None
        return whole(self._chunks[1].get("ngpus")) if self._chunks else None

    @cached_property
    def walltime(self) -> tuple[int, str] | None:
        """Line and text of the walltime."""
        if self.script.scheduler == "slurm":
            times = [(d.line, d.value) for d in self.script.read() if d.flag == "--time"]
        else:
            times = [(d.line, value) for d, name, value in self.script.resources() if name == "walltime"]
        return times[-1] if times else None

    @cached_property
    def walltime_s(self) -> int | None:
        """The walltime in seconds, as the scheduler reads it; None where there is none that can be read."""
        text = self.walltime[1] if self.walltime else ""
        slurm = self.script.scheduler == "slurm"
        if _BARE.fullmatch(text):
            return int(text) * (60 if slurm else 1)
        if match := _MINUTES_SECONDS.fullmatch(text):
            return int(match[1]) * 60 + int(match[2])
        if slurm and (match := _DAYS_HOURS.fullmatch(text)):
            days, hours, minutes = (int(part or 0) for part in match.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60
        try:
            return parse_walltime_s(text)
        except RequestError:
            return None

    @cached_property
    def queue(self) -> tuple[int, str] | None:
        """Line and name of the queue, partition or QOS, whichever the site's queues are."""
        flag = "-q"
        if self.script.scheduler == "slurm":
            flag = f"--{self.site.slurm.queue_option if self.site else 'partition'}"
        found = [(d.line, d.value) for d in self.script.read() if d.flag == flag]
        return found[-1] if found else None

    @property
    def qos(self) -> str:
        """The QOS that is asked for beside a partition."""
        beside = self.script.scheduler == "slurm" and not (
            self.site and self.site.slurm.queue_option == "qos"
        )
        return (self.script.value("--qos") or "") if beside else ""

    @cached_property
    def _chunks(self) -> tuple[int, dict[str, str]] | None:
        """Number of nodes, and the resources of the chunk, of a `select` with one kind of chunk."""
        selects = [value for _, name, value in self.script.resources() if name == "select"]
        if not selects or "+" in selects[-1]:
            return None
        count, *parts = selects[-1].split(":")
        if not count.isdecimal():
            count, parts = "1", [count, *parts]
        return int(count[:9]), dict(part.partition("=")[::2] for part in parts)

    def line_of(self, *flags: str) -> int:
        """The line of the last directive with one of these flags, or resource of -l; else the first line."""
        lines = [d.line for d in self.script.read() if d.flag in flags]
        lines += [d.line for d, name, _ in self.script.resources() if name in flags]
        return max(lines, default=1)

    def in_foreground(self) -> Iterator[Command]:
        """The launchers that bash waits for before it looks at anything else."""
        commands = self.script.commands
        for index, command in enumerate(commands):
            if command.name in ("srun", "mpiexec", "mpirun", "torchrun"):
                last = index
                while commands[last].ends == "|" and last + 1 < len(commands):
                    last += 1
                if commands[last].ends != "&":
                    yield command


Run = Callable[[Subject], Iterator[Seen]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """A check as it is listed; `scheduler` is empty where it looks at scripts of all of them."""

    id: str
    severity: Severity
    title: str
    run: Run
    scheduler: str = ""

    def findings(self, subject: Subject) -> Iterator[Finding]:
        """What the check has to say about the subject."""
        if self.scheduler in ("", subject.script.scheduler):
            for seen in self.run(subject):
                yield Finding(check=self.id, severity=self.severity, **seen._asdict())


CHECKS: dict[str, Check] = {}


def check(id_: str, severity: Severity, title: str) -> Callable[[Run], Run]:
    """Registers a check; the letters of its id say whose scripts it looks at."""

    def register(run: Run) -> Run:
        if id_ in CHECKS:
            raise ValueError(f"two checks are called {id_}")
        scheduler = {"PBS": "pbs", "SLURM": "slurm"}.get(id_.rstrip("0123456789"), "")
        CHECKS[id_] = Check(id=id_, severity=severity, title=title, run=run, scheduler=scheduler)
        return run

    return register


def whole(text: str | None) -> int | None:
    """The whole number that `text` is, or None."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None


def shown(text: str) -> str:
    """`text` from somebody's script, fit for one line of a message."""
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")


def plain(text: str) -> str:
    """As `shown`, without the quotes around it."""
    return shown(text)[1:-1]


def _gres_gpus(gres: str | None) -> str | None:
    """The GPU part of `--gres`, such as `gpu:a100:4`; a bare `gpu` is one."""
    for part in (gres or "").split(","):
        name = part.removeprefix("gres/").removeprefix("gres:")
        if name == "gpu":
            return "1"
        if name.startswith("gpu:"):
            return name.partition("(")[0]
    return None
