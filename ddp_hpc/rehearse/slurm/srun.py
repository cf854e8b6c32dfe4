"""Stand-in for `srun` inside a job: runs the tasks of one step with the variables that Slurm sets.

Hydra starts the tasks. With --mpi=pmi2 or cray_shasta, they keep the PMI variables of Hydra and are the ranks
of one MPI program. With --mpi=none, the default of the stand-in, each task is a separate MPI program of one
rank, as with the real srun. There is no PMIx server, so --mpi=pmix does the same.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.hostlist import expand_hostlist
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.failure import Failure
from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, read_line
from ddp_hpc.rehearse.launchers.start_ranks import Place, Step, places, run_step, spool_directory
from ddp_hpc.rehearse.slurm import controller
from ddp_hpc.rehearse.slurm.controller import hostlist, run_lengths
from ddp_hpc.rehearse.slurm.option_tables import SRUN, exported, node_count

_MPI = ("none", "pmi2", "cray_shasta", "pmix", "pmix_v3", "pmix_v4", "pmix_v5")
_UNSUPPORTED = ("multi-prog", "pty", "het-group", "no-allocate", "output", "error", "input", "relative")
_OUTSIDE = "srun: error: Unable to allocate resources: the stand-in can only run srun inside a job"


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Runs the step and returns the largest exit code of its tasks.

    Raises:
        RefusedError: the request is refused, and no task was started.
    """
    line = read_line(argv, SRUN)
    if "version" in line.values:
        sys.stdout.write(controller.VERSION)
        return 0
    if not line.command:
        raise RefusedError("srun: fatal: No command given to execute.")
    number = jobs.find_job(line.values.get("jobid", environ.get("SLURM_JOB_ID", "")), root, _OUTSIDE)
    for option in _UNSUPPORTED:
        if option in line.values:
            raise RefusedError(f"srun: the stand-in does not support --{option}")
    mpi = line.values.get("mpi", environ.get("SLURM_MPI_TYPE", "none"))
    if mpi not in _MPI:
        raise RefusedError(f"srun: error: Invalid MPI type '{mpi}', --mpi=list for acceptable types")
    job, limits = jobs.load(root, number), Limits.read(root)
    nodes = expand_hostlist(line.values["nodelist"]) if "nodelist" in line.values else job["nodes"]
    ranks = places(_counts(line, job, environ, limits))
    step = jobs.next_number(controller.steps_directory(root) / f"next.{number}", 0)
    spool = spool_directory(controller.steps_directory(root), f"{number}.{step}.")
    base = limits.environment(exported(line.values.get("export", "ALL"), environ))
    step_variables = _step_variables(line, job, nodes, step, ranks, mpi, spool)

    def report(rank: int, code: int) -> None:
        how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code) or f"Signal {-code}"
        sys.stderr.write(f"srun: error: {nodes[ranks[rank].node]}: task {rank}: {how}\n")

    failure = Failure(root, spool, limits, line.command, environ, [nodes[place.node] for place in ranks])
    kill_others = line.values.get("kill-on-bad-exit")
    return run_step(
        spool,
        Step(
            command=limits.command(line.command),
            look=failure.look,
            environments=[
                {
                    **base,
                    **step_variables,
                    **_task_variables(nodes, ranks, place, mpi),
                    **limits.of_node(nodes[place.node]),
                }
                for place in ranks
            ],
            report=report,
            stop_on_failure=kill_others is not None and kill_others != "0",
            counts_stopped=True,
            keep_pmi=mpi in ("pmi2", "cray_shasta"),
            kills_on=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
            label="label" in line.values,
            directory=line.values.get("chdir", ""),
            keeper_pid=limits.keeper_pid,
        ),
    )


def _counts(line: Line, job: jobs.Attributes, environ: Mapping[str, str], limits: Limits) -> list[int]:
    """Returns the number of tasks that are started on each node.

    Raises:
        RefusedError: the step needs more nodes or tasks than the job requested.
    """
    here = len(job["nodes"])
    requested = max(here, limits.requested_nodes)
    num_nodes = node_count(SRUN, line.values.get("nodes", str(here)))
    if num_nodes > requested:
        raise RefusedError(f"srun: error: Only allocated {requested} nodes asked for {num_nodes}")
    job_tasks = environ.get("SLURM_NTASKS", "")
    per_node = line.number("ntasks-per-node", 1)
    # If the job has a number of tasks, --ntasks-per-node alone does not change it (Slurm 22.05).
    default = int(job_tasks) if job_tasks.isdecimal() else num_nodes * per_node
    num_tasks = line.number("ntasks", default)
    per_node = max(per_node, -(-num_tasks // min(num_nodes, num_tasks)))
    if num_tasks > sum(job["counts"]) * max(1, requested // here) and "overcommit" not in line.values:
        raise RefusedError(
            f"srun: error: Unable to create step for job {job['number']}: "
            "More processors requested than permitted"
        )
    return limits.counts(num_tasks, per_node)


def _step_variables(
    line: Line,
    job: jobs.Attributes,
    nodes: Sequence[str],
    step: int,
    ranks: Sequence[Place],
    mpi: str,
    spool: Path,
) -> dict[str, str]:
    """Returns the variables that Slurm sets to the same values for all tasks of a step."""
    counts = [place.local_size for place in ranks if place.local_rank == 0]
    names, num_tasks, num_nodes = hostlist(nodes[: len(counts)]), str(len(ranks)), str(len(counts))
    variables = {
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_NNODES": num_nodes,
        "SLURM_NPROCS": num_tasks,
        "SLURM_NTASKS": num_tasks,
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_STEPID": str(step),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": num_nodes,
        "SLURM_STEP_NUM_TASKS": num_tasks,
        "SLURM_STEP_TASKS_PER_NODE": run_lengths(counts),
        "SLURM_TASKS_PER_NODE": run_lengths(counts),
    }
    from_options = {"cpus-per-task": "SLURM_CPUS_PER_TASK", "ntasks-per-node": "SLURM_NTASKS_PER_NODE"}
    variables |= {
        variable: line.values[option] for option, variable in from_options.items() if option in line.values
    }
    job_step = f"{job['number']}.{step}"
    if mpi != "none":
        variables["SLURM_MPI_TYPE"] = mpi
    if mpi == "pmi2":
        variables["PMI_JOBID"] = job_step
    elif mpi == "cray_shasta":
        variables |= {"PALS_APID": job_step, "PALS_SPOOL_DIR": str(spool)}
    return variables


def _task_variables(nodes: Sequence[str], ranks: Sequence[Place], place: Place, mpi: str) -> dict[str, str]:
    rank, local_rank, local_size = str(place.rank), str(place.local_rank), str(place.local_size)
    beside = [str(other.rank) for other in ranks if other.node == place.node]
    variables = {
        "SLURMD_NODENAME": nodes[place.node],
        "SLURM_GTIDS": ",".join(beside),
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": str(place.node),
        "SLURM_PROCID": rank,
    }
    if mpi == "cray_shasta":
        variables |= {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": local_rank, "PALS_NODEID": str(place.node)}
        variables |= {"PMI_LOCAL_RANK": local_rank, "PMI_LOCAL_SIZE": local_size}
    return variables
