"""Writes the files of scaling points without training, directly or with a fake mpiexec."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ddp_hpc.bench.scaling.points import Settings

WARM_UP, STEPS = 2, 4

# Writes the files of the trainer. With N ranks, the time of a step is the value after `N=` in STEP_S.
MPIEXEC = """#!{python}
import json, os, sys, time
sys.path[:0] = [{project!r}]
arguments = sys.argv[1:]
if arguments == ["--version"]:
    sys.exit(print("HYDRA"))
def after(option):
    return arguments[arguments.index(option) + 1]
ranks = int(after("-n"))
step = dict(pair.split("=") for pair in os.environ["STEP_S"].split())[str(ranks)]
if "DDP_HPC_RUN_DIR" in os.environ:
    sys.exit("this run would be saved")
if step == "fails":
    print("[rank 1/2 n2] error: the GPU is on fire; put it out")
    sys.exit(1)
if step == "refuses":
    print("Usage: train\\n\\nError: No such option: --modle")
    sys.exit(2)
if step == "hangs":
    open("up", "w").close()
    time.sleep(60)
from tests.bench.scaling_points import write_point
from pathlib import Path
write_point(Path(after("--summary")).parent, ranks, int(after("--batch-size")), float(step))
"""


def write_mpiexec(path: Path) -> Path:
    path.write_text(MPIEXEC.format(python=sys.executable, project=str(Path(__file__).resolve().parents[2])))
    path.chmod(0o755)
    return path


def write_point(
    folder: Path, ranks: int, batch_size: int, step_s: float, summary: dict[str, Any] | None = None
) -> None:
    """Writes the files of a training with WARM_UP + STEPS steps and two traced steps; all others are slow.

    The fast step in the middle is the end of an epoch with fewer samples, which must be ignored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = ranks * batch_size
    steps = [(whole, 10.0)] * WARM_UP
    steps += [(whole, step_s), (1, step_s / 100), (whole, 3 * step_s), (whole, step_s)]
    steps += [(whole, 20.0)] * 2
    lines = [
        {"step": i, "epoch": 1, "loss": 1.0, "lr": 0.1, "samples": num, "data_s": took / 10, "step_s": took}
        for i, (num, took) in enumerate(steps, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {
        "created": "2026-11-21T22:42:34Z",
        "world": {"world_size": ranks, "num_nodes": max(1, ranks // 4), "hostname": "n1"},
        "backend": "gloo" if ranks > 1 else "none",
        "device": "cpu",
        "device_name": "Some CPU",
        "threads": 1,
        "model": {"name": "linear", "parameters": 21},
        "data": {"reader": "x", "samples": 2048},
        "strategy": "ddp" if ranks > 1 else "single",
        "stopped": None,
        "versions": {"torch": "2.13.0", "ddp_hpc": "0.1.0"},
    }
    (folder / "summary.json").write_text(json.dumps({**about, **(summary or {})}))


SETTINGS = Settings(steps=STEPS, warm_up=WARM_UP, trace_steps=0, training=())
