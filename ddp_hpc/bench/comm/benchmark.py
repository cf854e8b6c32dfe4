"""Runs `ddp-hpc bench comm`, which times and checks collectives on the ranks of a launcher.

Ranks are discovered, connected and monitored as in training: if a rank fails, dies or hangs, all ranks end
with a one-line error that names that rank. Only rank 0 writes the results.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from ddp_hpc.base.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output
from ddp_hpc.bench.comm import output as comm_output
from ddp_hpc.bench.comm.parse_options import CommBench, Effort, parse
from ddp_hpc.bench.comm.transport import NcclLog, summary, transport_of_rank
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.session import introduce, session, watching_of

if TYPE_CHECKING:
    from ddp_hpc.bench.comm.collectives import Members
    from ddp_hpc.bench.comm.measure_cases import Case
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.process_group.group import Group

# Options of `ddp-hpc bench comm` that are also options of TrainConfig.
_RANK_OPTIONS = ("backend", "device", "discovery", "init_timeout", "timeout", "hang_timeout")


def command(**options: Any) -> None:
    """Runs `ddp-hpc bench comm` with its options, which are None or empty if they were not given.

    Collective: every rank must call this. Ends the process on failure.
    """
    config = TrainConfig.of(**{name: options.pop(name) for name in _RANK_OPTIONS})
    bench = parse(**options)
    # Set NCCL's environment variables before NCCL is initialized, because it reads them only once.
    log = NcclLog(os.environ)
    parts = Parts()
    # Nothing slow happens before the first row, so the first row can have the same time limit as all others.
    watching = replace(watching_of(config), first_s=config.health.hang_timeout_s)
    with session(config.process_group, parts, watching) as (group, heartbeat):
        _run(bench, group, heartbeat, log)


def _run(bench: CommBench, group: Group, heartbeat: Heartbeat, log: NcclLog) -> None:
    """Runs the benchmark after the ranks have been connected. Collective: every rank must call this.

    Raises:
        RequestError: raised on all ranks if the request cannot be fulfilled here.
        DdpHpcError: raised on all ranks if a result was wrong, or nothing could be measured.
    """
    from ddp_hpc.bench.comm.collectives import Members
    from ddp_hpc.bench.comm.measure_cases import cases_of
    from ddp_hpc.training.telemetry.progress_bar import Progress

    world = group.world
    if world.world_size == 1:
        raise RequestError(
            "bench comm needs at least 2 ranks, but 1 was started. Use a launcher: "
            "mpiexec -n 4 ddp-hpc bench comm, srun ddp-hpc bench comm, or "
            "ddp-hpc launch -n 4 -- ddp-hpc bench comm"
        )
    progress = Progress(world.rank == 0, sys.stderr)
    introduce(group, heartbeat, progress)
    sizes = Counter(_nodes_of(group)).values()
    settings = _settings(bench, group, len(sizes))
    _check_json_file(bench, group)
    plan = cases_of(bench, world.world_size)
    group.agree(_memory_problem(plan, group))
    per_node = next(iter(sizes)) if len(set(sizes)) == 1 else None
    members = Members(world.world_size, per_node, world.rank, group.device)

    rows: list[Row] = []
    steps = count(1)
    for cases in plan:
        rows += _measure_all(cases, members, bench.effort, group, heartbeat, steps, progress.say)
    transports = group.comm.allgather(transport_of_rank(group.backend, log, os.environ))
    transport = summary(group.backend, transports, log.user_settings)
    progress.say(f"transport: {transport['line']}")
    problem = comm_output.write(bench, rows, settings, transport) if world.rank == 0 else ""
    if problem := group.comm.bcast(problem):
        stop_together(world.rank, DdpHpcError(problem))
    heartbeat.close()


def _nodes_of(group: Group) -> list[Hashable]:
    """Returns an identifier of the node of each rank. Collective: every rank must call this.

    This is the node rank of the launcher, since hostnames may not be unique, or else the hostname.
    """
    nodes = group.comm.allgather([group.world.node_rank, group.world.hostname])
    known = all(node_rank is not None for node_rank, _ in nodes)
    return [node_rank if known else hostname for node_rank, hostname in nodes]


def _check_json_file(bench: CommBench, group: Group) -> None:
    """Raises RequestError on all ranks if rank 0 cannot write the results. Collective: every rank must call
    this.
    """
    problem = ""
    if group.world.rank == 0:
        try:
            results_output.check_files(bench.json_file)
        except RequestError as error:
            problem = str(error)
    if problem := group.comm.bcast(problem):
        stop_together(group.world.rank, RequestError(problem))


def _settings(bench: CommBench, group: Group, num_nodes: int) -> dict[str, Any]:
    import torch

    device = group.device.type
    if device != "cpu":
        device = f"{device} ({torch.get_device_module(device).get_device_name(group.device)})"
    return {
        "ranks": group.world.world_size,
        "nodes": num_nodes,
        "backend": group.backend,
        "device": device,
        "launcher": group.world.launcher,
        "threads": group.threads,
        **vars(bench.effort),
    }


def _memory_problem(plan: Sequence[Sequence[Case]], group: Group) -> str:
    """Returns why the largest buffers do not fit into the memory of this rank, or an empty string."""
    import torch

    largest = max(case.num_bytes for cases in plan for case in cases)
    on_cpu = group.device.type == "cpu"
    # Five arrays are needed: the sent, received and expected data, a copy that is made to create the expected
    # data, and a mask of errors.
    needed = 5 * largest * (group.world.local_size if on_cpu else 1)
    free = (
        results_output.available_bytes()
        if on_cpu
        else torch.get_device_module(group.device).mem_get_info(group.device)[0]
    )
    if needed <= free:
        return ""
    return (
        f"buffers of {format_bytes(largest)} need {format_bytes(needed)} of memory per "
        f"{'node' if on_cpu else 'device'}, but only {format_bytes(free)} are free; "
        "use a smaller --max-bytes"
    )


def _measure_all(
    cases: Sequence[Case],
    members: Members,
    effort: Effort,
    group: Group,
    heartbeat: Heartbeat,
    steps: Iterator[int],
    say: Callable[[str], None],
) -> list[Row]:
    """Returns the rows of one collective. Collective: every rank must call this."""
    from ddp_hpc.bench.comm.measure_cases import RefusedError, measure

    least, most = (format_bytes(extreme(case.num_bytes for case in cases)) for extreme in (min, max))
    say(f"{cases[0].name}: {f'{len(cases)} sizes, {least} to {most}' if len(cases) > 1 else least}")
    rows = []
    for case, step in zip(cases, steps, strict=False):
        tick = partial(heartbeat.at, step, str(case))
        try:
            rows.append(measure(case, members, group, effort, tick, say))
        except RefusedError as refusal:
            say(f"{case}: skipped with all larger sizes, because {group.backend} failed: {refusal}")
            break
    return rows
