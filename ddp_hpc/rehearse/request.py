"""What a job script asks for, and how much of that is done on one machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import RequestError
from ddp_hpc.lint.parse_script import Script, parse_script, read_script
from ddp_hpc.lint.run_checks import LintFinding, lint_script
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.queues import QUEUES, Queue
from ddp_hpc.sites.site import Site, load_site

# More ranks than cores make a rehearsal slow; fewer than four would leave local ranks or nodes untried.
_LEAST_RANKS = 4
_MOST_RANKS = 64
_OTHERS = {"flux:": "Flux", "$ -": "Grid Engine", "BSUB -": "LSF", "PJM -": "Fujitsu's scheduler"}
_OTHER_DIRECTIVE = re.compile(rf"^#\s?({'|'.join(map(re.escape, _OTHERS))})", re.MULTILINE)
_OF_PALS = ("--cpu-bind", "--depth", "-d", "--mem-bind", "--gpu-bind", "--pmi", "--no-vni")
_OF_OPENMPI = ("--map-by", "-map-by", "-x", "--mca", "-mca", "--bind-to", "--oversubscribe", "-npernode")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user says of a rehearsal; None and 0 leave it to the script and the machine."""

    num_nodes: int | None = None
    ranks_per_node: int | None = None
    walltime_s: int | None = None
    steps: int | None = None
    arguments: tuple[str, ...] = ()
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A script and the part of its request that is done here.

    `scheduler` is pbs, slurm or local. `text` is the script as it is submitted, `walltime_s`
    what it asks for, 0 where it says nothing.
    """

    name: str
    text: str
    scheduler: str
    site: Site | None
    mpiexec: str
    asked_nodes: int
    num_nodes: int
    ranks_per_node: int
    walltime_s: int
    findings: tuple[LintFinding, ...]
    edited: bool = False


def plan(path: Path, wishes: Wishes) -> Plan:
    """What will be done.

    Raises:
        RequestError: no job script, or wishes that do not fit it.
    """
    try:
        text = read_script(path, _name(path))
    except OSError as error:
        raise RequestError(f"{_name(path)} cannot be read ({error.strerror}); give a job script") from error
    script = parse_script(text)
    site = _site(script, wishes.profile)
    findings = tuple(lint_script(text, site))
    if findings and findings[0].check == "JOB001":
        raise RequestError(f"{_name(path)}: {findings[0].what}; {findings[0].remedy}")
    if not script.shebang and not script.scheduler:
        raise RequestError(
            f"{_name(path)} has neither #PBS nor #SBATCH lines nor a first line that names a shell; "
            "give a job script"
        )
    if not script.scheduler and (other := _OTHER_DIRECTIVE.search(text)):
        raise RequestError(
            f"{_name(path)} has directives of {_OTHERS[other[1]]}; scripts of PBS and Slurm and plain ones "
            "can be rehearsed"
        )
    scheduler = script.scheduler or "local"
    if not script.scheduler and wishes.walltime_s is not None:
        raise RequestError(
            f"--walltime-s {wishes.walltime_s} was given and {_name(path)} has no scheduler that would end "
            "it; leave it out"
        )
    queue = QUEUES.get(scheduler)
    asked, walltime_s = queue.requested_nodes(script) if queue else 1, _walltime_s(queue, script)
    num_nodes, per_node = _part(asked, wishes)
    new = text
    if wishes.walltime_s is not None and walltime_s:
        # The clock that `ddp-hpc render` gives a script counts from the directive's number.
        pattern = rf"(\$\(date \+%s\) - SECONDS \+ |^walltime_s=){walltime_s}\b"
        new = re.sub(pattern, rf"\g<1>{wishes.walltime_s}", text, flags=re.MULTILINE)
    return Plan(
        name=path.name,
        text=new,
        scheduler=scheduler,
        site=site,
        mpiexec=_mpiexec(script, site, queue),
        asked_nodes=asked,
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        walltime_s=walltime_s,
        findings=findings,
        edited=new != text,
    )


def _name(path: Path) -> str:
    return ascii(str(path))[1:-1]


def _part(asked: int, wishes: Wishes) -> tuple[int, int]:
    """Nodes, and ranks on each at most."""
    room = max(_LEAST_RANKS, len(os.sched_getaffinity(0)))
    for option, value in (("--nodes", wishes.num_nodes), ("--ranks-per-node", wishes.ranks_per_node)):
        if value is not None and not 1 <= value <= _MOST_RANKS:
            raise RequestError(f"{option} {value} was given; 1 to {_MOST_RANKS} can be done on one machine")
    if wishes.num_nodes is not None and wishes.num_nodes > asked:
        raise RequestError(
            f"--nodes {wishes.num_nodes} was given and the script asks for {asked}; ask for as many or fewer"
        )
    num_nodes = wishes.num_nodes or min(asked, room // 2)
    per_node = wishes.ranks_per_node or max(1, room // num_nodes)
    if num_nodes * per_node > _MOST_RANKS:
        raise RequestError(
            f"{num_nodes} nodes of {per_node} ranks are {num_nodes * per_node}; at most {_MOST_RANKS} can be "
            "done on one machine; lower --nodes or --ranks-per-node"
        )
    return num_nodes, per_node


def _site(script: Script, profile: str) -> Site | None:
    """The site that the user names, or the script itself where `ddp-hpc render` wrote it."""
    if profile:
        return load_site(profile)
    named = [value for _, name, value in script.assignments if name == "DDP_HPC_PROFILE"]
    try:
        return load_site(named[-1]) if named else None
    except RequestError:
        return None


def _walltime_s(queue: Queue | None, script: Script) -> int:
    try:
        return queue.walltime_s(script) if queue else 0
    except RefusedError:
        return 0  # the scheduler's stand-in refuses it in a moment, with its own message


def _mpiexec(script: Script, site: Site | None, queue: Queue | None) -> str:
    """Which mpiexec the script is written for: pals, openmpi or hydra."""
    if site is not None and site.launch.dialect != "auto":
        return site.launch.dialect
    words = [word.partition("=")[0] for command in script.launches() for word in command.own_words]
    if any(word in _OF_OPENMPI for word in words):
        return "openmpi"
    if any(word in _OF_PALS for word in words):
        return "pals"
    return queue.mpiexec if queue else "hydra"
