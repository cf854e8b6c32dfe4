"""Runs `ddp-hpc bench scaling` according to its options, and prints the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Any

import click
from click.core import ParameterSource

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.bench.results_output import save, say
from ddp_hpc.bench.scaling import output as scaling_report
from ddp_hpc.bench.scaling import results as scaling_results
from ddp_hpc.bench.scaling import scaling_directory
from ddp_hpc.bench.scaling.points import Point, check_training
from ddp_hpc.bench.scaling.scaling_directory import Plan
from ddp_hpc.commands.scaling.point_states import State, look

_GATHER_OPTIONS = ("gather", "wait", "folder", "json_file", "markdown")
# Job options that `ddp-hpc launch` has too.
_COMMON_OPTIONS = ("profile", "ranks_per_node", "launcher", "mpi", "env", "fallback")
_SUBMIT_OPTIONS = (
    *("job_file", "gpus_per_node", "cpus_per_node", "walltime", "queue", "qos", "account"),
    *("name", "setup", "filesystems", "template"),
)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 2.0, 30.0


def run(context: click.Context, **options: Any) -> None:
    """Runs the command with the options parsed by click."""
    files = {name: options[name] for name in ("json_file", "markdown")}
    scaling_report.check_files(**files)
    _check_combination(_given(context), options)
    folder: Path = options["folder"]
    if options["gather"]:
        plan = scaling_directory.read_plan(folder)
        if plan is None:
            raise RequestError(
                f"--dir {folder} contains no scaling benchmark; use the directory that was "
                "given as --dir when the benchmark was started"
            )
        context.exit(_print_results(plan, _gather(folder, plan, waits=options["wait"]), **files))
    check_training(options["training"])
    if options["submit"]:
        from ddp_hpc.commands.scaling.submit_points import submit_points

        submit_points(options, [*_COMMON_OPTIONS, *_SUBMIT_OPTIONS])
        return
    from ddp_hpc.commands.scaling.run_here import run_here

    request, states = run_here(options)
    if not options["dry_run"]:
        context.exit(_print_results(request.plan, states, **files))


def _given(context: click.Context) -> dict[str, str]:
    """Returns the options on the command line as they are spelled, by the names of their parameters."""
    return {
        param.name: param.opts[0] if param.opts[0].startswith("-") else "the options after --"
        for param in context.command.params
        if param.name
        and context.params[param.name]
        and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def _check_combination(given: Mapping[str, str], options: Mapping[str, Any]) -> None:
    if options["gather"]:
        if others := [option for name, option in given.items() if name not in _GATHER_OPTIONS]:
            raise RequestError(f"--gather only reads results from --dir; omit {others[0]}")
    elif options["wait"]:
        raise RequestError("--wait requires --gather")
    elif options["submit"]:
        if outputs := [given[name] for name in ("json_file", "markdown") if name in given]:
            raise RequestError(
                f"{outputs[0]} cannot be used with --submit; use it with --gather after the jobs have ended"
            )
    elif others := [given[name] for name in _SUBMIT_OPTIONS if name in given]:
        raise RequestError(f"{others[0]} requires --submit")


def _gather(folder: Path, plan: Plan, *, waits: bool) -> dict[Point, State]:
    """Returns the states of all points; with `waits`, waits for live points and prints each one that ends."""
    states: dict[Point, State] = {}
    pause_s = _FIRST_PAUSE_S
    while True:
        in_use = scaling_directory.is_in_use(folder)
        for point in plan.points():
            before = states.get(point)
            if before is None or before.is_live:
                states[point] = look(folder, point, plan.settings, in_use=in_use)
                if before is not None and not states[point].is_live:
                    say(states[point].line(point))
        num_live = sum(state.is_live for state in states.values())
        if not waits or not num_live:
            return states
        if pause_s == _FIRST_PAUSE_S:
            say(f"waiting for {num_live} of {len(states)} points")
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)


def _print_results(
    plan: Plan, states: Mapping[Point, State], json_file: Path | None, markdown: Path | None
) -> int:
    """Writes the files, prints the table and the points that are not done, and returns the exit code."""
    measured = {point: state.measured for point, state in states.items() if state.measured is not None}
    if measured:
        result = scaling_results.document(plan, measured)
        try:
            save(result, json_file)
            if markdown is not None:
                write_atomically(markdown, scaling_report.markdown(result).encode(), "bench")
        finally:
            click.echo(scaling_report.table(result))
            say(scaling_report.caption(result))
        for line in scaling_results.differences(measured):
            say(f"note: {line}")
        if (package := scaling_results.missing_package()) and any(
            row["comm_share"] is None for row in result["rows"]
        ):
            say(
                f"note: communication is not shown, since {package} is not installed; "
                f"run {install_command('report')}"
            )
    rest = {point: state for point, state in states.items() if state.measured is None}
    for point, state in rest.items():
        say(state.line(point))
    if any(not state.is_live for state in rest.values()):
        return EXIT_FAILED
    return EXIT_REQUEUE if rest else EXIT_DONE
