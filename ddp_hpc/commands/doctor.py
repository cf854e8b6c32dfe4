"""The command `ddp-hpc doctor`, which checks the environment of a job."""

from __future__ import annotations

import os

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; may be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Skip this check; may be repeated.")
@click.option("--list", "as_list", is_flag=True, help="List the checks and exit.")
def command(as_json: bool, only: tuple[str, ...], skip: tuple[str, ...], as_list: bool) -> None:
    """Check the environment before submitting a job.

    Prints one line per check: the result (ok, warn or fail), the name of the check, the finding, and how to
    fix it. Each check runs in a separate process with a time limit. The exit code is 1 if a check failed.

    In a job, start the command with the launcher, one rank per node. Each node prints its problems, after its
    name.

    \b
    Examples:
      ddp-hpc doctor
      ddp-hpc doctor --json --skip mpi
      ddp-hpc doctor --only torch --only gpus
      srun --ntasks-per-node=1 ddp-hpc doctor
      mpiexec --ppn 1 ddp-hpc doctor
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    from ddp_hpc.doctor.run_and_print import run
    from ddp_hpc.doctor.run_checks import CHECKS, chosen

    checks = chosen(only, skip)
    if as_list:
        for check in CHECKS:
            click.echo(f"{check.name:14}  {check.about}")
        return
    code = run(checks, dict(os.environ), as_json=as_json)
    if code:
        raise click.exceptions.Exit(code)
