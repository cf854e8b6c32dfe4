"""What `ddp-hpc bench scaling` does with its options, and what it prints at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Any

import click
from click.core import ParameterSource

from ddp_hpc.bench import scaling_folder, scaling_report, scaling_results
from ddp_hpc.bench.communication import missing
from ddp_hpc.bench.scaling import Point, check_training
from ddp_hpc.bench.scaling_folder import Asked
from ddp_hpc.commands.scaling.states import State, look
from ddp_hpc.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, RequestError
from ddp_hpc.partial_files import write_whole
from ddp_hpc.training.metrics import write_json

_OF_GATHER = ("gather", "wait", "folder", "json_file", "picture", "markdown")
# Of a job, and `ddp-hpc launch` has them too.
_OF_BOTH = ("profile", "ranks_per_node", "launcher", "mpi", "env", "fallback")
_OF_SUBMIT = (
    *("job_file", "gpus_per_node", "cpus_per_node", "walltime", "queue", "qos", "account"),
    *("name", "setup", "filesystems", "template"),
)
_LOOK_FIRST_S, _LOOK_AT_MOST_S = 2.0, 30.0


def run(context: click.Context, **options: Any) -> None:
    """The command, with its options as click has them."""
    files = {name: options[name] for name in ("json_file", "picture", "markdown")}
    scaling_report.check_files(**files)
    _check_together(_given(context), options)
    folder: Path = options["folder"]
    if options["gather"]:
        asked = scaling_folder.read_folder(folder)
        if asked is None:
            raise RequestError(f"--dir {folder}: no scaling benchmark was started there; name its folder")
        context.exit(_tell(asked, _gather(folder, asked, waits=options["wait"]), **files))
    check_training(options["training"])
    if options["submit"]:
        from ddp_hpc.commands.scaling.jobs import submit

        submit(options, [*_OF_BOTH, *_OF_SUBMIT])
        return
    from ddp_hpc.commands.scaling.here import run_here

    request, states = run_here(options)
    if not options["dry_run"]:
        context.exit(_tell(request.asked, states, **files))


def _given(context: click.Context) -> dict[str, str]:
    """The options that were typed, as they are spelled, by the names of their parameters."""
    return {
        param.name: param.opts[0] if param.opts[0].startswith("-") else "what follows --"
        for param in context.command.params
        if param.name
        and context.params[param.name]
        and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def _check_together(given: Mapping[str, str], options: Mapping[str, Any]) -> None:
    if options["gather"]:
        if others := [option for name, option in given.items() if name not in _OF_GATHER]:
            raise RequestError(f"--gather takes what is in --dir: leave {others[0]} out")
    elif options["wait"]:
        raise RequestError("--wait goes with --gather")
    elif options["submit"]:
        if outputs := [given[name] for name in ("json_file", "picture", "markdown") if name in given]:
            raise RequestError(f"{outputs[0]} goes with --gather, when the jobs are done")
    elif others := [given[name] for name in _OF_SUBMIT if name in given]:
        raise RequestError(f"{others[0]} goes with --submit")


def _gather(folder: Path, asked: Asked, *, waits: bool) -> dict[Point, State]:
    """How each point is; with `waits` once none is live any more, and each is told of when it ends."""
    states: dict[Point, State] = {}
    pause_s = _LOOK_FIRST_S
    while True:
        in_use = scaling_folder.is_in_use(folder)
        for point in asked.points():
            before = states.get(point)
            if before is None or before.is_live:
                states[point] = look(folder, point, asked.settings, in_use=in_use)
                if before is not None and not states[point].is_live:
                    _say(states[point].line(point))
        num_live = sum(state.is_live for state in states.values())
        if not waits or not num_live:
            return states
        if pause_s == _LOOK_FIRST_S:
            _say(f"waiting for {num_live} of {len(states)} points")
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LOOK_AT_MOST_S)


def _tell(
    asked: Asked,
    states: Mapping[Point, State],
    json_file: Path | None,
    picture: Path | None,
    markdown: Path | None,
) -> int:
    """Writes the files, prints the table, names what is not done; the exit code."""
    found = {point: state.measured for point, state in states.items() if state.measured is not None}
    if found:
        result = scaling_results.document(asked, found)
        try:
            if json_file is not None:
                write_json(json_file, result)
            if markdown is not None:
                write_whole(markdown, scaling_report.markdown(result).encode(), "bench")
            if picture is not None:
                scaling_report.draw(picture, result)
        finally:
            click.echo(scaling_report.table(result))
            _say(scaling_report.caption(result))
        for line in scaling_results.differences(found):
            _say(f"note: {line}")
        if (package := missing()) and any(row["comm_share"] is None for row in result["rows"]):
            _say(f"note: communication needs {package}, not installed here; pip install 'ddp-hpc[report]'")
    rest = {point: state for point, state in states.items() if state.measured is None}
    for point, state in rest.items():
        _say(state.line(point))
    if any(not state.is_live for state in rest.values()):
        return EXIT_FAILED
    return EXIT_AGAIN if rest else EXIT_DONE


def _say(line: str) -> None:
    click.echo(line, err=True)
