"""Launch lines of `render --standalone`: jobs in which ddp-hpc does not have to be installed.

The script derives the variables that PyTorch requires from the variables of the launcher. No other job
resumes the run.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.environment_exports import Export
from ddp_hpc.render.launch_lines import NUM_NODES, NUM_RANKS, STEP_SCRIPT
from ddp_hpc.render.shell_quoting import Raw, Word, sh
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.site import Site

# The rank and the local rank in the environment of each launcher.
_RANKS = {
    "srun": ("$SLURM_PROCID", "$SLURM_LOCALID"),
    "ibrun": ("$PMI_RANK", "$MPI_LOCALRANKID"),
    # PALS, Open MPI, or Hydra
    "mpiexec": (
        "${PALS_RANKID:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}",
        "${PALS_LOCAL_RANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}}",
    ),
}


def first_node(site: Site, layout: Layout, scheduler: Scheduler) -> str:
    """Returns the bash expression for the first node of the job.

    Raises:
        RequestError: the scheduler or the launcher is not supported.
    """
    if not scheduler.writer.first_node_in_shell:
        raise RequestError(
            f"--standalone is not supported under {scheduler.title}. Use it with Slurm, PBS or without a "
            "scheduler."
        )
    if site.launch.dialect == "openmpi" and layout.launcher == "mpiexec":
        raise RequestError(
            f"--standalone is not supported with Open MPI's mpiexec, which {site.title} uses: that mpiexec "
            "does not pass environment variables to other nodes. Use --launcher torchrun, or omit "
            "--standalone."
        )
    return scheduler.writer.first_node_in_shell


def standalone_exports(site: Site, layout: Layout, scheduler: Scheduler) -> list[Export]:
    """Returns the variables that all ranks share."""
    suffix = site.fabric.suffix
    # PBS_NODEFILE can already contain the suffix.
    address = Raw(f'"${{first_node%%.*}}"{sh(suffix)}' if suffix else '"$first_node"')
    why = "Rank 0 runs on the first node. Each job has a different port."
    exports = [
        Export("MASTER_ADDR", address, why),
        Export("MASTER_PORT", Raw(f"$((20000 + {scheduler.writer.job_number_in_shell} % 20000))")),
    ]
    if layout.launcher != "torchrun":
        exports.append(Export("WORLD_SIZE", NUM_RANKS))
        exports.append(Export("LOCAL_WORLD_SIZE", str(layout.ranks_per_node)))
    return exports


def standalone_program(layout: Layout, program: list[Word]) -> list[Word]:
    """Returns the words of the command that the launcher starts."""
    if layout.launcher == "torchrun":
        index = program.index(STEP_SCRIPT)
        rest = program[index + 1 :]
        if PurePosixPath(str(rest[0])).name.startswith("python"):
            rest = rest[2:] if rest[1:2] == ["-u"] else rest[1:]
        agent: list[Word] = [
            "torchrun",
            "--nnodes",
            NUM_NODES,
            "--nproc-per-node",
            str(layout.ranks_per_node),
        ]
        agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", Raw('"$MASTER_ADDR:$MASTER_PORT"')]
        return [*program[:index], *agent, *rest]
    rank, local_rank = _RANKS[layout.launcher]
    shell = f'RANK={rank} LOCAL_RANK={local_rank} exec "$0" "$@"'
    words = program[3:] if program[:3] == ["ddp-hpc", "exec", "--"] else program
    return ["bash", "-c", shell, *words]
