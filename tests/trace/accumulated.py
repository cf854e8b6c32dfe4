"""A training program without annotations, in which each step accumulates the gradients of four batches.

`python -m tests.trace.accumulated DIRECTORY`: records the program twice with torch.profiler, with and without
profiler.step(), and writes the times that the program measures itself to DIRECTORY/measured.json.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

NUM_STEPS, NUM_BATCHES = 3, 4
LOAD_S = 0.02


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_S / 4)
        return torch.ones(64)


def main(argv: list[str]) -> None:
    directory = Path(argv[0])
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Slow(), batch_size=4))
    measured = {}
    for name in ("marked", "unmarked"):
        options = (
            {"schedule": schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1)} if name == "marked" else {}
        )
        times = []
        with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
            for _ in range(1 + NUM_STEPS):
                times.append(step(model, optimizer, batches))
                if name == "marked":
                    profiler.step()
        profiler.export_chrome_trace(str(directory / f"{name}.pt.trace.json"))
        # Without marks, the report begins with the end of the first step.
        measured[name] = [sum(part) / NUM_STEPS for part in zip(*times[1:], strict=True)]
    (directory / "measured.json").write_text(json.dumps(measured))
    sys.exit(0)


def step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]
) -> tuple[float, float]:
    """Returns the seconds of loading data and of the backward passes."""
    load_s = backward_s = 0.0
    for _ in range(NUM_BATCHES):
        start_s = time.perf_counter()
        batch = next(batches)
        load_s += time.perf_counter() - start_s
        loss = model(batch).square().mean()
        start_s = time.perf_counter()
        loss.backward()
        backward_s += time.perf_counter() - start_s
    optimizer.step()
    optimizer.zero_grad()
    return load_s, backward_s


if __name__ == "__main__":
    main(sys.argv[1:])
