"""`ddp-hpc doctor`."""

from __future__ import annotations

import os

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
@click.option("--only", multiple=True, metavar="NAME", help="Run this check alone; may be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this check out; may be repeated.")
@click.option("--list", "as_list", is_flag=True, help="Name the checks and run none.")
@click.option(
    "--shared",
    metavar="DIR",
    help="In a job of several nodes: a folder that all of them see, in which they meet. Without it "
    "DDP_HPC_RUN_DIR or the working folder.",
)
@click.option(
    "--wait-s",
    type=click.IntRange(1, 3600),
    default=120,
    metavar="SECONDS",
    show_default=True,
    help="How long nodes wait for each other.",
)
def command(
    as_json: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    as_list: bool,
    shared: str | None,
    wait_s: int,
) -> None:
    """Check this environment before the queue does.

    One line a check: ok, warn or fail, its name, what was seen, and how to mend it. Each check has a time
    limit and runs in a process of its own. Exit code 1 where one failed.

    In a job, start it as the ranks are started: one rank a node works, the first node prints what all nodes
    lack and which nodes differ from the most of them.

    \b
    Examples:
      ddp-hpc doctor
      ddp-hpc doctor --json --skip allreduce
      ddp-hpc doctor --only torch --only gpus
      srun --ntasks-per-node=1 ddp-hpc doctor
      mpiexec --ppn 1 ddp-hpc doctor --shared /path/on/a/parallel/file/system
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.doctor.report import Options, run
    from ddp_hpc.doctor.run import CHECKS, chosen

    checks = chosen(only, skip)
    if as_list:
        for check in CHECKS:
            click.echo(f"{check.name:14}  {check.about}")
        return
    code = run(Options(checks, as_json, shared, wait_s), dict(os.environ))
    if code:
        raise click.exceptions.Exit(code)
