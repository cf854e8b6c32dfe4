"""A training program with three planted faults, recorded with torch.profiler.

`python -m tests.trace.planted DIRECTORY`: rank 2 is slow in every forward pass, rank 1 loads one batch
slowly, and every step all-reduces a large tensor. Each rank writes its measurements to DIRECTORY.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

SLOW_RANK, SLOW_S = 2, 0.15
LOAD_RANK, LOAD_STEP, LOAD_S = 1, 3, 0.5
LARGE_BYTES = 64 << 20
WAIT, ACTIVE = 1, 5


def main(argv: list[str]) -> None:
    directory = Path(argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    large = torch.ones(LARGE_BYTES // 4)
    measured = {"slow_s": [], "load_s": 0.0, "large_s": []}
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WAIT, warmup=1, active=ACTIVE, repeat=1),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for step in range(WAIT + 1 + ACTIVE):
            recorded = step > WAIT
            with record_function("data"):
                start_s = time.perf_counter()
                batch = torch.ones(8, 64)
                if rank == LOAD_RANK and step == LOAD_STEP:
                    time.sleep(LOAD_S)
                    measured["load_s"] = time.perf_counter() - start_s
            with record_function("forward"):
                start_s = time.perf_counter()
                if rank == SLOW_RANK:
                    time.sleep(SLOW_S)
                    if recorded:
                        measured["slow_s"].append(time.perf_counter() - start_s)
                loss = model(batch).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            start_s = time.perf_counter()
            dist.all_reduce(large)
            if recorded:
                measured["large_s"].append(time.perf_counter() - start_s)
            profiler.step()
    # A name as from tensorboard_trace_handler, which does not contain the rank.
    profiler.export_chrome_trace(str(directory / f"vm_{os.getpid()}.pt.trace.json.gz"))
    averages = {
        row.key: [row.count, row.cpu_time_total * 1e-6, row.self_cpu_time_total * 1e-6]
        for row in profiler.key_averages()
    }
    (directory / f"measured-{rank}-of-{size}").write_text(json.dumps({**measured, "averages": averages}))
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
