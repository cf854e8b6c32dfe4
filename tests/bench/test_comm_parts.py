"""Parts of `ddp-hpc bench comm` in one process: numbers, groups, model buckets, baselines and transports."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_hpc.bench.comm import timing
from ddp_hpc.bench.comm.measure_cases import slow_connections
from ddp_hpc.bench.comm.parse_options import Effort, num_elements, parse_sizes
from ddp_hpc.bench.comm.timing import speeds
from ddp_hpc.bench.comm.transport import NcclLog, parse_nccl_log, summary
from ddp_hpc.bench.comm.verification_data import PERIOD, fill_pattern, sum_table, table
from ddp_hpc.trace.event_names import busbw_factor

# Slow connections.


def test_the_ranks_with_slow_transfers_are_named() -> None:
    assert slow_connections([0.1, 0.11, 0.15, 0.09]) == ""
    assert slow_connections([0.02, 0.09, 0.36, 0.35]) == (
        "rank 0 takes 20 ms, but slower ranks up to 360 ms: 2, 3. Each rank sends to the next one, so check "
        "the connections of these ranks"
    )


# Requests.


@pytest.mark.parametrize(
    ("kind", "factors"),  # of 2, 4 and 8 ranks
    [
        ("all_reduce", (1, 1.5, 1.75)),
        ("reduce", (1, 1, 1)),
        ("broadcast", (1, 1, 1)),
        ("all_gather", (0.5, 0.75, 0.875)),
        ("reduce_scatter", (0.5, 0.75, 0.875)),
        ("all_to_all", (0.5, 0.75, 0.875)),
        ("send_recv", (1, 1, 1)),
    ],
)
def test_factors_are_those_of_nccl_tests(kind: str, factors: tuple[float, ...]) -> None:
    assert tuple(busbw_factor(kind, n) for n in (2, 4, 8)) == factors


def test_times_and_bandwidths_are_those_of_the_median_iteration() -> None:
    found = speeds([0.001, 0.002, 0.004], 10**6, 1.5)
    assert found["median_us"] == pytest.approx(2000)
    assert found["p99_us"] == pytest.approx(3960)
    assert found["algbw_bytes_per_s"] == pytest.approx(5e8)
    assert found["busbw_bytes_per_s"] == pytest.approx(7.5e8)


def test_a_gpu_is_busy_while_the_host_launches_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, device: str, enable_timing: bool) -> None:
            self.name = f"event {len(events)}"
            events.append(self)

        def record(self) -> None:
            calls.append(f"record {self.name}")

        def synchronize(self) -> None:
            calls.append(f"wait for {self.name}")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    events: list[Event] = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"))
    operation: Any = SimpleNamespace(run=lambda: calls.append("run"))
    assert timing._timed_by_device(operation, torch.device("cuda")) == 0.003
    assert calls == ["sleep", "record event 0", "run", "record event 1", "wait for event 1"]


def test_a_sweep_goes_from_the_smallest_to_the_largest_size() -> None:
    sizes = parse_sizes((), min_bytes="1KiB", max_bytes="20KiB", factor=None)
    assert sizes == (1024, 4096, 16384)
    whole = parse_sizes((), min_bytes=None, max_bytes=None, factor=None)
    assert (whole[0], whole[-1], len(whole)) == (2**10, 2**26, 9)


def test_a_size_below_one_element_per_rank_is_rounded_up() -> None:
    assert num_elements("all_gather", 4, 8, 4) == 4
    assert num_elements("broadcast", 4, 8, 4) == 1


@pytest.mark.parametrize(
    ("taken_s", "iterations"), [(0.0, 100), (1e-9, 100), (0.02, 50), (1.0, 5), (math.inf, 5)]
)
def test_slow_iterations_reduce_their_number(taken_s: float, iterations: int) -> None:
    assert Effort(iterations=100, seconds=1.0).num_iterations(taken_s) == iterations


# Test data.


@pytest.mark.parametrize("num_ranks", [2, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_sums_in_any_order_are_exact_in_the_dtype(dtype: torch.dtype, num_ranks: int) -> None:
    like = torch.empty(0, dtype=dtype)
    total = torch.zeros(PERIOD, dtype=dtype)
    for index in reversed(range(num_ranks)):
        total += fill_pattern(table(index, num_ranks, dtype), 0, PERIOD, like)
    assert torch.equal(total.to(torch.int64), sum_table(num_ranks, dtype))
    assert sum_table(num_ranks, dtype).max() > 1, (
        "not all values may be zero, or the test would prove nothing"
    )


def test_all_blocks_of_all_ranks_differ() -> None:
    like = torch.empty(0)
    blocks = [
        fill_pattern(table(index, 1, torch.float32), start, 64, like)
        for index in range(4)
        for start in range(0, 2**16, 64)
    ]
    assert len({tuple(block.tolist()) for block in blocks}) == len(blocks)


# Groups of ranks.


# The buckets of a model.


# Baselines.

# Transports.

# Composed of published log lines of NCCL 2.14 to 2.31; NCCL itself was not run here.
NCCL_LOG = """\
n1:71:71 [0] NCCL INFO Bootstrap: Using hsn0:10.0.0.1<0>
n1:71:71 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n1:71:92 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
n1:71:92 [0] NCCL INFO Using network AWS Libfabric
n1:71:92 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:71:92 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:71:92 [0] NCCL INFO Channel 02/0 : 0[3000] -> 1[4000] via SHM/direct/direct
n1:71:92 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/AWS Libfabric/2/GDRDMA comm 0x9b nRanks 8
n1:71:92 [0] NCCL INFO Channel 01/0 : 0[0] -> 4[0] [send] via NET/Socket/0
n1:71:92 [0] NCCL INFO Connected all rings
"""


def test_version_network_and_channels_are_parsed_from_the_nccl_log() -> None:
    parsed = parse_nccl_log(NCCL_LOG)
    assert parsed == {
        "version": "2.27.3+cuda12.9",
        "networks": ["AWS Libfabric", "provider cxi"],
        "channels": {
            "P2P/CUMEM/read": 2,
            "SHM/direct/direct": 1,
            "NET/AWS Libfabric/GDRDMA": 1,
            "NET/Socket": 1,
        },
    }
    found = summary("nccl", [parsed, parsed])
    assert found["channels"]["P2P/CUMEM/read"] == 4
    assert found["line"].startswith(
        "NCCL 2.27.3+cuda12.9, from its log: network AWS Libfabric, provider cxi; "
    )
    assert "4 via P2P/CUMEM/read" in found["line"]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("RCCL version : 2.30.4-HEAD:2b22ab0", "2.30.4-HEAD:2b22ab0"),
        ("RCCL version 2.12.10+hip5.3", "2.12.10+hip5.3"),  # VERSION_STRING in RCCL's init.cc
    ],
)
def test_the_version_of_rccl_is_found(line: str, version: str) -> None:
    assert parse_nccl_log(f"{line}\n")["version"] == version


def test_nccl_logs_to_a_file_in_memory() -> None:
    environ: dict[str, str] = {"NCCL_DEBUG": "WARN"}
    log = NcclLog(environ)
    with Path(environ["NCCL_DEBUG_FILE"]).open("w") as file:  # as NCCL opens it
        file.write(NCCL_LOG)
    assert log.read() == NCCL_LOG
    assert log.user_settings == ""
    assert environ["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("settings", [{"NCCL_DEBUG_FILE": "/tmp/nccl.%p"}, {"NCCL_DEBUG": "info"}])
def test_log_settings_of_the_user_are_not_changed(settings: dict[str, str]) -> None:
    environ = dict(settings)
    log = NcclLog(environ)
    assert environ == settings
    assert log.read() == ""
    assert (
        "in the NCCL log that you enabled with NCCL_DEBUG"
        in summary("nccl", [parse_nccl_log("")], log.user_settings)["line"]
    )


def test_the_interfaces_of_gloo_are_listed_with_their_number_of_ranks() -> None:
    line = summary("gloo", [{"address": f"10.0.0.{i // 2} of hsn0"} for i in range(4)])["line"]
    assert "gloo, set to listen on 10.0.0.0 of hsn0 on 2 ranks; 10.0.0.1 of hsn0 on 2 ranks" in line
