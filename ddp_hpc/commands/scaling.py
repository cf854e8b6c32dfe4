"""Runs `ddp-hpc bench scaling`: a training on each number of ranks, one after the other, and a table."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.text_table import printable
from ddp_hpc.base.units import counted
from ddp_hpc.bench.results_output import check_files, save, say
from ddp_hpc.bench.scaling import output, results
from ddp_hpc.bench.scaling.points import (
    LOG,
    MODES,
    Point,
    Settings,
    check_counts,
    check_training,
    doubled,
    mode_points,
    training_words,
)
from ddp_hpc.bench.scaling.results import Measured, NotMeasuredError, read_point
from ddp_hpc.bench.scaling.run_point import empty_point, is_finished, locked, run_point
from ddp_hpc.discovery.visible_gpus import gpus_here
from ddp_hpc.launch.find_allocation import cpus_here, find_allocation
from ddp_hpc.launch.launch_here import Launch, plan
from ddp_hpc.queue.first_failure import first_failure, last_lines
from ddp_hpc.queue.log_files import read_tail
from ddp_hpc.request.job import Job
from ddp_hpc.training.telemetry.config import read_numbers

_TRAINER = ("-m", "ddp_hpc.train")
# Maximum number of ranks per CPU. With more ranks, the benchmark would mainly measure the scheduler of the
# kernel.
_RANKS_PER_CPU = 8
# Load per CPU above which a warning is printed before the first point.
_BUSY = 0.5


@dataclass(frozen=True)
class _Run:
    """The run of a point in its directory. `command` is the same in each allocation."""

    directory: Path
    launch: Launch
    command: str


def run(
    *,
    ranks: str | None,
    nodes: str | None,
    mode: str,
    folder: Path,
    batch_size: int,
    global_batch: int | None,
    dry_run: bool,
    json_file: Path | None,
    job: Mapping[str, Any],
    **settings: Any,
) -> int:
    """Runs the points that are not finished, prints the table and returns the exit code.

    `job` has the options of `ddp-hpc launch`. With `dry_run`, only prints the launch commands.

    Raises:
        RequestError: the request is invalid for `ddp-hpc launch`, for the directory, or for the training.
        DdpHpcError: the directory is not writable.
    """
    check_files(json_file)
    check_training(settings["training"])
    launches = _launches(Job.of(**job, command=(sys.executable, *_TRAINER)), ranks, nodes)
    settings["training"] += _threads(settings["training"], launches.values())
    common = Settings(**settings)
    modes = {
        name: mode_points(name, list(launches), batch_size, global_batch)
        for name in (MODES if mode == "both" else (mode,))
    }
    runs = {
        point: _run_of(point, folder, launches[point.ranks], common, job)
        for point in sorted({point for points in modes.values() for point in points})
    }
    if dry_run:
        for each in runs.values():
            sys.stdout.buffer.write(os.fsencode(each.launch.line()) + b"\n")
        return EXIT_DONE
    with locked(folder):
        measured = _measure_all(runs, common)
    if measured:
        _print_results(results.document(modes, common, measured), measured, json_file)
    return EXIT_DONE if len(measured) == len(runs) else EXIT_FAILED


def _launches(job: Job, ranks: str | None, nodes: str | None) -> dict[int, Launch]:
    """Returns the launch for each number of ranks, without the options of the training."""
    if ranks and nodes:
        raise RequestError(
            "--ranks and --nodes cannot be combined; use --ranks for numbers of ranks, or "
            "--nodes for full nodes"
        )
    numbers = _numbers("--nodes", nodes) if nodes else _numbers("--ranks", ranks) if ranks else ()
    if not ranks or find_allocation(os.environ).num_nodes > 1:
        full = plan(job, job.profile, None, os.environ)
        if nodes:
            numbers = tuple(number * full.ranks_per_node for number in numbers)
        if nodes or full.num_nodes > 1:
            # The launcher fills nodes one after the other.
            job = replace(job, ranks_per_node=full.ranks_per_node)
        numbers = numbers or doubled(full.num_ranks)
    launches = {number: plan(job, job.profile, number, os.environ) for number in numbers}
    for launch in launches.values():
        if launch.ranks_per_node > (most := cpus_here() * _RANKS_PER_CPU):
            raise RequestError(
                f"{launch.ranks_per_node} ranks per node cannot run on {cpus_here()} CPUs; use at most {most}"
            )
    say(launch.why)
    return launches


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = read_numbers(option, text)
    check_counts(option, numbers)
    return numbers


def _threads(training: Sequence[str], launches: Iterable[Launch]) -> tuple[str, ...]:
    """Returns options that give each rank on CPUs the same number of threads at all points."""
    ranks_per_node = {launch.ranks_per_node for launch in launches}
    is_given = any(word.partition("=")[0] == "--threads" for word in training)
    if is_given or len(ranks_per_node) == 1 or gpus_here(os.environ):
        return ()
    cpus = find_allocation(os.environ).cpus_per_node or cpus_here()
    return ("--threads", str(max(1, cpus // max(ranks_per_node))))


def _run_of(point: Point, folder: Path, launch: Launch, settings: Settings, job: Mapping[str, Any]) -> _Run:
    directory = folder / point.folder
    words = training_words(point, settings, directory)
    options = [f"{name}={value}" for name, value in job.items() if value]
    return _Run(
        directory=directory,
        launch=replace(launch, argv=(*launch.argv, *words)),
        command=shlex.join([*options, *_TRAINER, *words]),
    )


def _measure_all(runs: Mapping[Point, _Run], settings: Settings) -> dict[Point, Measured]:
    """Runs the points that are not finished, and returns the results of all that have results."""
    finished = [point for point, each in runs.items() if is_finished(each.directory, each.command)]
    measured: dict[Point, Measured] = {}
    for point in finished:
        measured |= _read(point, runs[point], settings)
    todo = [point for point in runs if point not in measured]
    if measured:
        say(f"{len(measured)} of {len(runs)} points are already done")
    if todo and (load := os.getloadavg()[0]) > _BUSY * cpus_here():
        busy = f"load {load:.1f} on {cpus_here()} CPUs"
        say(f"warning: this machine is busy ({busy}), which affects speed-up and efficiency")
    for number, point in enumerate(todo, start=1):
        each = runs[point]
        say(f"point {number} of {len(todo)}: {point}; {each.launch.about}")
        empty_point(each.directory, each.command)
        try:
            code = run_point(each.launch.argv, each.launch.environ(os.environ), each.directory / LOG)
        except (KeyboardInterrupt, SystemExit):
            empty_point(each.directory)
            say(f"{counted(len(measured), 'finished point')} kept; run the same command again for the others")
            raise
        measured |= _read(point, each, settings, code)
        if code == EXIT_WRONG_REQUEST and not measured:
            raise RequestError(
                "ddp_hpc.train rejected the options after --, so no other point was started; fix them"
            )
    return measured


def _read(point: Point, each: _Run, settings: Settings, code: int = 0) -> dict[Point, Measured]:
    """Returns the results of a point; empty if there are none. Prints a line about the point."""
    try:
        result = read_point(each.directory, point, settings)
    except NotMeasuredError as error:
        say(f"{point}: failed, {error}; exit code {code}; log: {each.directory / LOG}")
        return {}
    if result is None:
        why = _key_line(each.directory / LOG)
        say(f"{point}: failed, {why}; exit code {code}; log: {each.directory / LOG}")
        return {}
    say(f"{point}: {result.samples_per_s:,.1f} samples/s")
    return {point: result}


def _key_line(log: Path) -> str:
    """Returns the first line of the error of a rank, or the last line of the log."""
    text = read_tail([log])
    failure = first_failure(text)
    lines = failure.lines if failure else last_lines(text)
    if not lines:
        return "no output"
    return printable(lines[0] if failure and "Traceback" not in lines[0] else lines[-1])


def _print_results(
    document: dict[str, Any], measured: Mapping[Point, Measured], json_file: Path | None
) -> None:
    try:
        save(document, json_file)
    finally:
        click.echo(output.table(document))
        say(output.caption(document))
    for line in results.differences(measured):
        say(f"note: {line}")
    package = results.missing_package()
    if package and any(row["comm_share"] is None for row in document["rows"]):
        say(
            f"note: communication is not shown, since {package} is not installed; "
            f"run {install_command('report')}"
        )
