"""The command `ddp-hpc doctor`, which checks the environment of a job."""

from __future__ import annotations

import os

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; may be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Skip this check; may be repeated.")
@click.option("--list", "as_list", is_flag=True, help="List the checks and exit.")
@click.option(
    "--shared",
    metavar="DIR",
    help="Shared directory through which the nodes of a job exchange their results.  [default: "
    "DDP_HPC_RUN_DIR or the working directory]",
)
@click.option(
    "--wait-s",
    type=click.IntRange(1, 3600),
    default=120,
    metavar="SECONDS",
    show_default=True,
    help="Time limit in seconds for the nodes of a job to wait for each other.",
)
def command(
    as_json: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    as_list: bool,
    shared: str | None,
    wait_s: int,
) -> None:
    """Check the environment before submitting a job.

    Prints one line per check: the result (ok, warn or fail), the name of the check, the finding, and how to
    fix it. Each check runs in a separate process with a time limit. The exit code is 1 if a check failed.

    In a job, start the command with the launcher, one rank per node. The first node prints the problems that
    most nodes have in common, and lists the nodes that differ from the majority.

    \b
    Examples:
      ddp-hpc doctor
      ddp-hpc doctor --json --skip mpi-launcher
      ddp-hpc doctor --only torch --only gpus
      srun --ntasks-per-node=1 ddp-hpc doctor
      mpiexec --ppn 1 ddp-hpc doctor --shared /path/on/a/parallel/file/system
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    from ddp_hpc.doctor.run_and_print import Options, run
    from ddp_hpc.doctor.run_checks import CHECKS, chosen

    checks = chosen(only, skip)
    if as_list:
        for check in CHECKS:
            click.echo(f"{check.name:14}  {check.about}")
        return
    code = run(Options(checks, as_json, shared, wait_s), dict(os.environ))
    if code:
        raise click.exceptions.Exit(code)
