"""The command `ddp-hpc rehearse`, which runs a job script on this machine with simulated schedulers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, RequestError
from ddp_hpc.commands.completion import complete_profiles

if TYPE_CHECKING:
    from ddp_hpc.rehearse.plan_rehearsal import Options, Plan
    from ddp_hpc.rehearse.run_rehearsal import Result

_LAUNCHERS = {"pals": "PALS", "openmpi": "Open MPI", "hydra": "MPICH's Hydra"}


@click.command("rehearse")
@click.option(
    "--walltime-s",
    type=int,
    metavar="S",
    help="Walltime of each job in seconds, instead of the walltime in the script.",
)
@click.option(
    "--nodes",
    "num_nodes",
    type=int,
    metavar="N",
    help="Number of simulated nodes.  [default: the number in the script, or fewer]",
)
@click.option(
    "--ranks-per-node",
    type=int,
    metavar="R",
    help="Maximum number of ranks per node.  [default: depends on the number of cores of this machine]",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Number of training steps of ddp_hpc.train; 0 means all.  [default: 3; with --walltime-s or --fail, "
    "all]",
)
@click.option(
    "--args", "arguments", metavar="'ARGS'", help="Arguments to append to the command that each rank runs."
)
@click.option(
    "--max-jobs",
    type=int,
    default=3,
    show_default=True,
    help="Maximum number of jobs, including successors and requeues.",
)
@click.option(
    "--limit-s",
    type=int,
    default=900,
    show_default=True,
    help="Time limit of the whole rehearsal in seconds.",
)
@click.option(
    "--profile",
    shell_complete=complete_profiles,
    default="",
    metavar="NAME",
    help="Site profile; `ddp-hpc profiles list` lists the names.  [default: the profile of the script, if "
    "ddp-hpc rendered it]",
)
@click.option(
    "--here/--empty",
    default=True,
    help="Submit the script from the current directory, as the real job, or from a new, empty directory, so "
    "that the job changes no files of yours.  [default: --here]",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Use DIR, which must be new or empty, as the run directory of a script of ddp-hpc render, and keep "
    "it with its snapshots and the logs of its ranks.",
)
@click.option(
    "--fail",
    type=click.Choice(["rank", "hang", "node"]),
    help="Simulate a failure during the first launch: the last rank is killed, or hangs (SIGSTOP), or its "
    "node no longer answers. Jobs notice a hang after the --hang-timeout of ddp_hpc.train, or after "
    "--idle-timeout.",
)
@click.option(
    "--fail-after-s",
    type=int,
    metavar="S",
    help="Time from the start of the ranks to the failure in seconds.  [default: until the first snapshot or "
    "checkpoint is recorded, but at most 60]",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.pass_context
def command(ctx: click.Context, /, script: Path, arguments: str | None, **given: Any) -> None:
    """Run a job script on this machine, with simulated commands in place of its scheduler and its launcher.

    The simulated commands submit, start and end the job as its scheduler would, set the environment variables
    of its launcher, and start real ranks on the CPUs of this machine. The log of the job is printed on
    stdout, everything else on stderr. The exit code is 0 if the last job succeeded, 75 if it stopped and
    another job would resume the run, and 1 otherwise.

    \b
    Examples:
      ddp-hpc rehearse jobs/polaris_ddp.pbs
      ddp-hpc rehearse jobs/generic_slurm_ddp.sbatch --walltime-s 90 --args '--model linear --epochs 99999'
      ddp-hpc rehearse job.pbs --empty --ranks-per-node 1
      ddp-hpc rehearse job.sbatch --nodes 1 --steps 20
      ddp-hpc rehearse job.sbatch --fail rank --steps 5000 --args '--snapshot-every-steps 500'
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.rehearse import plan_rehearsal, run_rehearsal

    for option in ("walltime-s", "max-jobs", "limit-s"):
        _check_number(f"--{option}", given[option.replace("-", "_")], 1, 10**7)
    _check_number("--steps", given["steps"], 0, 10**9)
    _check_number("--fail-after-s", given["fail_after_s"], 0, 10**7)
    if given["fail_after_s"] is not None and not given["fail"]:
        raise RequestError("--fail-after-s was given without --fail; add --fail rank, hang or node")
    try:
        appended = tuple(shlex.split(arguments or ""))
    except ValueError as error:
        raise RequestError(f"--args {arguments!r} has an unclosed quote; close it") from error
    options = plan_rehearsal.Options(arguments=appended, **given)
    plan = plan_rehearsal.plan(script, options)
    for finding in plan.findings:
        _say(f"{finding.severity} {finding.check}, line {finding.line}: {finding.what}; {finding.remedy}")
    for line in _differences(plan, options):
        _say(line)
    result = run_rehearsal.rehearse(plan, options, _say)
    ctx.exit(_report(result, options))


def _check_number(option: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise RequestError(f"{option} must be a whole number from {least} to {most} (got {value})")


def _say(line: str) -> None:
    click.echo(f"rehearse: {line}", err=True)


def _differences(plan: Plan, options: Options) -> list[str]:
    """Returns the differences between the rehearsal and the real machine, one per line."""
    from ddp_hpc.base.units import counted
    from ddp_hpc.rehearse.run_rehearsal import DEFAULT_STEPS
    from ddp_hpc.rehearse.stand_in_scheduler import find_stand_in
    from ddp_hpc.schedulers.registry import SCHEDULERS

    stand_in = find_stand_in(plan.scheduler)
    lines = []
    if stand_in:
        nodes = counted(plan.num_nodes, "node")
        if plan.num_nodes < plan.requested_nodes:
            nodes = f"{plan.num_nodes} of {plan.requested_nodes} nodes"
        lines.append(
            f"{SCHEDULERS[plan.scheduler].title} is simulated with {nodes}, all on this machine, and at most "
            f"{counted(plan.ranks_per_node, 'rank')} per node; every queue, account and resource is accepted"
        )
    launcher = f"mpiexec of {_LAUNCHERS[plan.mpiexec]}"
    if stand_in and stand_in.launcher:
        launcher = f"{stand_in.launcher} and {launcher}"
    lines.append(
        f"ranks are started as with {launcher}, on the MPI of this Python environment, without GPUs, "
        "fast network and CPU binding; modules and conda environments are not loaded"
    )
    if plan.site and (suffix := plan.site.fabric.suffix):
        lines.append(
            f"names on the fast network, such as HOST{suffix}, do not exist here; ranks of a program that "
            "forms these names itself, instead of using MASTER_ADDR, cannot connect"
        )
    where = "this directory, where it can change files" if options.here else "an empty directory"
    lines.append(f"the job gets a new home directory, and is submitted from {where}")
    if plan.array_index is not None:
        lines.append(f"{plan.name} is a job array, of which only the task with index {plan.array_index} runs")
    if options.walltime_s:
        requested = f"{plan.walltime_s} s" if plan.walltime_s else "no limit"
        clock = "; the deadline in the script is changed accordingly" if plan.edited else ""
        lines.append(f"each job has a walltime of {options.walltime_s} s instead of {requested}{clock}")
    if options.stops_early and plan.runs_trainer:
        lines.append(f"ddp_hpc.train runs with --max-steps {DEFAULT_STEPS}; use --steps to change this")
    if options.arguments:
        lines.append(f"appended to the command of the ranks: {shlex.join(options.arguments)}")
    return lines


def _report(result: Result, options: Options) -> int:
    code: int | None = None
    for job in result.jobs:
        if job.was_held:
            _say(f"job {job.name} was not started, because --max-jobs {options.max_jobs} was reached")
            code = EXIT_REQUEUE if code is None else code
            continue
        _say(f"job {job.name}: {job.how}")
        for process in job.left_over:
            _say(f"job {job.name} left a process running, which was killed: {ascii(process)[1:-1][:200]}")
        code = job.exit_code
    if result.timed_out:
        _say(f"stopped after {options.limit_s:g} s (--limit-s); the remaining processes were killed")
        return EXIT_FAILED
    if options.fail and not result.has_failed:
        _say(
            f"--fail {options.fail}: nothing has failed, because no ranks ran long enough, or the run was "
            "complete before; see --fail-after-s and --steps"
        )
        return EXIT_FAILED
    return code if code in (EXIT_DONE, EXIT_REQUEUE) else EXIT_FAILED
