"""Reads what a job script requests, and chooses how many nodes and ranks are simulated."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_walltime
from ddp_hpc.lint.parse_script import Script, parse_script, read_script
from ddp_hpc.lint.run_checks import LintFinding, lint_script
from ddp_hpc.rehearse.launchers.fit_to_machine import runs_trainer
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.stand_in_scheduler import StandInScheduler, find_stand_in
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.site import Site, load_site

# Ranks are slow if there are more ranks than cores, but testing node ranks and local ranks requires two nodes
# with two ranks each.
_MIN_RANKS = 4
_MAX_RANKS = 64
_PALS_OPTIONS = ("--cpu-bind", "--depth", "-d", "--mem-bind", "--gpu-bind", "--pmi", "--no-vni")
_OPENMPI_OPTIONS = ("--map-by", "-map-by", "-x", "--mca", "-mca", "--bind-to", "--oversubscribe", "-npernode")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `ddp-hpc rehearse`. If a value is None, it is derived from the script and this
    machine.
    """

    num_nodes: int | None
    ranks_per_node: int | None
    walltime_s: int | None
    steps: int | None
    arguments: tuple[str, ...]
    profile: str
    max_jobs: int
    limit_s: float
    here: bool
    keep: Path | None = None
    """The run directory, which is not removed."""
    fail: str | None = None
    """What fails: rank, node or hang."""
    fail_after_s: float | None = None

    @property
    def stops_early(self) -> bool:
        """Whether ddp_hpc.train runs only the first steps."""
        return self.steps is None and self.walltime_s is None and not self.fail


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job script, and the numbers of nodes and ranks with which it is rehearsed.

    `scheduler` is the name of the script's scheduler, or local. `text` is the script as it is submitted;
    `edited` means that its deadline was changed. `walltime_s` is the walltime that the script requests, or 0.
    `array_index` is the index of the only task of a job array that runs, the first one; None if the script is
    not an array.
    """

    path: Path
    name: str
    text: str
    scheduler: str
    site: Site | None
    mpiexec: str
    requested_nodes: int
    num_nodes: int
    ranks_per_node: int
    walltime_s: int
    array_index: int | None
    findings: tuple[LintFinding, ...]
    edited: bool = False

    @property
    def runs_trainer(self) -> bool:
        """Whether the script seems to run ddp_hpc.train."""
        commands = [(self.name,), *(command.words for command in parse_script(self.text).commands)]
        return "ddp_hpc.train" in self.text or any(map(runs_trainer, commands))


def plan(path: Path, options: Options) -> Plan:
    """Returns the plan for rehearsing a script.

    Raises:
        RequestError: the file is not a job script, or the options do not fit the script.
    """
    try:
        text = read_script(path, _name(path))
    except OSError as error:
        raise RequestError(f"{_name(path)} cannot be read ({error.strerror}); give a job script") from error
    script = parse_script(text)
    site = _site(script, options.profile)
    findings = tuple(lint_script(text, site))
    if findings and findings[0].check == "JOB001":
        raise RequestError(f"{_name(path)}: {findings[0].what}; {findings[0].remedy}")
    if not script.shebang and not script.scheduler:
        raise RequestError(
            f"{_name(path)} is not a job script: it contains neither #PBS nor #SBATCH lines, and its first "
            "line does not name a shell; give a job script"
        )
    scheduler = script.scheduler or "local"
    stand_in = find_stand_in(scheduler)
    if stand_in is None and options.walltime_s is not None:
        raise RequestError(
            f"--walltime-s {options.walltime_s} was given, but {_name(path)} is not written for a scheduler "
            "that enforces a walltime; omit the option"
        )
    requested, walltime_s = stand_in.requested_nodes(script) if stand_in else 1, _walltime_s(script)
    spare_nodes, min_nodes = (_number(script, option) for option in ("--spare-nodes", "--min-nodes"))
    least = spare_nodes + 2 if spare_nodes else 0
    if options.fail == "node" and min_nodes:
        least = max(least, min_nodes + 1)
    num_nodes, per_node = _part(requested, options, least)
    if options.fail == "node" and not ((spare_nodes or min_nodes) and num_nodes - spare_nodes > 1):
        raise RequestError(
            f"--fail node was given, but {_name(path)} cannot lose a node: the scheduler would end the job, "
            "which is not simulated; render it for several nodes, with --spare-nodes or --min-nodes"
        )
    new = _with_walltime(text, walltime_s, options.walltime_s)
    return Plan(
        path=path.absolute(),
        name=path.name,
        text=new,
        scheduler=scheduler,
        site=site,
        mpiexec=_mpiexec(script, site, stand_in),
        requested_nodes=requested,
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        walltime_s=walltime_s,
        array_index=_first_index(stand_in, script),
        findings=findings,
        edited=new != text,
    )


def _with_walltime(text: str, before_s: int, after_s: int | None) -> str:
    """Returns the script with another walltime, from which scripts of `ddp-hpc render` compute a deadline."""
    if after_s is None or not before_s:
        return text
    return re.sub(r"(\bddp_hpc\.job .*--walltime )[0-9:]+", rf"\g<1>{format_walltime(after_s)}", text)


def _name(path: Path) -> str:
    return ascii(str(path))[1:-1]


def _number(script: Script, option: str) -> int:
    """Returns the number after an option in the line of the supervisor; 0 without it."""
    found = re.search(rf"\bddp_hpc\.job .*{option}[ =]([0-9]{{1,4}})\b", script.text)
    return int(found[1]) if found else 0


def _part(requested: int, options: Options, least: int) -> tuple[int, int]:
    """Returns the number of nodes to simulate, and the maximum number of ranks per node.

    At least `least` nodes are simulated, so that the loss of a node can be seen.
    """
    room = max(_MIN_RANKS, len(os.sched_getaffinity(0)))
    for option, value in (("--nodes", options.num_nodes), ("--ranks-per-node", options.ranks_per_node)):
        if value is not None and not 1 <= value <= _MAX_RANKS:
            raise RequestError(
                f"{option} {value} was given; on one machine, it must be from 1 to {_MAX_RANKS}"
            )
    if options.num_nodes is not None and options.num_nodes > requested:
        raise RequestError(
            f"--nodes {options.num_nodes} was given, but the script requests {requested}; "
            "use at most that number"
        )
    num_nodes = options.num_nodes or min(requested, max(room // 2, least))
    per_node = options.ranks_per_node or max(1, room // num_nodes)
    if num_nodes * per_node > _MAX_RANKS:
        raise RequestError(
            f"{num_nodes} nodes with {per_node} ranks each are {num_nodes * per_node} ranks, but at most "
            f"{_MAX_RANKS} can be started on one machine. Reduce --nodes or --ranks-per-node."
        )
    return num_nodes, per_node


def _site(script: Script, profile: str) -> Site | None:
    """Returns the site of --profile, or the site that a script of `ddp-hpc render` names."""
    if profile:
        return load_site(profile)
    named = script.last_assigned("DDP_HPC_PROFILE")
    try:
        return None if named is None else load_site(named)
    except RequestError:
        return None


def _walltime_s(script: Script) -> int:
    reader = SCHEDULERS[script.scheduler].reader if script.scheduler else None
    requested = reader.walltime(script) if reader else None
    return reader.walltime_s(requested[1]) or 0 if reader and requested else 0


def _first_index(stand_in: StandInScheduler | None, script: Script) -> int | None:
    try:
        indices = stand_in.array_indices(script) if stand_in else ()
    except RefusedError:
        return None  # the stand-in refuses the script at submission
    return indices[0] if indices else None


def _mpiexec(script: Script, site: Site | None, stand_in: StandInScheduler | None) -> str:
    """Returns the kind of mpiexec for which the script was written: pals, openmpi or hydra."""
    if site is not None and site.launch.dialect != "auto":
        return site.launch.dialect
    words = [word.partition("=")[0] for command in script.launches() for word in command.own_words]
    if any(word in _OPENMPI_OPTIONS for word in words):
        return "openmpi"
    if any(word in _PALS_OPTIONS for word in words):
        return "pals"
    return stand_in.mpiexec if stand_in else "hydra"
