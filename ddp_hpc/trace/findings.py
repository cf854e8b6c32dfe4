"""Writes the main findings of a report, one or two sentences each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from ddp_hpc.base.units import duration, format_bytes
from ddp_hpc.trace.analysis_results import (
    IDLE_CAUSES,
    PART_NAMES,
    PARTS,
    Capture,
    CollectiveRow,
    RankTrace,
    SlowConnection,
    Times,
)
from ddp_hpc.trace.event_names import UPDATE, bus_bandwidth
from ddp_hpc.trace.gains import avoidable, gains
from ddp_hpc.trace.slow_steps import SlowSteps, mean_lengths, slow_steps_of
from ddp_hpc.trace.trace_files import first_of
from ddp_hpc.trace.wait_findings import (
    ahead_of_device,
    before_steps,
    cut_starts,
    idle_device,
    waits_of_host,
)

_MUCH = 0.05
"""Fraction of a step that waiting for data must take to be reported."""
_DIFFERENT = 1.05
"""Ratio of the longest step to the shortest above which both are reported."""
_MUCH_IDLE = 0.1
"""Fraction of a step that the device must be idle for its causes to be reported."""
_MUCH_COMMUNICATION = 0.2
"""Fraction of a step that exposed communication must take for its cause to be reported."""
_TRANSFER = 0.9
"""Fraction of a collective that its transfer must take, so that waiting is not mentioned."""
_LITTLE = 0.01
"""Fraction of a step below which a part is not mentioned."""
_LARGE, _SLOW_LINK, _IN_NODE = 4 * 2**20, 10e9, 8
"""The least bytes of a collective that no latency limits, the bus bandwidth below which it is slow, and the
most ranks that are taken to share a node. PCI-SIG gives 32 GB/s for PCIe 4.0 x16, and
AMD 48 GB/s per link of xGMI (mi300x-rccl-xgmi in its blog)."""
_STEPS = {
    UPDATE: f"A step, from the end of one {UPDATE} to that of the next, takes",
    "": "The recording, in which no steps are marked, takes",
}


def findings(capture: Capture) -> list[str]:
    """Returns the findings of a capture, the length of a step first."""
    wall_s = capture.mean.wall_s or 1.0
    sentences = _step(capture)
    if straggler := capture.straggler:
        is_shared = 2 * straggler.share * wall_s < straggler.excess_s
        gain = (
            f" Without {'this rest' if straggler.before_s else 'this delay'}, a step would be "
            f"up to {straggler.share:.0%} shorter{', since another rank is nearly as slow' * is_shared}."
        )
        delays = f"Rank {straggler.rank} delays the other ranks: {straggler.evidence}."
        sentences.append(delays + gain * (straggler.share > 0))
    if capture.slow_connection:
        sentences.append(_slow_connection(capture.slow_connection, capture.ranks))
    sentences += [gains(capture, wall_s), *waits_of_host(capture), *cut_starts(capture, wall_s)]
    sentences += [*idle_device(capture, wall_s), *ahead_of_device(capture, wall_s)]
    return [*sentences, *_communication(capture), *avoidable(capture), *before_steps(capture, wall_s)]


def _slow_connection(connection: SlowConnection, ranks: Sequence[RankTrace]) -> str:
    sender, receiver = connection.sender, connection.receiver
    hosts = {trace.rank: trace.host for trace in ranks}
    where = (
        f" on {hosts[sender]} and {hosts[receiver]}, unless the clock of {hosts[receiver]} is ahead"
        if hosts[sender] != hosts[receiver]
        else ""
    )
    return (
        f"The connection from rank {sender} to rank {receiver} is slow: rank {receiver} was the last to end "
        f"{connection.num_last} of {connection.num_collectives} large all_reduces, "
        f"{duration(connection.lag_s)} after the ranks other than rank {sender} (median), and gloo sends "
        f"data from each rank to the one before it. Check the network of both ranks{where}."
    )


def _step(capture: Capture) -> list[str]:
    overall, ranks = capture.mean, capture.ranks
    parts = _shares(overall, capture.on_device)
    takes = _STEPS.get(ranks[0].steps_from, "A step takes")
    lengths = mean_lengths(ranks)
    least_s, most_s = min(lengths.values()), max(lengths.values())
    if most_s <= _DIFFERENT * least_s:
        alone = (
            " Only one step was recorded, so it is unknown whether steps vary; record several, for example "
            "with schedule(active=3)."
        )
        is_alone = capture.has_steps and len(lengths) == 1
        return [f"{takes} {duration(overall.wall_s)}: {parts}.{alone * is_alone}"]
    median_s = statistics.median(lengths.values())
    spread = f"{duration(least_s)} to {duration(most_s)}, median {duration(median_s)}"
    sentences = [f"{takes} {duration(overall.wall_s)} on average ({spread}): {parts}."]
    if slow := slow_steps_of(ranks):
        sentences.append(_slow_steps(slow))
    return sentences


def _shares(times: Times, on_device: bool) -> str:
    """Returns the parts of a step, the longest first; the idle time of a device with its causes."""
    wall_s, parts = times.wall_s or 1.0, {PART_NAMES[part]: getattr(times, part) for part in PARTS}
    causes = ""
    if on_device:
        del parts["waiting for data"]
        if not times.forward_s and times.backward_s:
            parts["forward (not annotated) and other computation"] = parts.pop(PART_NAMES["other_s"])
        parts |= {"snapshots": times.snapshot_s - times.idle_snapshot_s, "idle": times.device_idle_s}
        causes = _listed({PART_NAMES[cause]: getattr(times, cause) for cause in IDLE_CAUSES}, wall_s)
    return _listed(parts, wall_s).replace("% idle", f"% idle ({causes})" if causes else "% idle")


def _listed(times: Mapping[str, float], wall_s: float) -> str:
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{time_s / wall_s:.0%} {name}" for name, time_s in ordered if time_s >= _LITTLE * wall_s
    )


def _slow_steps(slow: SlowSteps) -> str:
    """Names the slow steps, the one or two parts of the time in which they differ most from the others, and
    the gain if they were as short as these.
    """
    more_s, numbers = sum(slow.more.values()), sorted(slow.lengths)
    named = [_part(*one) for one in slow.more.items() if one[1] >= _MUCH_IDLE * more_s]
    text = f"Step {numbers[0]} takes" if len(numbers) == 1 else f"Steps {first_of(numbers)} take"
    text += f" {duration(more_s)} longer than the others"
    if len(numbers) == 2 and len({part for part, _ in slow.most.values()}) == 2:
        text += " on average: " + ", and ".join(
            f"in step {step}, {_part(*slow.most[step])}" for step in numbers
        )
    else:
        text += f": of the difference, {', and '.join(named[:2])}"
    return (
        f"{text}. If {'it' if len(numbers) == 1 else 'they'} took the median of the others "
        f"({duration(slow.usual_s)}), the mean step would be {slow.gain:.0%} shorter."
    )


def _part(part: str, part_s: float) -> str:
    return f"{duration(part_s)} is " + "idle time of the device: " * (part in IDLE_CAUSES) + PART_NAMES[part]


def _communication(capture: Capture) -> Iterator[str]:
    overall, rows = capture.mean, capture.collectives
    total_s = sum(row.total_s for row in rows) / capture.num_steps
    if not total_s:
        return
    of_rank = " on a rank" * (len(capture.ranks) > 1)
    text = f"Collectives take {duration(total_s)}{capture.per_step}{of_rank}"
    transfers_s = sum(row.transfers_s for row in rows) / capture.num_steps
    if all(row.transfer_s is not None for row in rows):
        at_most = "at most " * bool(capture.missing)  # a rank without a trace can have started them last
        rest = ", and the rest is waiting for other ranks" * (transfers_s < _TRANSFER * total_s)
        text += f", of which {at_most}{duration(transfers_s)} is the transfers{rest}"
    elif not transfers_s:
        text += ", in which waiting for other ranks cannot be separated from the transfers"
    if notified_s := sum(row.total_s for row in rows if "notify" in row.kind) / capture.num_steps:
        text += f" ({duration(notified_s)} is in kernels that exchange numbers of tokens, and wait for them)"
    if both_s := overall.comm_hidden_s + overall.comm_exposed_s:
        text += f"; {overall.comm_hidden_s / both_s:.0%} of the communication is hidden behind computation"
    longest = max(rows, key=lambda row: row.total_s)
    yield f"{text}. The longest is {_collective(longest, capture)}."
    row = rows[0]
    if row.transfer_s is not None:
        transfer_s, exposed_s = row.transfers_s / capture.num_steps, overall.comm_exposed_s
        if (
            not (capture.straggler or capture.slow_connection)
            and row.num_ranks > 1
            and exposed_s >= _MUCH_COMMUNICATION * overall.wall_s
            and transfer_s >= exposed_s / 2
        ):
            yield (
                "No rank delays the others: most of the exposed communication is the transfers themselves. "
                "The traces do not show whether a connection is slow; ddp-hpc bench comm --collectives "
                "send_recv with one rank per node does."
            )
    hosts = {trace.host for trace in capture.ranks}
    is_in_node = capture.on_device and 1 < longest.num_ranks <= _IN_NODE and len(hosts) == 1
    if is_in_node and longest.bytes >= _LARGE and 0 < _bandwidth(longest) < _SLOW_LINK:
        waits = "" if longest.transfer_s else "ranks wait for each other in it, or "
        is_sure = "" not in hosts and not capture.missing
        where = "between GPUs of one node" if is_sure else "if all ranks are on one node"
        yield (
            f"{_bandwidth(longest) / 1e9:.3g} GB/s is slow {where}, where PCIe 4.0 x16 "
            f"carries up to 32 GB/s in each direction, and NVLink or xGMI more: {waits}it does not use these "
            "links well (NCCL_DEBUG=INFO shows which are used)."
        )


def _bandwidth(row: CollectiveRow) -> float:
    """Returns the bus bandwidth, or a lower bound of it; 0 if it is unknown."""
    of_median = bus_bandwidth(row.kind, row.num_ranks, row.bytes, row.median_s)
    return row.busbw_bytes_per_s or (of_median if row.transfer_s is None else 0.0)


def _collective(row: CollectiveRow, capture: Capture) -> str:
    num_calls, total_s = row.num_calls / capture.num_steps, row.total_s / capture.num_steps
    size = f" of {format_bytes(row.bytes)}" if row.bytes else ""
    text = (
        f"{row.kind}{size}: {duration(total_s)}{capture.per_step} in {num_calls:.3g} "
        f"call{'s' * (num_calls != 1)} (median {duration(row.median_s)})"
    )
    at_most, at_least = ("at most ", "at least ") if capture.missing else ("", "")
    if row.transfer_s is not None:
        text += f", of which {at_most}{duration(row.transfers_s / capture.num_steps)} is the transfer"
    else:
        at_least = "at least "
    busbw = _bandwidth(row)
    return text + (f", with a bus bandwidth of {at_least}{busbw / 1e9:.3g} GB/s" if busbw else "")
