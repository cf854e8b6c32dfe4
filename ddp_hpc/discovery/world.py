"""The world: rank, size and place of this process, each with its source, or a clear refusal.

`discover` takes one launcher whole, completes it with MPI where MPI can be
asked, compares every other launcher that left its marks, and refuses rather
than guesses: a rank is never defaulted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.discovery import comm as comm_module
from ddp_hpc.discovery.comm import MpiComm
from ddp_hpc.discovery.launcher_environment import (
    BY_NAME,
    LAUNCHERS,
    Claim,
    Environ,
    Launcher,
    batch_shell_tasks,
    present_launchers,
    read_claim,
)
from ddp_hpc.errors import LaunchError, RequestError, nearest

MpiLoader = Callable[[str, str], MpiComm | None]
DISCOVERIES = ("auto", *(launcher.name for launcher in LAUNCHERS), "mpi", "single", "device_count")
_SPLIT = "MPI Split_type(SHARED)"


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among the ranks.

    `node_rank` and `num_nodes` are None where no source tells them; nothing
    that has to be right depends on those two.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int | None = None
    num_nodes: int | None = None
    hostname: str
    launcher: str
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    mpi: MpiComm | None = None

    @property
    def is_multi_node(self) -> bool:
        """True where some rank is on another node than this one."""
        return self.world_size > self.local_size

    @property
    def prefix(self) -> str:
        """`[rank 5/8 nid0012] `: in front of every error line on compute nodes."""
        return f"[rank {self.rank}/{self.world_size} {self.hostname}] "


def short_hostname() -> str:
    """The system's own name without its domain. $HOSTNAME is the batch node's on every node."""
    return socket.gethostname().partition(".")[0]


def discover(environ: Environ, choice: str = "auto", load_mpi: MpiLoader = comm_module.load_mpi) -> World:
    """The world this process is part of.

    Collective where a launcher with MPI is found: every rank must call this.

    Args:
        environ: the process's environment.
        choice: one of `DISCOVERIES`; `auto` takes the first row of the launcher table that is here.
        load_mpi: gives MPI_COMM_WORLD (tests give their own).

    Raises:
        LaunchError: two sources disagree, MPI came up as N singletons, a variable is missing, or
            this is a batch shell and no rank.
        RequestError: for an unknown choice.
    """
    if choice not in DISCOVERIES:
        raise RequestError(
            f"--discovery {choice}: unknown{nearest(choice, DISCOVERIES)}; one of {', '.join(DISCOVERIES)}"
        )
    if choice in ("single", "device_count"):
        return _single(f"--discovery {choice}")
    if choice == "mpi":
        return _from_mpi_alone(environ, load_mpi)
    if choice == "auto":
        found = present_launchers(environ)
        if not found:
            return _no_launcher(environ)
        launcher = found[0]
    else:
        launcher = _chosen(choice, environ)
        found = [launcher, *(x for x in present_launchers(environ) if x is not launcher)]

    claim = read_claim(launcher, environ)
    _refuse_rank_beyond_size(launcher, claim)
    notes = _compare(launcher, claim, found[1:], environ, strict=choice == "auto")
    family = _mpi_family(launcher, environ) if choice == "auto" or _needs_mpi(claim) else ""
    mpi = load_mpi(family, launcher.title) if family and comm_module.mpi4py_is_installed() else None
    derived = launcher.derive(environ, claim) if launcher.derive else claim
    if mpi is not None:
        _refuse_singletons(launcher, derived, mpi)
        claim = _complete_from_mpi(launcher, claim, mpi)
    else:
        claim = derived
    return _world(launcher, claim, notes, mpi)


def _chosen(choice: str, environ: Environ) -> Launcher:
    launcher = BY_NAME[choice]
    if launcher not in present_launchers(environ):
        wanted = " or ".join(launcher.any_of)
        also = f" with {', '.join(launcher.all_of)}" if launcher.all_of else ""
        raise LaunchError(
            f"--discovery {choice}: {wanted}{also} not found in the environment; "
            f"start the ranks with {launcher.start}, or leave --discovery out"
        )
    return launcher


def _mpi_family(launcher: Launcher, environ: Environ) -> str:
    """Which MPI the launcher can make one world of; empty where none is to be started.

    A Slurm step tells everything itself, so MPI is only asked where it can come up:
    with --mpi=none each task would be a world of its own, and MPICH's wheel aborts
    under --mpi=pmix, the default of many sites.
    """
    if launcher.name != "slurm":
        return launcher.mpi
    if "PMIX_RANK" in environ or environ.get("SLURM_MPI_TYPE", "").startswith("pmix"):
        return "openmpi or none"
    has_pmi = "PMI_RANK" in environ or environ.get("SLURM_MPI_TYPE", "none") != "none"
    return "mpich or none" if has_pmi else ""


def _needs_mpi(claim: Claim) -> bool:
    return None in (claim.rank, claim.world_size, claim.local_rank, claim.local_size)


def _compare(
    launcher: Launcher, claim: Claim, others: list[Launcher], environ: Environ, strict: bool
) -> tuple[str, ...]:
    """Notes on every other launcher found here; a contradiction is an error (a note, where not strict)."""
    notes: list[str] = []
    for other in others:
        if other.rank == launcher.rank:
            continue  # the same variables under another heading
        said = read_claim(other, environ)
        if said.rank is None and said.world_size is None:
            continue
        same_rank = None in (said.rank, claim.rank) or said.rank == claim.rank
        same_size = None in (said.world_size, claim.world_size) or said.world_size == claim.world_size
        if same_rank and same_size:
            notes.append(f"{other.title} agrees: {said.place()}")
        elif _started_by(launcher, claim, said, environ):
            notes.append(
                f"{other.title} describes what started {launcher.title}, not this rank: {said.place()}"
            )
        else:
            text = f"{launcher.title} says {claim.place()}, but {other.title} says {said.place()}"
            if strict:
                raise LaunchError(
                    f"{text}: one of them is left over or wraps the other; unset the stale variables, "
                    f"or say which one counts with --discovery {launcher.name} or --discovery {other.name}"
                )
            notes.append(f"{text}: the first was chosen")
    return tuple(notes)


def _started_by(launcher: Launcher, claim: Claim, said: Claim, environ: Environ) -> bool:
    """True where the other launcher started the first one's agents or proxies, one a node.

    Hydra's proxies and Open MPI's daemons are one Slurm task a node, torchrun's
    agents are as many tasks as its group has members, and a single task is a
    shell in which the inner launcher was typed.
    """
    if said.world_size is None:
        # PMIx and PALS tell a rank without a size: an agent's is below the number of agents.
        num_agents = claim.num_nodes if launcher.name == "torchrun" else None
        return num_agents is not None and said.rank is not None and said.rank < num_agents
    if said.world_size == 1:
        return True
    if launcher.name == "torchrun":
        if "DDP_HPC_MIN_NODES" in environ and claim.num_nodes is not None:
            # When a node was lost the group has fewer members than agents were started.
            return claim.num_nodes <= said.world_size and said.local_size == 1
        return said.world_size == claim.num_nodes
    # Proxies carry ranks that know of each other: a lone rank is left over from another launch.
    return said.local_size == 1 and claim.world_size != 1


def _refuse_rank_beyond_size(launcher: Launcher, claim: Claim) -> None:
    if claim.rank is not None and claim.world_size is not None and claim.rank >= claim.world_size:
        raise LaunchError(
            f"{launcher.title} says {claim.place()}: a rank is below the size; unset the stale one, "
            "or ask MPI with --discovery mpi"
        )


def _refuse_singletons(launcher: Launcher, claim: Claim, mpi: MpiComm) -> None:
    """The commonest broken launch: mpi4py is bound to another MPI than the one that started the ranks."""
    ranks = max(claim.world_size or 1, claim.local_size or 1)
    if mpi.size == 1 and ranks > 1:
        source = claim.sources.get("world_size") or claim.sources.get("local_size")
        # These two tell everything in the environment, a common meeting place included.
        alone = launcher.name in ("pals", "slurm", "cray_shasta") and not _needs_mpi(claim)
        without = f"; or do without MPI: --discovery {launcher.name}" if alone else ""
        raise LaunchError(
            f"{launcher.title} started {ranks} ranks ({source}), but MPI says 1: {ranks} singletons, each "
            f"alone in its own world; {comm_module.wrong_library(launcher.title)}{without}"
        )


def _complete_from_mpi(launcher: Launcher, claim: Claim, mpi: MpiComm) -> Claim:
    """The claim with what it lacks from MPI, after both were compared. Collective."""
    problem = ""
    for name, ours, theirs in (("size", claim.world_size, mpi.size), ("rank", claim.rank, mpi.rank)):
        if ours is not None and ours != theirs:
            problem = (
                f"{launcher.title} says {claim.place()}, but MPI_COMM_WORLD says rank {mpi.rank} of "
                f"{mpi.size}: the {name} differs; unset stale variables, or choose with "
                f"--discovery {launcher.name} or --discovery mpi"
            )
    # Rank 0 often agrees with variables left over from another rank 0: it must not go on alone.
    problems = [text for text in mpi.allgather(problem) if text]
    if problems:
        error = LaunchError(problems[0])
        error.on_all_ranks = True
        raise error
    local_rank, local_size, node_rank, num_nodes = mpi.node_layout()
    layout = {
        "rank": (mpi.rank, "MPI_COMM_WORLD"),
        "world_size": (mpi.size, "MPI_COMM_WORLD"),
        "local_rank": (local_rank, _SPLIT),
        "local_size": (local_size, _SPLIT),
        "node_rank": (node_rank, _SPLIT),
        "num_nodes": (num_nodes, _SPLIT),
    }
    missing = {name: pair for name, pair in layout.items() if getattr(claim, name) is None}
    sources = {**claim.sources, **{name: source for name, (_, source) in missing.items()}}
    values: dict[str, Any] = {name: value for name, (value, _) in missing.items()}
    return replace(claim, sources=sources, **values)


def _from_mpi_alone(environ: Environ, load_mpi: MpiLoader) -> World:
    """Rank discovery by mpi4py and nothing else. Collective."""
    mpi = load_mpi("any", "mpiexec")
    assert mpi is not None
    for launcher in present_launchers(environ):
        if launcher.mpi:
            _refuse_singletons(launcher, read_claim(launcher, environ), mpi)
    alone = Launcher(name="mpi", title="MPI", any_of=())
    return _world(alone, _complete_from_mpi(alone, Claim(launcher="mpi"), mpi), (), mpi)


def _no_launcher(environ: Environ) -> World:
    tasks = batch_shell_tasks(environ)
    if tasks > 1:
        raise LaunchError(
            f"this is the batch shell of Slurm job {environ['SLURM_JOB_ID']}, not one of its {tasks} tasks "
            f"(SLURM_PROCID={environ.get('SLURM_PROCID', 'unset')} without SLURM_STEP_ID is no rank); "
            "put `srun` in front of the command, or say --discovery single for one process"
        )
    world = _single("no launcher's variables in the environment")
    if "PBS_NODEFILE" in environ:
        note = "inside a PBS job, yet started by no launcher: one process; put mpiexec in front for more"
        return replace(world, notes=(note,))
    return world


def _single(why: str) -> World:
    names = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes")
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        node_rank=0,
        num_nodes=1,
        hostname=short_hostname(),
        launcher="single",
        sources=dict.fromkeys(names, why),
    )


def _world(launcher: Launcher, claim: Claim, notes: tuple[str, ...], mpi: MpiComm | None) -> World:
    """The finished world; what may be worked out from the rest is worked out here and nowhere else."""
    _refuse_rank_beyond_size(launcher, claim)  # again: the size may have come from MPI or a derivation
    sources = dict(claim.sources)
    if claim.local_rank is None and claim.world_size == 1:
        claim = replace(claim, local_rank=0)
        sources["local_rank"] = "a world of one"
    if claim.local_size is None and claim.world_size is not None and claim.num_nodes is not None:
        if claim.world_size % claim.num_nodes == 0:
            claim = replace(claim, local_size=claim.world_size // claim.num_nodes)
            sources["local_size"] = f"{sources['world_size']} / {sources['num_nodes']} (equal nodes assumed)"
    elif claim.local_size is None and claim.world_size == 1:
        claim = replace(claim, local_size=1)
        sources["local_size"] = "a world of one"
    for name in ("rank", "world_size", "local_rank", "local_size"):
        if getattr(claim, name) is None:
            variable = getattr(launcher, name) or "no variable of it"
            raise LaunchError(
                f"{launcher.title} is here but does not tell the {name.replace('_', ' ')} "
                f"({variable} is not set), and MPI was not there to ask; start the ranks with "
                f"{launcher.start or 'mpiexec'} and mpi4py installed, or set DDP_HPC_RANK, "
                "DDP_HPC_WORLD_SIZE, DDP_HPC_LOCAL_RANK and DDP_HPC_LOCAL_SIZE for each rank"
            )
    assert claim.rank is not None
    assert claim.world_size is not None
    assert claim.local_rank is not None
    assert claim.local_size is not None
    if claim.local_rank >= claim.local_size:
        raise LaunchError(
            f"{launcher.title} says local rank {claim.local_rank} ({sources['local_rank']}) of "
            f"{claim.local_size} ({sources['local_size']}): a local rank is below the local size"
        )
    if claim.local_size > claim.world_size:
        raise LaunchError(
            f"{launcher.title} says {claim.local_size} ranks on this node ({sources['local_size']}) of "
            f"{claim.world_size} in all ({sources['world_size']}): unset the stale one"
        )
    num_nodes = claim.num_nodes
    if num_nodes is None and claim.local_size == claim.world_size:
        num_nodes, sources["num_nodes"] = 1, "all ranks are on this node"
    node_rank = claim.node_rank
    if node_rank is None and num_nodes == 1:
        node_rank, sources["node_rank"] = 0, "one node"
    return World(
        rank=claim.rank,
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        local_size=claim.local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        hostname=short_hostname(),
        launcher=launcher.name,
        sources=sources,
        notes=notes,
        mpi=mpi,
    )
