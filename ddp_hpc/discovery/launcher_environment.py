"""The environment variables that each launcher sets for a rank, as one table.

All values come from one row: rank, size and local rank of different launchers
are never combined. The order of the rows is the order of preference; comments
explain it, and `tests/discovery/test_launcher_environment.py` checks it. This
module uses neither MPI nor torch.

Sources: the launchers' own source and man pages (HPE has published none for PALS;
its names come from ALCF's user guides, flux-coral2's cray-pals plugin and
Slurm's cray_shasta plugin), and the recorded environments under
`tests/environments/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.hostlist import expand_counts
from ddp_hpc.base.job_variables import node_file_hosts, node_file_variable

Environ = Mapping[str, str]
ADDED_BY_EXEC = "DDP_HPC_EXEC"
"""This variable lists the names of the variables that `ddp-hpc exec` has added."""

# The IDs of Slurm's special steps (pending, extern, batch, interactive) count down from 2^32. `srun --pty`
# inside salloc starts the interactive step, whose shell is not a rank.
_FIRST_SPECIAL_STEP = 2**32 - 16


@dataclass(frozen=True, kw_only=True)
class LauncherValues:
    """The values that one launcher has set for this process; a value that is not set is None."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    sources: Mapping[str, str] = field(
        default_factory=dict
    )  # the name of the variable that contains each value

    def place(self) -> str:
        """Returns rank and size with their variables: `rank 3 of 4 (SLURM_PROCID=3, ...)`."""
        rank = "?" if self.rank is None else self.rank
        size = "?" if self.world_size is None else self.world_size
        names = [f"{self.sources[k]}={getattr(self, k)}" for k in ("rank", "world_size") if k in self.sources]
        return f"rank {rank} of {size} ({', '.join(names)})"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A row of the table: the variables that identify a launcher, and those that hold its values."""

    name: str
    title: str
    any_of: tuple[str, ...]  # the launcher is detected if one of these variables is set ...
    all_of: tuple[str, ...] = ()  # ... and all of these are set; a trailing * stands for any suffix
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    mpi: str = ""  # the MPI that its ranks must be linked with: mpich, openmpi or any; empty without MPI
    start: str = ""  # how its ranks are started, for error messages
    # Adds values that must be computed from the variables.
    complete: Callable[[Environ, LauncherValues], LauncherValues] | None = None
    # Adds values that may be wrong, for ranks without MPI.
    derive: Callable[[Environ, LauncherValues], LauncherValues] | None = None

    def is_present(self, environ: Environ) -> bool:
        """Returns whether the variables that identify this launcher are set."""
        return any(v in environ for v in self.any_of) and all(_has(environ, v) for v in self.all_of)


# Since 23.11, Slurm sets these variables in every job (`_set_ext_launcher_hydra` in src/common/env.c).
_SET_BY_SLURM = frozenset(("I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"))


def _has(environ: Environ, name: str) -> bool:
    if name.endswith("*"):
        return any(v.startswith(name[:-1]) for v in environ.keys() - _SET_BY_SLURM)
    return name in environ


def _complete_slurm(environ: Environ, reported: LauncherValues) -> LauncherValues:
    """Adds the local size, from Slurm's compressed list of tasks per node and the node's index."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None or reported.node_rank is None:
        return reported
    counts = expand_counts(text)
    if reported.node_rank >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID={reported.node_rank} is outside SLURM_STEP_TASKS_PER_NODE={text} "
            f"({len(counts)} nodes); these variables belong to two different job steps: unset those of the "
            "older step"
        )
    sources = {**reported.sources, "local_size": "SLURM_STEP_TASKS_PER_NODE"}
    return replace(reported, local_size=counts[reported.node_rank], sources=sources)


def _complete_torchrun(_: Environ, reported: LauncherValues) -> LauncherValues:
    """Corrects the local rank, which is 0 on all ranks under `torchrun --virtual-local-rank`.

    torchrun numbers the ranks of a node consecutively, in the order of the nodes (`_assign_worker_ranks` in
    torch/distributed/elastic/agent/server/api.py). If the nodes have different numbers of ranks, the local
    rank can be derived only on the first and the last node.
    """
    rank, size, world_size = reported.rank, reported.local_size, reported.world_size
    group, groups = reported.node_rank, reported.num_nodes
    if rank is None or size is None or world_size is None or group is None or groups is None:
        return reported
    first = None
    if world_size == size * groups or group == 0:
        first = group * size
    elif group == groups - 1:
        first = world_size - size
    if reported.local_rank != 0 or first is None or not 0 < rank - first < size:
        return reported
    sources = {**reported.sources, "local_rank": "RANK and GROUP_RANK (--virtual-local-rank)"}
    return replace(reported, local_rank=rank - first, sources=sources)


def _derive_pals(environ: Environ, reported: LauncherValues) -> LauncherValues:
    """Adds the world size under PALS, which does not always set a variable for it.

    With --pmi=cray (Polaris) the world size is `PMI_SIZE`. With --pmi=pmix (Aurora) it is known
    only from MPI, or from the node file if all nodes have the same number of ranks. The file has
    one line per mpiproc, so unique lines are counted (meta-pytorch/torchcomms#79 counts all lines).
    """
    if reported.world_size is not None:
        return reported
    hosts = node_file_hosts(environ)
    if not hosts or reported.local_size is None:
        return reported
    sources = {
        **reported.sources,
        "world_size": f"PALS_LOCAL_SIZE x hosts of {node_file_variable(environ)} (equal nodes assumed)",
    }
    return replace(
        reported, world_size=reported.local_size * len(hosts), num_nodes=len(hosts), sources=sources
    )


# fmt: off
LAUNCHERS: tuple[Launcher, ...] = (
    # Variables that the user sets explicitly take precedence.
    Launcher(
        name="override", title="DDP_HPC_* variables",
        start="export DDP_HPC_RANK, DDP_HPC_WORLD_SIZE, DDP_HPC_LOCAL_RANK and DDP_HPC_LOCAL_SIZE",
        any_of=("DDP_HPC_RANK", "DDP_HPC_WORLD_SIZE"),
        rank="DDP_HPC_RANK", world_size="DDP_HPC_WORLD_SIZE",
        local_rank="DDP_HPC_LOCAL_RANK", local_size="DDP_HPC_LOCAL_SIZE",
        node_rank="DDP_HPC_NODE_RANK",
    ),
    # torchrun's workers inherit the variables of the launcher that started their agent, so torchrun comes
    # before that launcher.
    Launcher(
        name="torchrun", title="torchrun", start="torchrun",
        any_of=("TORCHELASTIC_RUN_ID",),
        rank="RANK", world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE", complete=_complete_torchrun,
    ),
    # OMPI_COMM_WORLD_NODE_RANK is not a node index but the rank among the processes of all jobs on the
    # node, so the node index is derived. Other OMPI_* variables do not prove that Open MPI started the
    # process: OMPI_ALLOW_RUN_AS_ROOT is often set by hand.
    Launcher(
        name="openmpi", title="Open MPI", mpi="openmpi", start="Open MPI's mpiexec",
        any_of=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        rank="OMPI_COMM_WORLD_RANK", world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK", local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Spectrum MPI is based on Open MPI.
    Launcher(
        name="jsrun", title="LSF jsrun", mpi="openmpi", start="jsrun",
        any_of=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank="JSM_NAMESPACE_RANK", world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK", local_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    # Flux comes before PALS, because Flux's cray-pals plugin also sets PALS_RANKID, but not the local rank.
    Launcher(
        name="flux", title="Flux", mpi="any", start="flux run",
        any_of=("FLUX_TASK_RANK",),
        rank="FLUX_TASK_RANK", world_size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
    ),
    # cray_shasta comes before PALS, because `srun --mpi=cray_shasta` sets PALS_* too. It uses Slurm's own
    # variables, because Slurm 22.05, unlike 23.02, sets neither PMI_* nor PALS_LOCAL_RANKID.
    Launcher(
        name="cray_shasta", title="Slurm (srun --mpi=cray_shasta)", mpi="mpich",
        start="srun --mpi=cray_shasta",
        any_of=("PALS_RANKID", "PALS_APID"), all_of=("SLURM_STEP_ID",),
        rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID", num_nodes="SLURM_STEP_NUM_NODES", complete=_complete_slurm,
    ),
    Launcher(
        name="pals", title="HPE PALS", mpi="mpich", start="the site's mpiexec (PALS)",
        any_of=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank="PALS_RANKID", world_size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID", local_size="PALS_LOCAL_SIZE", node_rank="PALS_NODEID",
        derive=_derive_pals,
    ),
    Launcher(
        name="mvapich", title="MVAPICH2", mpi="mpich", start="MVAPICH2's mpirun_rsh",
        any_of=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK", world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK", local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="intelmpi", title="Intel MPI", mpi="mpich", start="Intel MPI's mpiexec",
        any_of=("MPI_LOCALRANKID",), all_of=("PMI_RANK", "I_MPI_*"),
        rank="PMI_RANK", world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS",
    ),
    # Hydra comes before Slurm, because in a Slurm allocation Hydra's proxies are tasks of a step, and every
    # rank inherits the SLURM_PROCID of its proxy.
    Launcher(
        name="hydra", title="MPICH Hydra", mpi="mpich", start="MPICH's mpiexec",
        any_of=("MPI_LOCALRANKID",), all_of=("PMI_RANK",),
        rank="PMI_RANK", world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS",
    ),
    # With Hydra's PMI_PORT mode, no variable contains the number of ranks.
    Launcher(
        name="hydra_port", title="MPICH Hydra (PMI_PORT)", mpi="mpich", start="MPICH's mpiexec",
        any_of=("PMI_ID", "PMI_PORT"),
        rank="PMI_ID", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS",
    ),
    # Only variables of the step are read: SLURM_NTASKS belongs to the job, and a step may have fewer tasks.
    Launcher(
        name="slurm", title="Slurm step", mpi="any", start="srun",
        any_of=("SLURM_STEP_ID",),  # set in tasks and shells, which `in_slurm_step` distinguishes
        rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID", num_nodes="SLURM_STEP_NUM_NODES", complete=_complete_slurm,
    ),
    # This row is for launchers that set the variables of PMI but no local rank.
    Launcher(
        name="pmi", title="PMI", mpi="mpich", start="mpiexec",
        any_of=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK", world_size="PMI_SIZE",
    ),
    # PMIx launchers set only PMIX_RANK; the number of ranks is a PMIx key, which MPI reads.
    Launcher(
        name="pmix", title="PMIx", mpi="any", start="mpiexec (PMIx)",
        any_of=("PMIX_RANK",),
        rank="PMIX_RANK",
    ),
    Launcher(
        name="manual", title="RANK and WORLD_SIZE set by hand",
        start="export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        any_of=("RANK",), all_of=("WORLD_SIZE",),
        rank="RANK", world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE",
    ),
)
# fmt: on
BY_NAME = {launcher.name: launcher for launcher in LAUNCHERS}
VALUE_NAMES = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes")
_SIZES = ("world_size", "local_size", "num_nodes")


def read_launcher_values(launcher: Launcher, environ: Environ) -> LauncherValues:
    """Returns all values that a launcher has set for this process.

    Raises:
        LaunchError: one of its variables does not hold a number.
    """
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name in VALUE_NAMES:
        variable = getattr(launcher, name)
        if variable and variable in environ:
            values[name] = _number(variable, environ[variable], least=1 if name in _SIZES else 0)
            sources[name] = variable
    reported = LauncherValues(sources=sources, **values)
    return launcher.complete(environ, reported) if launcher.complete else reported


def without_exec_variables(environ: Environ) -> dict[str, str]:
    """Returns the environment without the variables that `ddp-hpc exec` has added for other programs."""
    added = {ADDED_BY_EXEC, *environ.get(ADDED_BY_EXEC, "").split(",")}
    return {name: value for name, value in environ.items() if name not in added}


def peek_rank(environ: Environ) -> int:
    """Returns the probable rank, which is used to decide which process prints an error; 0 if no launcher was
    detected.
    """
    for launcher in present_launchers(environ):
        rank = _plain_number(environ.get(launcher.rank, ""))
        if rank is not None:
            return rank
    return 0


def _number(variable: str, text: str, least: int) -> int:
    number = _plain_number(text)
    if number is None or number < least:
        raise LaunchError(
            f"{variable}={text[:80]!r} is not a {'size' if least else 'rank'}; it must be an integer of at "
            f"least {least}, set by the launcher: unset it, or start the ranks with the launcher"
        )
    return number


def _plain_number(text: str) -> int | None:
    """Returns the number; None if the text is not only digits, even if `int` accepts it, such as `1_000`."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def present_launchers(environ: Environ) -> list[Launcher]:
    """Returns the launchers whose variables are set, in order of preference."""
    present = [launcher for launcher in LAUNCHERS if launcher.is_present(environ)]
    if in_slurm_step(environ):
        return present
    return [launcher for launcher in present if launcher.name not in ("slurm", "cray_shasta")]


def in_slurm_step(environ: Environ) -> bool:
    """Returns True in a task that srun has started, and False in a batch or salloc shell.

    The batch shell has SLURM_PROCID=0 and SLURM_NTASKS=N like rank 0 of N ranks;
    only a task has a step id that counts up from 0.
    """
    step = _plain_number(environ.get("SLURM_STEP_ID", ""))
    return step is not None and step < _FIRST_SPECIAL_STEP


def batch_shell_tasks(environ: Environ) -> int:
    """Returns the number of tasks of the allocation in a batch or salloc shell of Slurm, and 0 elsewhere.

    `sbatch --nodes=2` alone sets no SLURM_NTASKS: srun would start one task per node.
    """
    if "SLURM_JOB_ID" not in environ or in_slurm_step(environ):
        return 0
    counts = [_plain_number(environ.get(name, "")) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    return max([count for count in counts if count is not None], default=1)
