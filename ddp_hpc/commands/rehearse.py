"""`ddp-hpc rehearse`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_hpc.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, RequestError

if TYPE_CHECKING:
    from ddp_hpc.rehearse.request import Overrides, Plan
    from ddp_hpc.rehearse.session import Options, Result

_SCHEDULERS = {"pbs": "PBS", "slurm": "Slurm"}
_LAUNCHERS = {"pals": "PALS", "openmpi": "Open MPI", "hydra": "MPICH's Hydra"}


@click.command("rehearse")
@click.option(
    "--walltime-s", type=int, metavar="S", help="End each job after S seconds, as its scheduler does."
)
@click.option(
    "--nodes", "num_nodes", type=int, metavar="N", help="Pretend N nodes.  [the script's own, or fewer]"
)
@click.option(
    "--ranks-per-node",
    type=int,
    metavar="R",
    help="At most R ranks on each.  [as this machine's cores allow]",
)
@click.option(
    "--steps", type=int, metavar="N", help="Steps of ddp_hpc.train; 0: all.  [3; with --walltime-s: all]"
)
@click.option("--args", "arguments", metavar="'WORDS'", help="Words added to the command of the ranks.")
@click.option(
    "--max-jobs", type=int, default=3, show_default=True, help="Jobs in all, where one leads to another."
)
@click.option("--limit-s", type=int, default=900, show_default=True, help="Give up after so many seconds.")
@click.option("--profile", default="", metavar="NAME", help="The site.  [as the script says, if ours]")
@click.option(
    "--here",
    is_flag=True,
    help="Submit from this folder: the job sees its files, such as your modules and data.",
)
@click.option("--keep", is_flag=True, help="Keep the folder of the rehearsal.")
@click.argument("script", type=click.Path(path_type=Path))
@click.pass_context
def command(
    ctx: click.Context,
    script: Path,
    walltime_s: int | None,
    num_nodes: int | None,
    ranks_per_node: int | None,
    steps: int | None,
    arguments: str | None,
    max_jobs: int,
    limit_s: int,
    profile: str,
    here: bool,
    keep: bool,
) -> None:
    """Run a job script on this machine, with stand-ins for its scheduler and its launcher.

    The script is submitted, started and ended as PBS or Slurm does it; its launcher sets the true
    variables and starts real ranks on the CPUs of this machine. The job's log goes to stdout, all else
    to stderr. Ends with 0 where the last job did, with 75 where the run would go on, else with 1.

    \b
    Examples:
      ddp-hpc rehearse jobs/polaris_ddp.pbs
      ddp-hpc rehearse jobs/generic_slurm_ddp.sbatch --walltime-s 90 --args '--model linear --epochs 99999'
      ddp-hpc rehearse job.pbs --here --ranks-per-node 1
      ddp-hpc rehearse job.sbatch --nodes 1 --steps 20 --keep
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.rehearse import request, session

    for option, value in (("--walltime-s", walltime_s), ("--max-jobs", max_jobs), ("--limit-s", limit_s)):
        if value is not None and not 1 <= value <= 10**7:
            raise RequestError(f"{option} {value} was given; a whole number from 1 on is needed")
    if steps is not None and not 0 <= steps <= 10**9:
        raise RequestError(f"--steps {steps} was given; 0 or a whole number above is needed")
    try:
        words = tuple(shlex.split(arguments or ""))
    except ValueError as error:
        raise RequestError(f"--args {arguments!r} has a quote that is never closed; close it") from error
    wishes = request.Overrides(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        walltime_s=walltime_s,
        steps=steps,
        arguments=words,
        profile=profile,
    )
    options = session.Options(max_jobs=max_jobs, limit_s=limit_s, keep=keep, here=here)
    plan = request.plan(script, wishes)
    for finding in plan.findings:
        _say(f"{finding.severity} {finding.check}, line {finding.line}: {finding.what}; {finding.remedy}")
    for line in _pretended(plan, wishes, options):
        _say(line)
    result = session.rehearse(plan, wishes, options)
    ctx.exit(_report(result, options))


def _say(line: str) -> None:
    click.echo(f"rehearse: {line}", err=True)


def _pretended(plan: Plan, wishes: Overrides, options: Options) -> list[str]:
    """What is not as on the machine that the script is for."""
    from ddp_hpc.rehearse.queues import QUEUES
    from ddp_hpc.rehearse.session import DEFAULT_STEPS

    scheduler = _SCHEDULERS.get(plan.scheduler)
    fewer = f" of {plan.requested_nodes}" if plan.num_nodes < plan.requested_nodes else ""
    nodes = f"{plan.num_nodes}{fewer} node{'s' * (plan.num_nodes > 1 or bool(fewer))}"
    ranks = f"{plan.ranks_per_node} rank{'s' * (plan.ranks_per_node > 1)}"
    found = []
    if scheduler:
        found.append(
            f"{scheduler} is pretended, on {nodes}: all this machine, at most {ranks} on each; "
            "any queue, account and resource is taken"
        )
    own = QUEUES[plan.scheduler].launcher if plan.scheduler in QUEUES else ""
    launcher = own or _LAUNCHERS[plan.mpiexec]
    also = f", its mpiexec as {_LAUNCHERS[plan.mpiexec]}" if own else ""
    found.append(
        f"ranks start as under {launcher}{also}, over the MPI of this Python; no GPU, no fast network, "
        "no binding; modules and conda environments are not loaded"
    )
    where = "this folder" if options.here else "an empty folder (--here: this one)"
    found.append(f"the home folder is a new one, and the job is started from {where}")
    if wishes.walltime_s:
        asked = f"{plan.walltime_s} s" if plan.walltime_s else "without limit"
        clock = ", in the script's own clock too" if plan.edited else ""
        found.append(f"a job may run {wishes.walltime_s} s, not {asked}{clock}")
    if wishes.steps is None and wishes.walltime_s is None:
        found.append(f"ddp_hpc.train gets --max-steps {DEFAULT_STEPS} (--steps)")
    if wishes.arguments:
        found.append(f"the ranks' command gets: {shlex.join(wishes.arguments)}")
    return found


def _report(result: Result, options: Options) -> int:
    code: int | None = None
    for job in result.jobs:
        if job.was_held:
            _say(f"job {job.name} is not started (again): {options.max_jobs} jobs are over (--max-jobs)")
            code = EXIT_AGAIN if code is None else code
            continue
        _say(f"job {job.name}: {job.how}")
        for words in job.left_over:
            _say(f"job {job.name} left a process behind, which was ended: {ascii(words)[1:-1][:200]}")
        code = job.exit_code
    if result.timed_out:
        _say(f"given up after {options.limit_s:g} s (--limit-s); what still ran was killed")
        return EXIT_FAILED
    if result.folder is not None:
        _say(f"kept: {result.folder}")
    return code if code in (EXIT_DONE, EXIT_AGAIN) else EXIT_FAILED
