"""`ddp-hpc bench comm`: collectives on the ranks that the launcher started, timed and checked.

The ranks are found, connected and watched as in a training: a rank that fails, dies or hangs ends all of
them with one line that names it. Rank 0 alone writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ddp_hpc.bench import comm_output, report
from ddp_hpc.bench.comm_baseline import key_of, read_baseline
from ddp_hpc.bench.comm_request import CommBench, Effort, parse
from ddp_hpc.bench.comm_transport import NcclLog, summary, words_of_rank
from ddp_hpc.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.tables import Row
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.ending import Parts
from ddp_hpc.training.session import introduce, session, stacks_of_run, start_watching
from ddp_hpc.units import format_bytes

if TYPE_CHECKING:
    from ddp_hpc.bench.comm_buckets import Bucket
    from ddp_hpc.bench.comm_collectives import Members
    from ddp_hpc.bench.comm_ranks import Division
    from ddp_hpc.bench.comm_rows import Case
    from ddp_hpc.training.group import Group
    from ddp_hpc.training.heartbeat import Heartbeat

    Plan: TypeAlias = dict[Division, list[list[Case]]]

T = TypeVar("T")

_OF_RANKS = ("backend", "device", "discovery", "init_timeout_s", "timeout_s", "hang_timeout_s")


def command(**options: Any) -> None:
    """`ddp-hpc bench comm`, with its options as they were typed: None, or nothing, is one that was not.

    Collective: every rank must call this. Ends the process where something fails.
    """
    config = TrainConfig(**{name: options.pop(name) for name in _OF_RANKS})
    bench = parse(**options)
    # NCCL reads its variables once.
    log = NcclLog(os.environ)
    parts = Parts()
    with session(config, parts) as group:
        _run(bench, config, group, parts, log)


def _run(bench: CommBench, config: TrainConfig, group: Group, parts: Parts, log: NcclLog) -> None:
    """Everything after the ranks are connected. Collective: every rank must call this.

    Raises:
        RequestError: on all ranks alike, where it cannot be done here.
        DdpHpcError: likewise, where a result was wrong, a row slower than the baseline allows, or no
            row could be measured.
    """
    from ddp_hpc.bench.comm_ranks import divide, gather_members, nodes_of
    from ddp_hpc.bench.comm_rows import cases_of
    from ddp_hpc.training.progress import Progress

    world = group.world
    if world.world_size == 1:
        raise RequestError(
            "bench comm was started as 1 rank and needs 2 or more; put a launcher in front: "
            "mpiexec -n 4 ddp-hpc bench comm, srun ddp-hpc bench comm, or "
            "ddp-hpc launch -n 4 -- ddp-hpc bench comm"
        )
    progress = Progress(world.rank == 0, sys.stderr)
    introduce(group, progress)
    nodes = nodes_of(group)
    settings = _settings(bench, group, len(set(nodes)))
    medians = _on_rank_0(group, lambda: _check_files(bench, settings))
    buckets = _make_buckets(bench, group)
    try:
        divisions, notes = divide(nodes, bench.ranks_per_node)
    except RequestError as error:
        stop_together(world.rank, error)
    for note in notes:
        progress.say(f"note: {note}")
    plan = {division: cases_of(bench, buckets, len(division.ranks)) for division in divisions}
    _on_rank_0(group, lambda: _check_baseline(plan, bench, medians))
    group.agree(_lacks_memory(plan, group), RequestError.exit_code)

    # Nothing slow is left to do before the first row, which therefore has no more time than the others.
    heart = start_watching(replace(config, timeout_s=config.hang_timeout_s), group, parts, stacks_of_run())
    if heart.note:
        progress.say(f"note: {heart.note}")
    rows: list[Row] = []
    steps = count(1)
    for division, collectives in plan.items():
        members = gather_members(division, group, config.timeout_s)
        for cases in collectives:
            rows += _measure_all(cases, division, members, bench.effort, group, heart, steps, progress.say)
    words = group.comm.allgather(words_of_rank(group.backend, log, os.environ))
    transport = summary(group.backend, words, log.theirs)
    progress.say(f"transport: {transport['line']}")
    problem = comm_output.write(bench, rows, settings, transport, medians or {}) if world.rank == 0 else ""
    if problem := group.comm.bcast(problem):
        stop_together(world.rank, DdpHpcError(problem))
    heart.close()


def _on_rank_0(group: Group, work: Callable[[], T]) -> T | None:
    """What `work` gives on rank 0, None elsewhere. Collective: every rank must call this.

    Raises:
        RequestError: on all ranks, where `work` raises it.
    """
    found, problem = None, ""
    if group.world.rank == 0:
        try:
            found = work()
        except RequestError as error:
            problem = str(error)
    if problem := group.comm.bcast(problem):
        stop_together(group.world.rank, RequestError(problem))
    return found


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


def _check_files(bench: CommBench, settings: dict[str, Any]) -> dict[Hashable, float]:
    """The baseline's medians, if there is one.

    Raises:
        RequestError: it cannot be compared with, or an output could not be written.
    """
    report.check_files(bench.json_file, bench.picture)
    if bench.baseline is None:
        return {}
    medians = read_baseline(bench.baseline, settings)
    if bench.json_file is not None and bench.json_file.exists() and bench.json_file.samefile(bench.baseline):
        raise RequestError(
            f"--json {bench.json_file}: is the --baseline and would be overwritten; name another file"
        )
    return medians


def _make_buckets(bench: CommBench, group: Group) -> list[Bucket]:
    """The buckets of the model, which rank 0 makes. Collective: every rank must call this."""
    from ddp_hpc.bench.comm_buckets import Bucket, buckets_of, make_model

    if not bench.model:
        return []
    made = _on_rank_0(group, lambda: buckets_of(make_model(**bench.model), bench.bucket_mib))
    numbers, dtypes = group.comm.bcast(
        ([bucket.num_elements for bucket in made or []], [bucket.dtype for bucket in made or []])
    )
    return [Bucket(num, dtype) for num, dtype in zip(numbers, dtypes, strict=True)]


def _check_baseline(plan: Plan, bench: CommBench, medians: dict[Hashable, float] | None) -> None:
    """Raises RequestError where the baseline has none of the rows that are to be measured."""
    keys = {
        key_of(case.identity(division))
        for division, collectives in plan.items()
        for cases in collectives
        for case in cases
    }
    if bench.baseline is not None and not keys & set(medians or {}):
        raise RequestError(
            f"--baseline {bench.baseline}: has none of the rows asked for ({len(keys)}); ask for the same "
            "collectives, sizes, type and ranks a node, or make a new one"
        )


def _lacks_memory(plan: Plan, group: Group) -> str:
    """Why the largest buffers do not fit where this rank is; empty where they do."""
    import torch

    largest = max(case.num_bytes for collectives in plan.values() for cases in collectives for case in cases)
    on_cpu = group.device.type == "cpu"
    # To send, to receive, what has to come back, that once more while it is laid out, and where they differ.
    needed = 5 * largest * (group.world.local_size if on_cpu else 1)
    free = (
        report.available_bytes()
        if on_cpu
        else torch.get_device_module(group.device).mem_get_info(group.device)[0]
    )
    if needed <= free:
        return ""
    return (
        f"{format_bytes(largest)} at once need {format_bytes(needed)} of memory "
        f"{'on a node' if on_cpu else 'on a device'}, and {format_bytes(free)} are free; ask for a smaller "
        "--max-bytes"
    )


def _measure_all(
    cases: list[Case],
    division: Division,
    members: Members | None,
    effort: Effort,
    group: Group,
    heart: Heartbeat,
    steps: Iterator[int],
    say: Callable[[str], None],
) -> list[Row]:
    """The rows of one collective, on the members. Collective: every rank must call this."""
    from ddp_hpc.bench.comm_rows import RefusedError, measure
    from ddp_hpc.training.heartbeat import RESTING

    least, most = (format_bytes(extreme(case.num_bytes for case in cases)) for extreme in (min, max))
    sizes = f"{len(cases)} sizes, {least} to {most}" if len(cases) > 1 else least
    say(f"{cases[0].kind} on {division}: {sizes}")
    rows = []
    for case, step in zip(cases, steps, strict=False):
        where = (step, f"{case} on {division}") if members is not None else (step + 1, RESTING)
        try:
            row = measure(case, division, members, group, effort, partial(heart.at, *where), say)
        except RefusedError as refusal:
            say(f"{where[1]}: left out, and what is larger: {group.backend} says: {refusal}")
            break
        rows += [row] if row is not None else []
    return rows
