"""A user's script for ranks of `Forks`. Its arguments select a failure and the rank that fails.

script.py                      trains, and writes the loss of each step to losses.jsonl
script.py raise:1              rank 1 raises in its third step; or request, exit, words, term, kill, sleep
script.py saves fsdp batch=6   with snapshots in run/, this strategy, and this number of samples per rank
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ddp_hpc

SAMPLES = 50


def data():
    generator = torch.Generator().manual_seed(0)
    src = torch.rand(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return src, src.sum(dim=1, keepdim=True)


def go_wrong(fault: str, rank: int) -> None:
    kind, _, on = fault.partition(":")
    if on not in ("", str(rank)):
        return
    if kind == "raise":
        raise ValueError("planted in a script")
    if kind == "request":
        raise ddp_hpc.RequestError("planted; nothing was needed; leave it out")
    if kind == "exit":
        sys.exit(0)
    if kind == "words":
        sys.exit("planted words")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "sleep":
        time.sleep(600)


def main(argv: list[str]) -> None:
    fault = argv[0] if argv else ""
    folder = "run" if "saves" in argv else None
    dropout = 0.1 if "dropout" in argv else 0.0
    strategy = "fsdp" if "fsdp" in argv else "ddp"
    batch_size = next((int(word.removeprefix("batch=")) for word in argv if word.startswith("batch=")), 4)
    with ddp_hpc.distributed(hang_timeout_s=1.0 if fault.startswith(("sleep", "rest")) else 60.0) as world:
        torch.manual_seed(0)
        width = 9 if fault == f"wider:{world.rank}" else 8
        model = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 1)).double()
        model = ddp_hpc.wrap(model, strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = world.loader(data(), batch_size=batch_size, epochs=2)
        seen = torch.zeros(SAMPLES, dtype=torch.float64)
        with ddp_hpc.snapshots(
            folder, model=model, optimizer=optimizer, loader=loader, every_steps=4
        ) as snapshots:
            for batch in loader:
                if batch.step == 3:
                    go_wrong(fault, world.rank)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(batch.src), batch.tgt) * batch.weight
                if fault == "nan" and batch.step == 3:
                    loss = loss * float("nan")
                loss.backward()
                optimizer.step()
                if batch.weight:
                    seen += (data()[0][:, None] == batch.src).all(dim=2).sum(dim=1)
                mean = world.sum(loss.detach().clone()).item() / world.world_size
                if world.is_first:
                    with Path("losses.jsonl").open("a") as file:
                        file.write(json.dumps([batch.step, batch.epoch, mean]) + "\n")
                if snapshots.step(batch.step):
                    break
        if fault == "rest":
            time.sleep(3.0)  # work outside of the loop that takes longer than the time limit of a step
        times = world.sum(seen).unique().tolist()
        world.say(f"each sample was seen {times} times")
    print("after the with", flush=True)
    sys.exit(0)
