"""Runs points one after the other in this allocation or on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.base.units import counted
from ddp_hpc.bench.results_output import say
from ddp_hpc.bench.scaling import scaling_directory
from ddp_hpc.bench.scaling.points import LOG, Point, Size, doubled
from ddp_hpc.bench.scaling.run_point import run_point
from ddp_hpc.commands.scaling.choose_points import TRAINER, Request, counts, make_request
from ddp_hpc.commands.scaling.point_states import State, look
from ddp_hpc.discovery.visible_gpus import gpus_here
from ddp_hpc.launch.find_allocation import cpus_here, find_allocation
from ddp_hpc.launch.launch_here import Launch, plan
from ddp_hpc.request.job import Job

# Maximum number of ranks per CPU. With more ranks, the benchmark would mainly measure the scheduler of the
# kernel.
_RANKS_PER_CPU = 8
# Load per CPU above which a warning is printed before the first point.
_BUSY = 0.5


def run_here(options: Mapping[str, Any]) -> tuple[Request, dict[Point, State]]:
    """Runs the points that are not done, and returns the states of all points in the directory.

    With --dry-run, only prints the launch commands.

    Raises:
        RequestError: the request is invalid for `ddp-hpc launch`, for the directory, or for the training.
        DdpHpcError: the directory is not writable.
    """
    launches = _launches(options)
    sizes = list(launches)
    request = make_request(options, sizes, _threads(options["training"], sizes))
    # All points are planned first, so that errors are found before any point is run.
    planned = {
        point: replace(launches[point.size], argv=(*launches[point.size].argv, *request.arguments(point)))
        for point in request.points
    }
    if options["dry_run"]:
        for launch in planned.values():
            sys.stdout.buffer.write(os.fsencode(launch.line()) + b"\n")
        return request, {}
    with scaling_directory.locked(request.folder):
        scaling_directory.write_plan(request.folder, request.plan)
        return request, _run_all(request, planned)


def _run_all(request: Request, planned: Mapping[Point, Launch]) -> dict[Point, State]:
    folder = request.folder
    states = {point: look(folder, point, request.settings) for point in request.plan.points()}
    todo = [point for point in planned if not states[point].measured and not states[point].is_live]
    if len(todo) < len(planned):
        say(f"{len(planned) - len(todo)} of {len(planned)} points are already done or submitted")
    if todo and (load := os.getloadavg()[0]) > _BUSY * cpus_here():
        busy = f"load {load:.1f} on {cpus_here()} CPUs"
        say(f"warning: this machine is busy ({busy}), which affects speed-up and efficiency")
    for number, point in enumerate(todo, start=1):
        say(f"point {number} of {len(todo)}: {point}; {planned[point].about}")
        own = folder / point.folder
        scaling_directory.empty_point(own)
        try:
            code = run_point(planned[point].argv, planned[point].environ(os.environ), own / LOG)
        except (KeyboardInterrupt, SystemExit):
            scaling_directory.empty_point(own)
            kept = sum(state.measured is not None for state in states.values())
            say(f"{counted(kept, 'finished point')} kept; run the same command again for the others")
            raise
        states[point] = state = look(folder, point, request.settings)
        say(state.line(point) + (f"; exit code {code}" if code else ""))
        if code == EXIT_WRONG_REQUEST and not any(other.measured for other in states.values()):
            raise RequestError(
                "ddp_hpc.train rejected the options after --, so no other point was started; fix them"
            )
    return states


def _launches(options: Mapping[str, Any]) -> dict[Size, Launch]:
    """Returns the launch for each number of ranks, without the options of the training."""
    names = ("profile", "ranks_per_node", "launcher", "mpi", "env", "fallback")
    job = Job.of(**{name: options[name] for name in names}, command=(sys.executable, *TRAINER))
    option, numbers = counts(options)
    if option != "--ranks" or find_allocation(os.environ).num_nodes > 1:
        full = plan(job, job.profile, None, os.environ)
        if option == "--nodes":
            numbers = tuple(number * full.ranks_per_node for number in numbers)
        if option == "--nodes" or full.num_nodes > 1:
            # The launcher fills nodes one after the other.
            job = replace(job, ranks_per_node=full.ranks_per_node)
        numbers = numbers or doubled(full.num_ranks)
    launches = {}
    for ranks in numbers:
        launch = plan(job, job.profile, ranks, os.environ)
        if launch.ranks_per_node > (most := cpus_here() * _RANKS_PER_CPU):
            raise RequestError(
                f"{launch.ranks_per_node} ranks per node cannot run on {cpus_here()} CPUs; use at most {most}"
            )
        launches[Size(ranks, launch.num_nodes, launch.ranks_per_node)] = launch
        why = launch.why
    say(why)
    return launches


def _threads(training: Sequence[str], sizes: Sequence[Size]) -> list[str]:
    """Returns options that give each rank on CPUs the same number of threads at all points."""
    ranks_per_node = {size.ranks_per_node for size in sizes}
    is_given = any(word.partition("=")[0] == "--threads" for word in training)
    if is_given or len(ranks_per_node) == 1 or gpus_here(os.environ):
        return []
    cpus = find_allocation(os.environ).cpus_per_node or cpus_here()
    return ["--threads", str(max(1, cpus // max(ranks_per_node)))]
