"""Runs the GPU tests and the benchmarks of one GPU within a time limit, and writes one page of results.

python -m benchmarks.gpu [--minutes 9] [--out DIR] [--device auto]

This program is for a machine with a GPU on which nothing can be installed. It needs torch >= 2.8, h5py,
pytest, click and jinja2, but neither mpiexec nor an installed ddp-hpc. Run it in the root directory of the
project. A part that needs another package is skipped, and a part that fails or exceeds its time does not stop
the others; both are reported. The results are DIR/gpu.json and DIR/gpu.md. With `--device cpu`, the same
parts run on a CPU with small models, to test this program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [sys.executable, "-m", "ddp_hpc.train"]
Values = dict[str, Any]


@dataclass
class Part:
    """One part of the run: `measure` returns its values."""

    name: str
    measure: Callable[[Run], Values]
    share: float
    """The fraction of the time limit that the part may use, in addition to what earlier parts left."""
    needs: tuple[str, ...] = ()
    """The packages without which the part is skipped."""


@dataclass
class Run:
    """The state of one run of this program."""

    is_gpu: bool
    directory: Path
    """A temporary directory."""
    out: Path
    end_s: float = 0.0
    """The time at which the current part must have ended."""
    values: dict[str, Values] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.is_gpu else "cpu"

    def left_s(self) -> float:
        return max(self.end_s - time.monotonic(), 1.0)

    def command(self, argv: list[str], **environ: str) -> str:
        """Runs a command in the temporary directory; returns its output.

        Raises:
            RuntimeError: the command failed, or exceeded the time of the part. The message contains its
                last lines.
        """
        path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, **environ}
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                argv, cwd=self.directory, env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | str = process.wait(self.left_s())
            except subprocess.TimeoutExpired:
                code = "exceeded the time limit of its part"
            finally:
                _kill_session(process)
            log.seek(0)
            output = log.read()
        if code != 0:
            last = " | ".join(output.splitlines()[-6:])
            how = f"ended with exit code {code}" if isinstance(code, int) else code
            raise RuntimeError(f"{' '.join(argv[1:4])} {how}: {last}")
        return output


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def tests(run: Run) -> Values:
    """Runs the tests in tests/gpu, and lists those that did not pass."""
    report = run.out / "tests.xml"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
    ]
    argv += ["-q", f"--junitxml={report}", str(ROOT / "tests" / "gpu")]
    problem = ""
    try:
        run.command(argv)
    except RuntimeError as error:
        problem = str(error)
    if not report.exists():
        raise RuntimeError(problem or "pytest wrote no report")
    suite = ET.parse(report).getroot()[0]
    names = {
        kind: [case.get("name", "") for case in suite if case.find(kind) is not None]
        for kind in ("failure", "error", "skipped")
    }
    return {
        "tests": int(suite.get("tests", 0)),
        "failed": names["failure"] + names["error"],
        "skipped": names["skipped"],
        "seconds": float(suite.get("time", 0.0)),
    }


def floor(run: Run) -> Values:
    """Measures the rates that bound every step: matrix products, copies in memory, copies over PCIe."""
    import torch

    device, size = torch.device(run.device), 8192 if run.is_gpu else 512
    values: Values = {}
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = _time(lambda a=left, b=right: a @ b, device)
        values[f"matmul_{name}_tflops_per_s"] = 2 * size**3 / seconds / 1e12
    num_bytes = 2**30 if run.is_gpu else 2**25
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    values["copy_gb_per_s"] = 2 * num_bytes / _time(lambda: target.copy_(source), device) / 1e9
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=run.is_gpu)
    values["to_host_gb_per_s"] = num_bytes / _time(lambda: host.copy_(source), device) / 1e9
    values["from_host_gb_per_s"] = num_bytes / _time(lambda: source.copy_(host), device) / 1e9
    return values


def _time(call: Callable[[], object], device: Any, times: int = 10) -> float:
    """Returns the median time of a call, in seconds, after three calls that are not timed."""
    import torch

    found = []
    for number in range(times + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            found.append(time.perf_counter() - start_s)
    return statistics.median(found)


def step(run: Run) -> Values:
    """Compares the training loop with a plain one, in turns (benchmarks/step.py)."""
    options = ["--steps", "500", "--window", "50"] if run.is_gpu else ["--steps", "2", "--embedding", "64"]
    result = run.directory / "step.json"
    argv = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--device", run.device]
    run.command([*argv, *options, "--json", str(result)])
    rows = json.loads(result.read_text())["rows"]
    values: Values = {
        row["name"]: {name: row[name] for name in ("median_s", "vs_lesson", "loss_distance")} for row in rows
    }
    rates = run.values.get("floor", {})
    for name, floor_s in _floors(512 if run.is_gpu else 64, rates).items():
        if name in values:
            values[name]["vs_floor"] = values[name]["median_s"] / floor_s
    return values


def _floors(embedding: int, rates: Values) -> dict[str, float]:
    """Returns the shortest time that the measured rates allow for a step of the lesson's model, per loop.

    Each parameter is read in the forward and in the backward pass, and its gradient is written, while the
    matrix products run. After that, Adam reads four and writes three float32 values per parameter.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    if "copy_gb_per_s" not in rates:
        return {}
    with torch.device("meta"):
        model = torch.nn.Transformer(embedding, batch_first=True, dropout=0.0)
        src, tgt = torch.empty(32, 1, embedding), torch.empty(32, 20, embedding)
    with FlopCounterMode(display=False) as counter:
        model(src, tgt).sum().backward()
    num = sum(parameter.numel() for parameter in model.parameters())
    bytes_per_s = rates["copy_gb_per_s"] * 1e9
    return {
        name: max(counter.get_total_flops() / (rates[rate] * 1e12), 3 * size * num / bytes_per_s)
        + 7 * 4 * num / bytes_per_s
        for name, rate, size in (
            ("ours", "matmul_float32_tflops_per_s", 4),
            ("ours, fused", "matmul_float32_tflops_per_s", 4),
            ("ours, CUDA graph", "matmul_float32_tflops_per_s", 4),
            ("ours, tuned", "matmul_bf16_tflops_per_s", 2),
        )
    }


def decoder(run: Run) -> Values:
    """Trains a decoder, measures its waits for data, and compares its FLOP/s with the rates of `floor`."""
    layers, width, length, batch = (12, 1024, 1024, 16) if run.is_gpu else (1, 64, 32, 4)
    steps = 100 if run.is_gpu else 4
    path = run.directory / "tokens.h5"
    _write_tokens(path, num_samples=steps * batch, length=length)
    argv = [*TRAIN, "--device", run.device, "--model", "decoder", "--data", str(path), "--dropout", "0"]
    argv += ["--epochs", "1", "--batch-size", str(batch), "--log-every", "50" if run.is_gpu else "2"]
    for name, value in {"layers": layers, "width": width, "heads": max(width // 64, 1)}.items():
        argv += ["--model-option", f"{name}={value}"]
    if run.is_gpu:
        argv.append("--tuned")
    run.command([*argv, "--summary", "decoder.json", "--metrics", "decoder.jsonl"])
    summary = json.loads((run.directory / "decoder.json").read_text())
    records = [json.loads(line) for line in (run.directory / "decoder.jsonl").read_text().splitlines()]
    steady = records[len(records) // 2 :]
    flops = summary["flops_per_s"]
    rate = run.values.get("floor", {}).get(
        "matmul_bf16_tflops_per_s" if run.is_gpu else "matmul_float32_tflops_per_s"
    )
    return {
        "parameters": summary["model"]["parameters"],
        "tokens_per_s": summary["tokens_per_s"],
        "tflops_per_s": flops and flops / 1e12,
        "share_of_matmul_rate": flops / 1e12 / rate if flops and rate else None,
        "share_waiting_for_data": sum(one["data_s"] for one in steady) / sum(one["step_s"] for one in steady),
        "step_s": statistics.median(one["step_s"] for one in steady),
        "peak_gib": summary["memory"]["peak_bytes"] / 2**30,
    }


def _write_tokens(path: Path, *, num_samples: int, length: int) -> None:
    import h5py
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, (num_samples, length + 1), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file["src"], file["tgt"] = tokens[:, :-1], tokens[:, 1:]
        file.attrs["num_classes"] = 256


def stamp(record: Values) -> None:
    """The function of `--metrics-hook` in `snapshots`: writes the time at which each step was complete."""
    with Path("stamps").open("a") as file:
        file.write(f"{record['step']} {time.perf_counter()}\n")


def snapshots(run: Run) -> Values:
    """Compares the pause of the training during a snapshot with the time to copy its bytes to the host."""
    steps, every = (60, 20) if run.is_gpu else (6, 3)
    argv = [*TRAIN, "--device", run.device, "--max-steps", str(steps), "--log-every", "1", "--dropout", "0"]
    argv += ["--metrics-hook", "gpu:stamp", "--summary", "snapshots.json"]
    argv += ["--snapshot-dir", "snapshots", "--snapshot-every-steps", str(every), "--snapshot-every-s", "1e6"]
    if not run.is_gpu:
        argv += ["--src-shape", "1,64", "--tgt-shape", "20,64"]
    run.command(argv)
    stamps = {
        int(number): float(seconds)
        for number, seconds in (line.split() for line in (run.directory / "stamps").read_text().splitlines())
    }
    times = {number: stamps[number] - stamps[number - 1] for number in stamps if number - 1 in stamps}
    # Step n + 1 is recorded after the snapshot of step n. The first snapshot allocates its buffers. On a GPU,
    # a step is recorded when the next one is complete, except before a snapshot.
    after = [times[number + 1] for number in range(2 * every, steps, every) if number + 1 in times]
    others = [
        times[number] for number in times if (number - 1) % every and number % every and number > every
    ] or [times[number] for number in times if number != every + 1]
    steps_between = 2 if run.is_gpu else 1
    state_bytes = sum(file.stat().st_size for file in _newest(run.directory / "snapshots").iterdir())
    pause_s = statistics.median(after or [times[every + 1]]) - steps_between * statistics.median(others)
    values: Values = {
        "step_s": statistics.median(others),
        "pause_s": pause_s,
        "snapshot_gb": state_bytes / 1e9,
    }
    if rate := run.values.get("floor", {}).get("to_host_gb_per_s"):
        values["copy_s"] = state_bytes / 1e9 / rate
        values["pause_vs_copy_at_80_percent"] = pause_s / (values["copy_s"] / 0.8)
    return values


def _newest(directory: Path) -> Path:
    return max((path for path in directory.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)


def comm(run: Run) -> Values:
    """Measures the collectives between the GPUs of this machine, or between two ranks on its CPU."""
    import torch

    num_gpus = torch.cuda.device_count() if run.is_gpu else 0
    ranks, device = (num_gpus, "cuda") if num_gpus > 1 else (2, "cpu")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv += ["-m", "ddp_hpc", "bench", "comm", "--device", device, "--bytes", "1MiB", "--json", "comm.json"]
    run.command([*argv, "--iterations", "20" if run.is_gpu else "3"])
    document = json.loads((run.directory / "comm.json").read_text())
    rows = {row["name"]: row["median_us"] for row in document["rows"]}
    return {"ranks": ranks, "backend": document["settings"]["backend"], "median_us of 1 MiB": rows}


def trace(run: Run) -> Values:
    """Records a trace, and keeps the report about it."""
    argv = [*TRAIN, "--device", run.device, "--max-steps", "20", "--trace-dir", "traces"]
    argv += ["--trace-window", "10,2,5,1" if run.is_gpu else "2,1,2,1", "--dropout", "0"]
    argv += (
        ["--fused", "--amp", "bf16"]
        if run.is_gpu
        else ["--max-steps", "6", "--src-shape", "1,64", "--tgt-shape", "20,64"]
    )
    run.command(argv)
    report = run.command([sys.executable, "-m", "ddp_hpc", "report", "traces"])
    (run.out / "report.txt").write_text(report)
    return {"files": len(list((run.directory / "traces").glob("*.json.gz"))), "report": "report.txt"}


PARTS = [
    Part("floor", floor, 0.08),
    Part("step", step, 0.25, ("h5py",)),
    Part("decoder", decoder, 0.2, ("h5py",)),
    Part("snapshots", snapshots, 0.1, ("h5py",)),
    Part("comm", comm, 0.08),
    Part("trace", trace, 0.1, ("h5py", "msgspec")),
    # The tests come last, because they use the remaining time.
    Part("tests", tests, 1.0, ("h5py", "pytest")),
]


@dataclass
class Goal:
    """A limit for a value of a part."""

    name: str
    part: str
    value: Callable[[Values], float | None]
    limit: float
    is_minimum: bool = False

    def judge(self, run: Run) -> str:
        """Returns the value and whether it meets the goal."""
        bound = f"{'at least' if self.is_minimum else 'at most'} {self.limit:g}"
        try:
            value = self.value(run.values[self.part])
        except (KeyError, ValueError):
            value = None
        if value is None:
            return f"not measured (goal: {bound})"
        if not run.is_gpu:
            return f"{value:.3g} (goal on a GPU: {bound})"
        met = value >= self.limit if self.is_minimum else value <= self.limit
        return f"{value:.3g}, {'met' if met else 'NOT MET'} (goal: {bound})"


_FLOAT32 = ("ours", "ours, fused", "ours, CUDA graph")


def _best_float32(found: Any, ratio: str) -> float:
    return min(found[name][ratio] for name in _FLOAT32 if name in found)


GOALS = [
    Goal(
        "step in float32 / step of the lesson",
        "step",
        lambda found: _best_float32(found, "vs_lesson"),
        0.9,
    ),
    Goal("tuned step / step of the lesson", "step", lambda found: found["ours, tuned"]["vs_lesson"], 0.2),
    Goal(
        "step in float32 / its floor",
        "step",
        lambda found: _best_float32(found, "vs_floor"),
        1.5,
    ),
    Goal("tuned step / its floor", "step", lambda found: found["ours, tuned"]["vs_floor"], 1.5),
    Goal(
        "decoder: FLOP/s / rate of matrix products",
        "decoder",
        lambda found: found["share_of_matmul_rate"],
        0.55,
        is_minimum=True,
    ),
    Goal(
        "decoder: share of time waiting for data",
        "decoder",
        lambda found: found["share_waiting_for_data"],
        0.01,
    ),
    Goal(
        "snapshot: pause / copy at 80 % of the PCIe rate",
        "snapshots",
        lambda found: found["pause_vs_copy_at_80_percent"],
        1.0,
    ),
]


def goals(run: Run) -> Values:
    """Compares the results of the other parts with the goals."""
    return {goal.name: goal.judge(run) for goal in GOALS}


def measure_all(run: Run, minutes: float) -> None:
    """Runs all parts, each within its share of the time limit and all within the limit."""
    begin_s, shares = time.monotonic(), 0.0
    for part in PARTS:
        shares += part.share
        run.end_s = begin_s + min(shares, 1.0) * minutes * 60
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        start_s = time.monotonic()
        if missing:
            values: Values = {"skipped": f"{', '.join(missing)} is not installed"}
        elif run.left_s() < 5.0:
            values = {"skipped": f"the time limit of {minutes:g} minutes was used up"}
        else:
            try:
                values = part.measure(run)
            except Exception as error:  # one failed part must not lose the results of the others
                values = {"failed": f"{type(error).__name__}: {error}"}
        run.values[part.name] = values
        write_results(run)  # after each part, because the machine may be taken away
        print(f"{part.name}: {time.monotonic() - start_s:.0f} s: {json.dumps(values)}", flush=True)
    run.values["goals"] = goals(run)
    write_results(run)
    for name, result in run.values["goals"].items():
        print(f"goal: {name}: {result}")


def write_results(run: Run) -> None:
    """Writes gpu.json and gpu.md."""
    document = {"machine": _machine(run), **run.values}
    (run.out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = ["# Measurements on one GPU", "", "Written by `python -m benchmarks.gpu`.", ""]
    for name, values in document.items():
        lines += [f"## {name}", "", "| value | |", "| --- | --- |"]
        for key, value in _flat(values):
            lines.append(f"| {key} | {value:.4g} |" if isinstance(value, float) else f"| {key} | {value} |")
        lines.append("")
    (run.out / "gpu.md").write_text("\n".join(lines))


def _flat(values: Values, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}: ") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _machine(run: Run) -> Values:
    import torch

    values: Values = {"device": run.device, "python": sys.version.split()[0], "torch": torch.__version__}
    if run.is_gpu:
        properties = torch.cuda.get_device_properties(0)
        values["gpu"], values["gpu_gib"] = properties.name, properties.total_memory / 2**30
        values["num_gpus"], values["cuda"] = torch.cuda.device_count(), torch.version.cuda
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    values["cores"] = len(os.sched_getaffinity(0))
    values["load_average"] = os.getloadavg()[0]
    return values


def main() -> None:
    """Runs all parts; the exit code is 1 if one failed or a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory for the results")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    args = parser.parse_args()
    import torch

    is_gpu = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="ddp-hpc-gpu-"))
    run = Run(is_gpu, directory, args.out.resolve())
    try:
        measure_all(run, args.minutes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    problems = [name for name, values in run.values.items() if values.get("failed")]
    print(f"results: {args.out}/gpu.md" + (f"; failed: {', '.join(problems)}" if problems else ""))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
