"""Runs `ddp-hpc bench scaling` according to its options, and prints the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.bench.results_output import check_files, save, say
from ddp_hpc.bench.scaling import output as scaling_output
from ddp_hpc.bench.scaling import results as scaling_results
from ddp_hpc.bench.scaling import scaling_directory
from ddp_hpc.bench.scaling.points import Point, check_training
from ddp_hpc.bench.scaling.scaling_directory import Plan
from ddp_hpc.commands.scaling.point_states import State, look

_GATHER_OPTIONS = ("gather", "folder", "json_file")
# Job options that `ddp-hpc launch` has too.
_COMMON_OPTIONS = ("profile", "ranks_per_node", "launcher", "mpi", "env", "fallback")
_SUBMIT_OPTIONS = (
    *("job_file", "gpus_per_node", "cpus_per_node", "walltime", "queue", "qos", "account"),
    *("name", "setup", "filesystems", "template"),
)


def run(context: click.Context, **options: Any) -> None:
    """Runs the command with the options parsed by click."""
    json_file: Path | None = options["json_file"]
    check_files(json_file)
    _check_combination(_given(context), options)
    folder: Path = options["folder"]
    if options["gather"]:
        plan = scaling_directory.read_plan(folder)
        if plan is None:
            raise RequestError(
                f"--dir {folder} contains no scaling benchmark; use the directory that was "
                "given as --dir when the benchmark was started"
            )
        context.exit(_print_results(plan, _look_at_all(folder, plan), json_file))
    check_training(options["training"])
    if options["submit"]:
        from ddp_hpc.commands.scaling.submit_points import submit_points

        submit_points(options, [*_COMMON_OPTIONS, *_SUBMIT_OPTIONS])
        return
    from ddp_hpc.commands.scaling.run_here import run_here

    request, states = run_here(options)
    if not options["dry_run"]:
        context.exit(_print_results(request.plan, states, json_file))


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
    elif options["submit"]:
        if "json_file" in given:
            raise RequestError(
                "--json cannot be used with --submit; use it with --gather after the jobs have ended"
            )
    elif others := [given[name] for name in _SUBMIT_OPTIONS if name in given]:
        raise RequestError(f"{others[0]} requires --submit")


def _look_at_all(folder: Path, plan: Plan) -> dict[Point, State]:
    in_use = scaling_directory.is_in_use(folder)
    return {point: look(folder, point, plan.settings, in_use=in_use) for point in plan.points()}


def _print_results(plan: Plan, states: Mapping[Point, State], json_file: Path | None) -> int:
    """Writes the JSON file, prints the table and the points that are not done, and returns the exit code."""
    measured = {point: state.measured for point, state in states.items() if state.measured is not None}
    if measured:
        result = scaling_results.document(plan, measured)
        try:
            save(result, json_file)
        finally:
            click.echo(scaling_output.table(result))
            say(scaling_output.caption(result))
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
