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
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from data_gen.recipe import parse_shape
from ddp_hpc.bench import comm_output, report
from ddp_hpc.bench.comm_baseline import key_of, read_baseline, slower_rows, told
from ddp_hpc.bench.comm_request import (
    CommBench,
    Effort,
    parse_collectives,
    parse_ranks_per_node,
    parse_sizes,
)
from ddp_hpc.bench.comm_transport import NcclLog, summary, words_of_rank
from ddp_hpc.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.tables import Row
from ddp_hpc.training.config import TrainConfig, parse_option
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
_OF_SIZES = ("bytes", "min_bytes", "max_bytes", "factor")
_OF_MODEL = ("model_options", "data", "src_shape", "tgt_shape", "bucket_mib")


def command(**options: Any) -> None:
    """`ddp-hpc bench comm`, with its options as they were typed: None, or nothing, is one that was not.

    Collective: every rank must call this. Ends the process where something fails.
    """
    config = TrainConfig(**{name: options.pop(name) for name in _OF_RANKS})
    bench = _parse(**options)
    # NCCL reads its variables once.
    log = NcclLog(os.environ)
    parts = Parts()
    with session(config, parts) as group:
        _run(bench, config, group, parts, log)


def _parse(**options: Any) -> CommBench:
    model = options.pop("buckets_of")
    sweep = {name: options.pop(name) for name in _OF_SIZES}
    of_model = {name: options.pop(name) for name in _OF_MODEL}
    named = options.pop("collectives")
    if model is None and (typed := [name for name, value in of_model.items() if value not in (None, ())]):
        raise RequestError(f"{_spelled(typed)} goes with --buckets-of: name a model, or leave it out")
    if model is not None:
        typed = [name for name, value in {**sweep, "collectives": named}.items() if value not in (None, ())]
        if typed:
            raise RequestError(
                f"--buckets-of {model} measures all_reduce of the model's sizes: leave {_spelled(typed)} out"
            )
    for name in ("tolerance", "seconds"):
        if not 0 <= options[name] < inf:
            raise RequestError(f"--{name} {options[name]}: has to be 0 or more, and finite")
    bucket_mib = of_model.pop("bucket_mib")
    if bucket_mib is not None and not 0 < bucket_mib < inf:
        raise RequestError(f"--bucket-mib {bucket_mib}: has to be above 0, and finite")
    shapes = {name: parse_shape(text) for name in ("src_shape", "tgt_shape") if (text := of_model.pop(name))}
    model_options = tuple(map(parse_option, of_model["model_options"]))
    effort = Effort(**{name: options.pop(name) for name in ("warmup", "iterations", "seconds")})
    return CommBench(
        collectives=parse_collectives(named),
        sizes=parse_sizes(sweep.pop("bytes"), **sweep),
        ranks_per_node=parse_ranks_per_node(options.pop("ranks_per_node")),
        effort=effort,
        model={}
        if model is None
        else {"model": model, "model_options": model_options, "data": of_model["data"], **shapes},
        bucket_mib=bucket_mib,
        **options,
    )


def _spelled(names: list[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-').removesuffix('s')}" if name == "model_options"
                        else f"--{name.replace('_', '-')}" for name in names)  # fmt: skip


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
    problem = _write(bench, rows, settings, transport, medians or {}) if world.rank == 0 else ""
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
    # To send, to receive, what has to come back, and that once more while it is laid out.
    needed = 4 * largest * (group.world.local_size if on_cpu else 1)
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


def _write(
    bench: CommBench,
    rows: list[Row],
    settings: dict[str, Any],
    transport: dict[str, Any],
    medians: dict[Hashable, float],
) -> str:
    """The table, the JSON and the picture; why the run is no good, empty where it is."""
    if not rows:
        return f"nothing was measured: {settings['backend']} does nothing of what was asked for"
    more: dict[str, Any] = {"machine": report.machine(), "settings": settings, "transport": transport}
    if bench.model:
        more |= {"model": bench.model["model"], "gradients": comm_output.sums(rows)}
    result = report.document("comm", rows, **more)
    axis = "microseconds, median" if bench.model else "bus bandwidth, GB/s"
    panels = comm_output.panels(rows, bool(bench.model))
    lines = [comm_output.told(found, more["model"]) for found in more.get("gradients", [])]
    problems = []
    try:
        click.echo("\n".join([comm_output.table(rows), *lines]))
    except OSError as error:
        problems.append(f"the table cannot be written to stdout ({error.strerror})")
    try:
        report.write_files(result, bench.json_file, bench.picture, panels, axis)
    except DdpHpcError as error:
        problems.append(str(error))
    wrong = [row for row in rows if not row["correct"]]
    slower = slower_rows(rows, medians, bench.tolerance)
    if wrong:
        problems.append(
            f"wrong results in {len(wrong)} of {len(rows)} rows, named above: do not trust what is trained "
            "on these nodes with this backend"
        )
    if slower:
        assert bench.baseline is not None
        problems.append(told(slower, bench.baseline, bench.tolerance))
    return "; ".join(problems)
