"""Real gloo ranks with planted faults, each of which the report finds with its size."""

import statistics

import pytest

from ddp_hpc.trace import tables
from tests.trace import planted as program


def test_the_slow_rank_is_reported_with_its_region_and_time(planted):
    slow = planted.capture.straggler
    assert slow is not None
    assert (slow.rank, slow.region) == (program.SLOW_RANK, "forward")
    measured_s = statistics.median(planted.measured[program.SLOW_RANK]["slow_s"])
    assert slow.excess_s == pytest.approx(measured_s, rel=0.1)
    assert "which wait" in slow.evidence
    assert any(
        sentence.startswith(f"Rank {program.SLOW_RANK} delays the other ranks: ")
        for sentence in planted.capture.findings
    )


def test_the_slow_data_load_is_reported_with_its_rank_and_step(planted):
    slow = next(
        row for row in tables.steps(planted.capture).rows if row["name"] == f"step {program.LOAD_STEP}"
    )
    assert (slow["rank"], slow["part"]) == (program.LOAD_RANK, "data_s")
    measured_s = planted.measured[program.LOAD_RANK]["load_s"]
    assert slow["part_s"] == pytest.approx(measured_s, rel=0.1)


def test_the_large_allreduce_is_the_first_of_the_collectives(planted):
    row = planted.capture.collectives[0]
    assert (row.kind, row.bytes, row.num_ranks) == ("all_reduce", program.LARGE_BYTES, 4)
    assert row.num_calls == program.ACTIVE
    measured_s = statistics.median(time_s for measured in planted.measured for time_s in measured["large_s"])
    assert row.median_s == pytest.approx(measured_s, rel=0.1)
    # On a busy machine, the ranks can wait longer in a small one.
    longest = max(planted.capture.collectives, key=lambda row: row.total_s)
    words = f"The longest is {longest.kind} of "
    assert any(words in sentence for sentence in planted.capture.findings)


def test_bus_bandwidth_equals_a_calculation_by_hand(planted):
    row = planted.capture.collectives[0]
    # Each of 4 ranks sends and receives its part 3 times for the reduction and 3 times for the result.
    by_hand = 2 * 3 / 4 * (64 * 1024 * 1024) / row.transfer_s
    assert row.busbw_bytes_per_s == pytest.approx(by_hand, rel=1e-9)
    assert 0 < row.transfer_s <= row.median_s


def test_every_moment_of_a_step_is_counted_once(planted):
    for trace in planted.capture.ranks:
        for step, following in zip(trace.steps, trace.steps[1:], strict=False):
            between_s = following.start_s - step.start_s - step.times.wall_s
            # profiler.step() takes some milliseconds, on a busy machine more.
            assert -1e-5 < between_s < 0.1 * step.times.wall_s


def test_operators_agree_with_torchs_own_key_averages(planted):
    for trace, measured in zip(planted.capture.ranks, planted.measured, strict=True):
        ops = {op.name: op for op in trace.ops}
        for name, (num_calls, total_s, self_s) in measured["averages"].items():
            if name.startswith("gloo:") or name == "[memory]":
                continue
            assert ops[name].num_calls == num_calls, name
            assert ops[name].total_s == pytest.approx(total_s, rel=0.01, abs=1e-6), name
            assert ops[name].self_s == pytest.approx(self_s, rel=0.01, abs=1e-6), name
