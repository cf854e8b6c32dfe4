"""Determines the world: the rank, size and node of this process, and the source of each value.

`discover` takes all values from one launcher, adds missing values from MPI if MPI is available, and compares
them with the variables of every other launcher. It raises an error instead of guessing: a rank has no default
value.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.base.errors import LaunchError, RequestError, nearest
from ddp_hpc.base.job_variables import SIMULATED_NODE, node_file_variable
from ddp_hpc.base.option_names import named
from ddp_hpc.discovery import rank_communication
from ddp_hpc.discovery.launcher_environment import (
    BY_NAME,
    LAUNCHERS,
    VALUE_NAMES,
    Environ,
    Launcher,
    LauncherValues,
    batch_shell_tasks,
    present_launchers,
    read_launcher_values,
)
from ddp_hpc.discovery.rank_communication import MpiComm

MpiLoader = Callable[[str, str], MpiComm | None]
DISCOVERIES = ("auto", *(launcher.name for launcher in LAUNCHERS), "mpi", "single", "device_count")
_SPLIT = "MPI Split_type(SHARED)"


@dataclass(frozen=True, kw_only=True)
class World:
    """The position of this process among the ranks.

    `node_rank` and `num_nodes` are None if no source provides them; correctness
    never depends on these two.
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
        """Whether the ranks are on more than one node."""
        return self.world_size > self.local_size

    @property
    def prefix(self) -> str:
        """The prefix of every error line on compute nodes: `[rank 5/8 nid0012] `."""
        return f"[rank {self.rank}/{self.world_size} {self.hostname}] "


def short_hostname() -> str:
    """Returns the host name without its domain, from the system: $HOSTNAME can be that of the batch node.

    In a rehearsal, it is the name of the simulated node.
    """
    return os.environ.get(SIMULATED_NODE) or socket.gethostname().partition(".")[0]


def discover(
    environ: Environ, choice: str = "auto", load_mpi: MpiLoader = rank_communication.load_mpi
) -> World:
    """Returns the world that this process belongs to.

    Collective if the launcher starts ranks with MPI: every rank must call this.

    Args:
        environ: the process's environment.
        choice: one of `DISCOVERIES`; `auto` takes the first launcher of the table that is present.
        load_mpi: returns MPI_COMM_WORLD (tests pass their own function).

    Raises:
        LaunchError: two sources disagree, MPI reports N separate worlds of one rank, a variable is missing,
            or this process is a batch shell and not a rank.
        RequestError: the choice is unknown.
    """
    if choice not in DISCOVERIES:
        raise RequestError(
            f"{named('discovery')} {choice}: unknown{nearest(choice, DISCOVERIES)}; "
            f"use one of {', '.join(DISCOVERIES)}"
        )
    if choice in ("single", "device_count"):
        return _single(f"{named('discovery')} {choice}")
    if choice == "mpi":
        return _from_mpi_alone(environ, load_mpi)
    if choice == "auto":
        present = present_launchers(environ)
        if not present:
            return _no_launcher(environ)
        launcher, *others = present
    else:
        launcher = _chosen(choice, environ)
        others = [other for other in present_launchers(environ) if other is not launcher]

    reported = read_launcher_values(launcher, environ)
    _refuse_rank_beyond_size(launcher, reported)
    notes = _compare(launcher, reported, others, environ, strict=choice == "auto")
    family = _mpi_family(launcher, environ) if choice == "auto" or _needs_mpi(reported) else ""
    mpi = load_mpi(family, launcher.title) if family and rank_communication.mpi4py_is_installed() else None
    derived = launcher.derive(environ, reported) if launcher.derive else reported
    if mpi is not None:
        _refuse_singletons(launcher, derived, mpi)
        reported = _complete_from_mpi(launcher, reported, mpi)
    else:
        reported = derived
    return _world(launcher, reported, notes, mpi)


def _chosen(choice: str, environ: Environ) -> Launcher:
    launcher = BY_NAME[choice]
    if launcher not in present_launchers(environ):
        wanted = " or ".join(launcher.any_of)
        also = f" with {', '.join(launcher.all_of)}" if launcher.all_of else ""
        raise LaunchError(
            f"{named('discovery')} {choice}: {wanted}{also} not found in the environment; "
            f"start the ranks with {launcher.start}, or omit {named('discovery')}"
        )
    return launcher


def _mpi_family(launcher: Launcher, environ: Environ) -> str:
    """Returns the kind of MPI that works under this launcher; empty if MPI must not be initialized.

    Slurm sets all values in the environment of a step, so MPI is used only if it works: with --mpi=none,
    each task would have its own MPI_COMM_WORLD, and the MPICH wheel of PyPI aborts under --mpi=pmix, the
    default at many sites.
    """
    if launcher.name != "slurm":
        return launcher.mpi
    if "PMIX_RANK" in environ or environ.get("SLURM_MPI_TYPE", "").startswith("pmix"):
        return "openmpi or none"
    has_pmi = "PMI_RANK" in environ or environ.get("SLURM_MPI_TYPE", "none") != "none"
    return "mpich or none" if has_pmi else ""


def _needs_mpi(reported: LauncherValues) -> bool:
    return None in (reported.rank, reported.world_size, reported.local_rank, reported.local_size)


def _compare(
    launcher: Launcher, reported: LauncherValues, others: list[Launcher], environ: Environ, strict: bool
) -> tuple[str, ...]:
    """Returns notes on every other launcher that is present.

    A contradiction is an error, or a note if not `strict`.
    """
    notes: list[str] = []
    for other in others:
        if other.rank == launcher.rank:
            continue  # both rows read the same variables
        other_values = read_launcher_values(other, environ)
        if other_values.rank is None and other_values.world_size is None:
            continue
        ranks = {other_values.rank, reported.rank} - {None}
        sizes = {other_values.world_size, reported.world_size} - {None}
        if len(ranks) < 2 and len(sizes) < 2:
            notes.append(f"{other.title} agrees: {other_values.place()}")
        elif _started_by(launcher, reported, other_values):
            started = f"{other.title} started {launcher.title}, and its variables do not describe this rank"
            notes.append(f"{started}: {other_values.place()}")
        else:
            text = f"{launcher.title} reports {reported.place()}"
            text += f", but {other.title} reports {other_values.place()}"
            if strict:
                raise LaunchError(
                    f"{text}: one launcher started the other, or its variables are stale; unset the stale "
                    f"variables, or select a launcher with {named('discovery')} {launcher.name} or "
                    f"{named('discovery')} "
                    f"{other.name}"
                )
            notes.append(f"{text}: the first one was selected")
    return tuple(notes)


def _started_by(launcher: Launcher, reported: LauncherValues, other_values: LauncherValues) -> bool:
    """Returns whether the other launcher started this launcher's agents or proxies, one per node.

    Hydra's proxies and Open MPI's daemons are one Slurm task per node, torchrun has one agent
    per member of its group, and a single task is a shell in which the user started the inner
    launcher.
    """
    if other_values.world_size is None:
        # PMIx and PALS provide a rank but no size, so compare the rank with the number of torchrun agents.
        num_agents = reported.num_nodes if launcher.name == "torchrun" else None
        return num_agents is not None and other_values.rank is not None and other_values.rank < num_agents
    if other_values.world_size == 1:
        return True
    if launcher.name == "torchrun":
        return other_values.world_size == reported.num_nodes
    # Proxies start the ranks of one world, so variables that report a world of one rank are stale.
    return other_values.local_size == 1 and reported.world_size != 1


def _refuse_rank_beyond_size(launcher: Launcher, reported: LauncherValues) -> None:
    if reported.rank is not None and reported.world_size is not None and reported.rank >= reported.world_size:
        raise LaunchError(
            f"{launcher.title} reports {reported.place()}, but a rank must be less than the size; unset the "
            f"stale variable, or use MPI's values with {named('discovery')} mpi"
        )


def _refuse_singletons(launcher: Launcher, reported: LauncherValues, mpi: MpiComm) -> None:
    """Raises LaunchError if mpi4py uses a different MPI than the launcher, which is the most common
    mistake.
    """
    ranks = max(reported.world_size or 1, reported.local_size or 1)
    if mpi.size == 1 and ranks > 1:
        source = reported.sources.get("world_size") or reported.sources.get("local_size")
        # The environment variables of these launchers are sufficient without MPI, including for the
        # rendezvous.
        sufficient = launcher.name in ("pals", "slurm", "cray_shasta") and not _needs_mpi(reported)
        without = f"; or do not use MPI: {named('discovery')} {launcher.name}" if sufficient else ""
        raise LaunchError(
            f"{launcher.title} started {ranks} ranks ({source}), but MPI reports 1: {ranks} singletons, each "
            f"in its own world; {rank_communication.wrong_library(launcher.title)}{without}"
        )


def _complete_from_mpi(launcher: Launcher, reported: LauncherValues, mpi: MpiComm) -> LauncherValues:
    """Returns the launcher's values, completed with those of MPI after a comparison. Collective."""
    problem = ""
    for name, ours, theirs in (("size", reported.world_size, mpi.size), ("rank", reported.rank, mpi.rank)):
        if ours is not None and ours != theirs:
            problem = (
                f"{launcher.title} reports {reported.place()}, but MPI_COMM_WORLD reports rank {mpi.rank} of "
                f"{mpi.size}: the {name} differs; unset stale variables, or select one with "
                f"{named('discovery')} {launcher.name} or {named('discovery')} mpi"
            )
    # Stale variables often contain rank 0, so the actual rank 0 may not detect a mismatch. The ranks exchange
    # their problems, because otherwise rank 0 would continue alone.
    if problem := mpi.combine(problem, rank_communication.first_text):
        error = LaunchError(problem)
        error.on_all_ranks = True
        raise error
    of_mpi = dict(zip(VALUE_NAMES, (mpi.rank, mpi.size, *mpi.node_layout()), strict=True))
    missing: dict[str, Any] = {name: of_mpi[name] for name in VALUE_NAMES if getattr(reported, name) is None}
    sources = {name: "MPI_COMM_WORLD" if name in ("rank", "world_size") else _SPLIT for name in missing}
    return replace(reported, sources={**reported.sources, **sources}, **missing)


def _from_mpi_alone(environ: Environ, load_mpi: MpiLoader) -> World:
    """Returns the world according to mpi4py alone. Collective."""
    mpi = load_mpi("any", "mpiexec")
    assert mpi is not None
    for launcher in present_launchers(environ):
        if launcher.mpi:
            _refuse_singletons(launcher, read_launcher_values(launcher, environ), mpi)
    alone = Launcher(name="mpi", title="MPI", any_of=())
    return _world(alone, _complete_from_mpi(alone, LauncherValues(), mpi), (), mpi)


def _no_launcher(environ: Environ) -> World:
    tasks = batch_shell_tasks(environ)
    if tasks > 1:
        raise LaunchError(
            f"this is the batch shell of Slurm job {environ['SLURM_JOB_ID']}, not one of its {tasks} tasks "
            f"(SLURM_PROCID={environ.get('SLURM_PROCID', 'unset')} without SLURM_STEP_ID is not a rank); "
            f"put `srun` in front of the command, or use {named('discovery')} single to run one process"
        )
    world = _single("no launcher's variables in the environment")
    if node_file_variable(environ):
        note = "this job runs one rank without a launcher; to run more, put mpiexec in front of the command"
        return replace(world, notes=(note,))
    return world


def _single(why: str) -> World:
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        node_rank=0,
        num_nodes=1,
        hostname=short_hostname(),
        launcher="single",
        sources=dict.fromkeys(VALUE_NAMES, why),
    )


def _world(
    launcher: Launcher, reported: LauncherValues, notes: tuple[str, ...], mpi: MpiComm | None
) -> World:
    """Returns the world. No other function computes missing values from other values."""
    _refuse_rank_beyond_size(launcher, reported)  # check again, because the size may have been derived
    sources = dict(reported.sources)
    if reported.local_rank is None and reported.world_size == 1:
        reported = replace(reported, local_rank=0)
        sources["local_rank"] = "a world of one"
    if reported.local_size is None and reported.world_size is not None and reported.num_nodes is not None:
        if reported.world_size % reported.num_nodes == 0:
            reported = replace(reported, local_size=reported.world_size // reported.num_nodes)
            sources["local_size"] = f"{sources['world_size']} / {sources['num_nodes']} (equal nodes assumed)"
    elif reported.local_size is None and reported.world_size == 1:
        reported = replace(reported, local_size=1)
        sources["local_size"] = "a world of one"
    for name in ("rank", "world_size", "local_rank", "local_size"):
        if getattr(reported, name) is None:
            variable = getattr(launcher, name)
            reason = f"{variable} is not set" if variable else "it sets no variable for it"
            raise LaunchError(
                f"{launcher.title} was detected but does not provide the {name.replace('_', ' ')} "
                f"({reason}), and MPI is not available; start the ranks with "
                f"{launcher.start or 'mpiexec'} and install mpi4py, or set DDP_HPC_RANK, "
                "DDP_HPC_WORLD_SIZE, DDP_HPC_LOCAL_RANK and DDP_HPC_LOCAL_SIZE for each rank"
            )
    assert reported.rank is not None
    assert reported.world_size is not None
    assert reported.local_rank is not None
    assert reported.local_size is not None
    if reported.local_rank >= reported.local_size:
        raise LaunchError(
            f"{launcher.title} reports local rank {reported.local_rank} ({sources['local_rank']}) of "
            f"{reported.local_size} ({sources['local_size']}), but a local rank must be less than the local "
            "size; unset the stale variable"
        )
    if reported.local_size > reported.world_size:
        raise LaunchError(
            f"{launcher.title} reports {reported.local_size} ranks on this node ({sources['local_size']}) "
            f"but {reported.world_size} in total ({sources['world_size']}); unset the stale variable"
        )
    num_nodes = reported.num_nodes
    if num_nodes is None and reported.local_size == reported.world_size:
        num_nodes, sources["num_nodes"] = 1, "all ranks are on this node"
    node_rank = reported.node_rank
    if node_rank is None and num_nodes == 1:
        node_rank, sources["node_rank"] = 0, "one node"
    return World(
        rank=reported.rank,
        world_size=reported.world_size,
        local_rank=reported.local_rank,
        local_size=reported.local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        hostname=short_hostname(),
        launcher=launcher.name,
        sources=sources,
        notes=notes,
        mpi=mpi,
    )
