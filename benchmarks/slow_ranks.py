"""Counts how often `ddp-hpc report` and `ddp-hpc bench comm` name a slow rank or a slow connection.

`python benchmarks/slow_ranks.py record DIR` records ranks of which one is slow, and `judge DIR...` compares
the report with what was slow. `bench` runs `ddp-hpc bench comm` with one slow connection. Each rank has a
network namespace of its own, in which `tc` makes its connection slow; this requires root.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from ddp_hpc.trace.summarize_run import read_capture

REGIONS = ("data", "forward", "backward")
NETWORK = ("network", "receive", "both")
"""The rank sends slowly, receives slowly, or both."""
NUM_WARMUP, NUM_STEPS = 2, 6
LATE_S = 0.03
ADDRESS = {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29871"}


@click.group()
def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--ranks", default=4, show_default=True)
@click.option("--repeat", default=5, show_default=True)
@click.option(
    "--scenarios",
    default="data,backward,network,random,none",
    show_default=True,
    help=f"{', '.join((*REGIONS, *NETWORK))}; random: another rank in each step; all: the network of all "
    "ranks; none: no rank.",
)
@click.option(
    "--sizes", default="1048576,1048576,1048576", show_default=True, help="Bytes of the all_reduces."
)
@click.option("--rate", default="200mbit", show_default=True, help="Rate of a slow connection.")
@click.option("--seed", default=0, show_default=True)
def record(
    directory: Path, ranks: int, repeat: int, scenarios: str, sizes: str, rate: str, seed: int
) -> None:
    """Records each scenario, with another slow rank in each repetition."""
    choose = random.Random(seed)
    plan = [
        (scenario, choose.randrange(ranks), choose.randrange(10**6))
        for _ in range(repeat)
        for scenario in scenarios.split(",")
    ]
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(plan))
    with _namespaces(ranks) as tag:
        failed = _run_ranks(tag, ranks, [__file__, "rank", str(directory), sizes, rate, tag])
    if failed:
        raise click.ClickException(f"ranks {failed} failed")


@main.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--repeat", default=5, show_default=True)
@click.option("--rate", default="200mbit", show_default=True, help="Rate of a slow connection.")
@click.option("--seed", default=0, show_default=True)
def bench(ranks: int, repeat: int, rate: str, seed: int) -> None:
    """Runs bench comm with a slow connection, and with none, and counts what it names."""
    choose = random.Random(seed)
    options = ["bench", "comm", "--collectives", "send_recv", "--bytes", "8MiB", "--seconds", "1"]
    counts: dict[str, list[bool]] = {}
    with _namespaces(ranks) as tag, tempfile.TemporaryFile("w+") as output:
        for scenario in [scenario for _ in range(repeat) for scenario in (*NETWORK, "none")]:
            slow = choose.randrange(ranks)
            for rank in range(ranks):
                _limit(scenario if rank == slow else "none", rate, tag, rank, os.getpid())
            output.seek(0)
            output.truncate()
            failed = _run_ranks(tag, ranks, ["-m", "ddp_hpc", *options], stdout=output, stderr=output)
            output.seek(0)
            lines = [line.strip() for line in output if "slower ranks" in line]
            named = lines[0].rpartition(": ")[2].partition(".")[0].split(", ") if lines else []
            expected = str(slow) in named if scenario in NETWORK else not named
            counts.setdefault(scenario, []).append(expected and not failed)
            print(f"{scenario} {slow}: {lines}" + (f" ranks {failed} failed" if failed else ""), flush=True)
    _print(counts)


@contextmanager
def _namespaces(ranks: int) -> Iterator[str]:
    """Connects a network namespace per rank; yields the beginning of their names."""
    tag = f"sr{os.getpid() % 10**5}"
    with ExitStack() as cleanup:
        _run("ip", "link", "add", tag, "type", "bridge")
        cleanup.callback(_run, "ip", "link", "del", tag)
        _run("ip", "link", "set", tag, "up")
        for rank in range(ranks):
            name, outside = f"{tag}n{rank}", f"{tag}v{rank}"
            inside = ("ip", "netns", "exec", name, "ip")
            _run("ip", "netns", "add", name)
            cleanup.callback(_run, "ip", "netns", "del", name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outside, "master", tag, "up")
            _run(*inside, "addr", "add", f"10.9.0.{rank + 1}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")
        yield tag


def _run_ranks(tag: str, ranks: int, arguments: Sequence[str], **streams: Any) -> list[int]:
    """Runs a Python program on all ranks; returns the ranks that failed."""
    with ExitStack() as cleanup:
        processes = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment = {**os.environ, **ADDRESS, **place, "GLOO_SOCKET_IFNAME": "eth0"}
            command = ["ip", "netns", "exec", f"{tag}n{rank}", sys.executable, *arguments]
            process = subprocess.Popen(command, env=environment, **streams)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            processes.append(process)
        return [rank for rank, process in enumerate(processes) if process.wait()]


def _limit(scenario: str, rate: str, tag: str, rank: int, bridge_pid: int) -> None:
    """Limits what a rank sends or receives; the process `bridge_pid` is in the namespace of the bridge."""
    sends = ("ip", "netns", "exec", f"{tag}n{rank}", "tc", "qdisc")
    receives = ("nsenter", "--target", str(bridge_pid), "--net", "tc", "qdisc")
    for tc, device, limited in (
        (sends, "eth0", ("network", "both", "all")),
        (receives, f"{tag}v{rank}", ("receive", "both")),
    ):
        _run(*tc, "del", "dev", device, "root", check=False)
        if scenario in limited:
            _run(*tc, "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)


@main.command("rank", hidden=True)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("sizes")
@click.argument("rate")
@click.argument("tag")
def record_rank(directory: Path, sizes: str, rate: str, tag: str) -> None:
    """Runs one rank in its namespace."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.ones(int(num_bytes) // 4) for num_bytes in sizes.split(",")]
    for number, (scenario, slow, seed) in enumerate(json.loads((directory / "plan.json").read_text())):
        _limit(scenario if rank == slow or scenario == "all" else "none", rate, tag, rank, os.getppid())
        own = directory / f"{number:02d}"
        own.mkdir(exist_ok=True)
        trace = own / f"rank{rank:05d}-of-{size:05d}.json"
        dist.barrier()
        _record_steps(scenario, slow, random.Random(seed), tensors, trace)
        dist.barrier()
    dist.destroy_process_group()


def _record_steps(scenario: str, slow: int, choose: random.Random, tensors: list[Any], trace: Path) -> None:
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    rank, size = dist.get_rank(), dist.get_world_size()
    # All ranks draw the same numbers. Each is slow equally often, so that none is slow in most steps.
    turns = choose.sample(range(size), size)
    window = schedule(wait=1, warmup=NUM_WARMUP - 1, active=NUM_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=window, record_shapes=True) as profiler:
        for step in range(NUM_WARMUP + NUM_STEPS):
            who, where = turns[step % size], choose.choice(REGIONS)
            if scenario in REGIONS:
                who, where = slow, scenario
            late = {where: LATE_S} if rank == who and scenario in (*REGIONS, "random") else {}
            jitter = random.Random(rank * 1000 + step)
            with record_function("data"):
                time.sleep(0.01 * jitter.uniform(0.95, 1.05) + late.get("data", 0))
            with record_function("forward"):
                time.sleep(0.025 * jitter.uniform(0.95, 1.05) + late.get("forward", 0))
            with record_function("backward"):
                works = []
                for tensor in tensors:
                    time.sleep(0.015 * jitter.uniform(0.95, 1.05) + late.get("backward", 0) / len(tensors))
                    works.append(dist.all_reduce(tensor, async_op=True))
                for work in works:
                    work.wait()
            with record_function("optimizer"):
                time.sleep(0.004 * jitter.uniform(0.95, 1.05))
            profiler.step()
    profiler.export_chrome_trace(str(trace))


@main.command()
@click.argument("directories", type=click.Path(exists=True, path_type=Path), nargs=-1)
def judge(directories: tuple[Path, ...]) -> None:
    """Compares what the report says with the plan."""
    counts: dict[str, list[bool]] = {}
    for directory in directories:
        for number, (scenario, slow, _) in enumerate(json.loads((directory / "plan.json").read_text())):
            capture = read_capture(directory / f"{number:02d}", num_processes=1)
            straggler, link = capture.straggler, capture.slow_connection
            named = (straggler.rank, straggler.region) if straggler else None
            pair = (link.sender, link.receiver) if link else None
            expected: object = (slow, scenario) if scenario in REGIONS else None
            right = named == expected and (slow in (pair or ()) if scenario in NETWORK else pair is None)
            counts.setdefault(scenario, []).append(right)
            if not right or pair:
                sign = "right" if right else "WRONG"
                print(
                    f"{sign}: {directory}/{number:02d}: {scenario} {slow}: named {named}, connection {pair}"
                )
    _print(counts)


def _print(counts: dict[str, list[bool]]) -> None:
    for scenario, rights in counts.items():
        print(f"{scenario}: {sum(rights)} of {len(rights)}")
    print(f"all: {sum(map(sum, counts.values()))} of {sum(map(len, counts.values()))}")


if __name__ == "__main__":
    main()
