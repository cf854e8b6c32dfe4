"""`python -m ddp_hpc.job -- LAUNCHER PROGRAM`: runs a batch job; job scripts end with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.errors_to_exit_codes import exit_code_of
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.request.check_texts import parse_signal
from ddp_hpc.request.job import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESTARTS,
    DEFAULT_SIGNAL,
    NODE_CHECKS,
    REQUEUE_POLICIES,
    default_node_check,
)
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.profile_tables import DEFAULT_LOCAL_FOLDER
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.supervise import supervise


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--scheduler",
    type=click.Choice(tuple(SCHEDULERS)),
    required=True,
    help="Scheduler of this job.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    required=True,
    help='Path of the job script, written as "$0" in the script. A copy in the run directory is used to '
    "resume the run.",
)
@click.option(
    "--num-arguments",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help='Number of arguments of the script, written as "$#" in the script. These arguments are the last '
    "ones of COMMAND.",
)
@click.option(
    "--walltime",
    metavar="HH:MM:SS",
    help="Walltime of the job, used if the scheduler does not report one.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    default=DEFAULT_MAX_ATTEMPTS,
    show_default=True,
    help="Maximum number of attempts (jobs, requeues and restarts) per run.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    default=DEFAULT_RESTARTS,
    show_default=True,
    help="Maximum number of times that this job restarts its ranks after a failure, from the newest "
    "checkpoint.",
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    metavar="S",
    help="Number of nodes of this job on which ranks start only after another node has failed.",
)
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    metavar="M",
    help="If a node has failed and no spare node is left, restart the ranks on at least M nodes.",
)
@click.option(
    "--node-check",
    type=click.Choice(NODE_CHECKS),
    show_default="replace with --spare-nodes, otherwise off",
    help="Before each start on more than one node, check the nodes, and only warn about bad nodes or replace "
    "them with spare nodes.",
)
@click.option(
    "--local-dir",
    default=DEFAULT_LOCAL_FOLDER,
    show_default=True,
    help="Local directory on each node for the kernels that Triton and torch.compile generate.",
)
@click.option(
    "--requeue",
    type=click.Choice(REQUEUE_POLICIES),
    default=REQUEUE_POLICIES[0],
    show_default=True,
    help="When to resume a run that has recorded a checkpoint: only after exit code 75, or also after the "
    "signal set with --signal.",
)
@click.option(
    "--signal",
    "early",
    metavar="NAME@SECONDS",
    default=DEFAULT_SIGNAL,
    show_default=True,
    help="With --requeue on-signal: the signal that the ranks receive before the end of the walltime, and "
    "the number of seconds before it.",
)
@click.option(
    "--progress",
    multiple=True,
    metavar="PATTERN",
    help="File or directory of checkpoints; when it is modified, the program has made progress. May be "
    "repeated.",
)
@click.option(
    "--idle-timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Treat the run as hung if no rank has printed anything or saved a checkpoint for this long and at "
    "least one rank is waiting.",
)
@click.option(
    "--no-submit",
    is_flag=True,
    help="Do not submit successors, because compute nodes of this site cannot submit jobs.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def cli(command: tuple[str, ...], **options: Any) -> int:
    """Start COMMAND, which is a launcher and a program, and requeue the job or submit a successor if
    necessary.

    The job scripts of `ddp-hpc render` end with this command. It sets the variables whose values are known
    only in the running job, such as DDP_HPC_DEADLINE, selects the machine's mpiexec, forwards signals to the
    ranks, and requeues the job or submits a successor if the run is not complete. To request a successor, a
    program saves a checkpoint, updates the modification time of the file DDP_HPC_PROGRESS_FILE, and exits
    with code 75.

    \b
    Example, the last line of a Slurm script:
      exec python -m ddp_hpc.job --scheduler slurm --script "$0" -- srun --ntasks=8 python -m ddp_hpc.train
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    if not command:
        raise RequestError(
            "no launch command was given; use: python -m ddp_hpc.job ... -- srun python train.py"
        )
    return supervise(list(command), _settings(options, command), os.environ)


def _settings(options: dict[str, Any], command: tuple[str, ...]) -> Settings:
    run_dir, walltime = os.environ.get("DDP_HPC_RUN_DIR", ""), options["walltime"]
    is_signalled = options["requeue"] == "on-signal"
    name, lead_s = parse_signal(options["early"])
    return Settings(
        scheduler=SCHEDULERS[options["scheduler"]],
        script=options["script"],
        arguments=command[max(0, len(command) - options["num_arguments"]) :],
        run_dir=Path(run_dir) if run_dir else None,
        walltime_s=None if walltime is None else parse_walltime_s(walltime),
        max_attempts=options["max_attempts"],
        restarts=options["restarts"],
        spare_nodes=options["spare_nodes"],
        min_nodes=options["min_nodes"],
        node_check=options["node_check"] or default_node_check(options["spare_nodes"]),
        may_submit=not options["no_submit"],
        local_dir=options["local_dir"],
        progress=options["progress"],
        idle_timeout_s=options["idle_timeout"],
        signal_name=name,
        signal_lead_s=lead_s if is_signalled else None,
    )


if __name__ == "__main__":
    # Signals that arrive from now on are handled when the launcher has started.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    sys.exit(exit_code_of(cli, "python -m ddp_hpc.job", None))
