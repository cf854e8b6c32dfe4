"""What each launcher puts into the environment of a rank: one table, read one row at a time.

A launcher is taken whole: rank, size and local rank come from one row. The
order of the rows is the order of preference, and each place in it has a reason;
`tests/world/test_launch_env.py` pins it. Nothing here looks at MPI or torch.

Sources: the launchers' own source and man pages (PALS: HPE has published none;
its names come from ALCF's user guides, flux-coral2's cray-pals plugin and
Slurm's cray_shasta plugin), and the recorded environments under
`tests/environments/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.discovery.hostlist import expand_counts
from ddp_hpc.errors import LaunchError

Environ = Mapping[str, str]
EXEC = "DDP_HPC_EXEC"
"""Names of the variables that `ddp-hpc exec` has added."""

# Slurm numbers its special steps down from 2^32: pending, extern, batch and
# interactive. `srun --pty` inside salloc is the interactive one, no rank of a job.
_FIRST_SPECIAL_STEP = 2**32 - 16


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one launcher says of this process; None where it says nothing."""

    launcher: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # which variable each value came from

    def place(self) -> str:
        """`rank 3 of 4 (SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4)`."""
        rank = "?" if self.rank is None else self.rank
        size = "?" if self.world_size is None else self.world_size
        names = [f"{self.sources[k]}={getattr(self, k)}" for k in ("rank", "world_size") if k in self.sources]
        return f"rank {rank} of {size} ({', '.join(names)})"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A row of the table: which variable holds what, and which ones say that the launcher is there."""

    name: str
    title: str
    any_of: tuple[str, ...]  # one of these set: the launcher is there
    all_of: tuple[str, ...] = ()  # and all of these; a trailing * stands for any ending
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    mpi: str = ""  # the MPI that its ranks must be linked with: mpich, openmpi, any; empty: no MPI
    start: str = ""  # how its ranks are started, for error messages
    complete: Callable[[Environ, Claim], Claim] | None = None  # what plain variables do not say
    derive: Callable[[Environ, Claim], Claim] | None = None  # what is assumed where MPI cannot be asked

    def is_present(self, environ: Environ) -> bool:
        """True where the environment carries this launcher's marks."""
        return any(v in environ for v in self.any_of) and all(_has(environ, v) for v in self.all_of)


def _has(environ: Environ, name: str) -> bool:
    if name.endswith("*"):
        return any(v.startswith(name[:-1]) for v in environ)
    return name in environ


def _complete_slurm(environ: Environ, claim: Claim) -> Claim:
    """Slurm gives no local size, but the run-length coded list of tasks per node and the node's index."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None or claim.node_rank is None:
        return claim
    counts = expand_counts(text)
    if claim.node_rank >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID={claim.node_rank} is outside SLURM_STEP_TASKS_PER_NODE={text} "
            f"({len(counts)} nodes); these variables are of two different steps: unset the older ones"
        )
    sources = {**claim.sources, "local_size": "SLURM_STEP_TASKS_PER_NODE"}
    return replace(claim, local_size=counts[claim.node_rank], sources=sources)


def _derive_pals(environ: Environ, claim: Claim) -> Claim:
    """World size under PALS: no variable of its own holds it.

    `PMI_SIZE` with --pmi=cray (Polaris); with --pmi=pmix (Aurora) only MPI or
    the node file can tell, and the node file only if all nodes hold as many
    ranks. Its lines repeat once per mpiproc, so unique ones are counted
    (meta-pytorch/torchcomms#79 counts lines).
    """
    if claim.world_size is not None:
        return claim
    hosts = pbs_hosts(environ)
    if not hosts or claim.local_size is None:
        return claim
    sources = {**claim.sources, "world_size": "PALS_LOCAL_SIZE x hosts of PBS_NODEFILE (equal nodes assumed)"}
    return replace(claim, world_size=claim.local_size * len(hosts), num_nodes=len(hosts), sources=sources)


def pbs_hosts(environ: Environ) -> list[str]:
    """The hosts of PBS_NODEFILE, each once, in order; empty where there is no such file."""
    path = environ.get("PBS_NODEFILE")
    try:
        lines = Path(path).read_text(encoding="utf-8").split() if path else []
    except OSError:
        return []
    return list(dict.fromkeys(lines))


LAUNCHERS: tuple[Launcher, ...] = (
    # The user has the last word.
    Launcher(
        name="override",
        title="DDP_HPC_* variables",
        any_of=("DDP_HPC_RANK", "DDP_HPC_WORLD_SIZE"),
        rank="DDP_HPC_RANK",
        world_size="DDP_HPC_WORLD_SIZE",
        local_rank="DDP_HPC_LOCAL_RANK",
        local_size="DDP_HPC_LOCAL_SIZE",
        node_rank="DDP_HPC_NODE_RANK",
        start="export DDP_HPC_RANK, DDP_HPC_WORLD_SIZE, DDP_HPC_LOCAL_RANK and DDP_HPC_LOCAL_SIZE",
    ),
    # torchrun's workers carry the variables of whatever started their agent: it comes first.
    Launcher(
        name="torchrun",
        title="torchrun",
        any_of=("TORCHELASTIC_RUN_ID",),
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
        start="torchrun",
    ),
    # OMPI_COMM_WORLD_NODE_RANK is no node index but the rank among all jobs' processes of the
    # node, so the node index is derived. A bare OMPI_* proves nothing: OMPI_ALLOW_RUN_AS_ROOT
    # is often set by hand.
    Launcher(
        name="openmpi",
        title="Open MPI",
        any_of=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        mpi="openmpi",
        start="Open MPI's mpiexec",
    ),
    Launcher(
        name="jsrun",
        title="LSF jsrun",
        any_of=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank="JSM_NAMESPACE_RANK",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        mpi="openmpi",  # Spectrum MPI is one
        start="jsrun",
    ),
    # Before PALS: Flux's cray-pals plugin sets PALS_RANKID too, without the local rank.
    Launcher(
        name="flux",
        title="Flux",
        any_of=("FLUX_TASK_RANK",),
        rank="FLUX_TASK_RANK",
        world_size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
        mpi="any",
        start="flux run",
    ),
    # Before PALS: `srun --mpi=cray_shasta` sets PALS_* and so does not mean PBS. Slurm's own names are
    # taken, as its 22.05 sets no PMI_* and no PALS_LOCAL_RANKID there (recorded); 23.02 does.
    Launcher(
        name="cray_shasta",
        title="Slurm (srun --mpi=cray_shasta)",
        any_of=("PALS_RANKID", "PALS_APID"),
        all_of=("SLURM_STEP_ID",),
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES",
        mpi="mpich",
        start="srun --mpi=cray_shasta",
        complete=_complete_slurm,
    ),
    Launcher(
        name="pals",
        title="HPE PALS",
        any_of=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank="PALS_RANKID",
        world_size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        node_rank="PALS_NODEID",
        mpi="mpich",
        start="the site's mpiexec (PALS)",
        derive=_derive_pals,
    ),
    Launcher(
        name="mvapich",
        title="MVAPICH2",
        any_of=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        mpi="mpich",
        start="MVAPICH2's mpirun_rsh",
    ),
    Launcher(
        name="intelmpi",
        title="Intel MPI",
        any_of=("MPI_LOCALRANKID",),
        all_of=("PMI_RANK", "I_MPI_*"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mpi="mpich",
        start="Intel MPI's mpiexec",
    ),
    # Before Slurm: inside an allocation Hydra's proxies are tasks of a Slurm step, and every rank
    # carries its proxy's SLURM_PROCID.
    Launcher(
        name="hydra",
        title="MPICH Hydra",
        any_of=("MPI_LOCALRANKID",),
        all_of=("PMI_RANK",),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mpi="mpich",
        start="MPICH's mpiexec",
    ),
    # Hydra's PMI_PORT mode: the size is in no variable.
    Launcher(
        name="hydra_port",
        title="MPICH Hydra (PMI_PORT)",
        any_of=("PMI_ID", "PMI_PORT"),
        rank="PMI_ID",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mpi="mpich",
        start="MPICH's mpiexec",
    ),
    # Step variables only: SLURM_NTASKS is the job's where a step has fewer tasks.
    Launcher(
        name="slurm",
        title="Slurm step",
        any_of=("SLURM_STEP_ID",),  # in_slurm_step tells a task from a shell
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES",
        mpi="any",
        start="srun",
        complete=_complete_slurm,
    ),
    # PMI launchers without a local rank.
    Launcher(
        name="pmi",
        title="PMI",
        any_of=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        mpi="mpich",
        start="mpiexec",
    ),
    # PMIX_RANK is all that the standard exports; the size is a PMIx key, which MPI reads.
    Launcher(
        name="pmix", title="PMIx", any_of=("PMIX_RANK",), rank="PMIX_RANK", mpi="any", start="mpiexec (PMIx)"
    ),
    Launcher(
        name="manual",
        title="RANK and WORLD_SIZE set by hand",
        any_of=("RANK",),
        all_of=("WORLD_SIZE",),
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        start="export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    ),
)
BY_NAME = {launcher.name: launcher for launcher in LAUNCHERS}
_VALUES = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes")
_SIZES = ("world_size", "local_size", "num_nodes")


def read_claim(launcher: Launcher, environ: Environ) -> Claim:
    """All that a launcher says of this process.

    Raises:
        LaunchError: where one of its variables holds no number.
    """
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name in _VALUES:
        variable = getattr(launcher, name)
        if variable and variable in environ:
            values[name] = _number(variable, environ[variable], least=1 if name in _SIZES else 0)
            sources[name] = variable
    claim = Claim(launcher=launcher.name, sources=sources, **values)
    return launcher.complete(environ, claim) if launcher.complete else claim


def as_launched(environ: Environ) -> dict[str, str]:
    """The environment without what `ddp-hpc exec` has added: our own rendezvous needs none of it."""
    added = {EXEC, *environ.get(EXEC, "").split(",")}
    return {name: value for name, value in environ.items() if name not in added}


def peek_rank(environ: Environ) -> int:
    """The rank that the environment seems to give, for choosing who prints an error; 0 where none does."""
    for launcher in present_launchers(environ):
        rank = _plain_number(environ.get(launcher.rank, ""))
        if rank is not None:
            return rank
    return 0


def _number(variable: str, text: str, least: int) -> int:
    number = _plain_number(text)
    if number is None or number < least:
        raise LaunchError(
            f"{variable}={text[:80]!r} is no {'size' if least else 'rank'}; a launcher sets it to a number "
            f"from {least} up: unset it, or start the ranks anew"
        )
    return number


def _plain_number(text: str) -> int | None:
    """The number that a launcher wrote; None for the rest that `int` takes: signs, blanks, `1_000`."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def present_launchers(environ: Environ) -> list[Launcher]:
    """The launchers that left their marks here, in order of preference."""
    found = [launcher for launcher in LAUNCHERS if launcher.is_present(environ)]
    return [x for x in found if x.name not in ("slurm", "cray_shasta") or in_slurm_step(environ)]


def in_slurm_step(environ: Environ) -> bool:
    """True for a task that srun started; false in a batch or salloc shell.

    The batch shell carries SLURM_PROCID=0 and SLURM_NTASKS=N like a rank 0 of
    N; only a task has a step id that counts up from 0.
    """
    step = _plain_number(environ.get("SLURM_STEP_ID", ""))
    return step is not None and step < _FIRST_SPECIAL_STEP


def batch_shell_tasks(environ: Environ) -> int:
    """Tasks of the Slurm allocation whose batch or salloc shell this is; 0 where it is none.

    `sbatch --nodes=2` alone sets no SLURM_NTASKS: srun would start one task a node.
    """
    if "SLURM_JOB_ID" not in environ or in_slurm_step(environ):
        return 0
    told = [_plain_number(environ.get(name, "")) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    return max([number for number in told if number is not None], default=1)
