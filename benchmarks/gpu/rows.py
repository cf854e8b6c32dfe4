"""The rows of `python -m benchmarks.gpu`: what each one measures, in the order of their value.

Each row runs in a process of its own, so that neither an error of CUDA nor a changed setting affects another
row. A row reports its values as soon as they are known.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.floor import floor_s, rates
from benchmarks.step import lesson

Values = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
BATCH_SIZE = 32


@dataclass(frozen=True)
class Context:
    """What a row gets. Its working directory is empty and belongs to it alone."""

    device: str
    """cuda, cpu, or auto in the first row."""
    out: Path
    """The directory of the results."""
    shared: Path
    """A temporary directory of all rows."""
    found: dict[str, Values]
    """The values of earlier rows."""
    report: Callable[..., None]
    """Stores values of the row, which are keyword arguments."""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def width(self) -> int:
        """The embedding of the lesson's model."""
        return 512 if self.is_gpu else 64

    def pick(self, on_gpu: Any, on_cpu: Any) -> Any:
        return on_gpu if self.is_gpu else on_cpu


@dataclass(frozen=True)
class Row:
    """One row: `measure` reports values, which are combined."""

    name: str
    measure: Callable[[Context], None]
    limit_s: float = 45.0
    packages: tuple[str, ...] = ("h5py",)
    """The packages without which the row is skipped."""
    num_gpus: int = 0
    """The number of GPUs that the row needs."""


def machine(context: Context) -> None:
    """Describes the machine, and creates the first CUDA context."""
    import torch

    report = context.report
    report(python=platform.python_version(), torch=torch.__version__, cores=len(os.sched_getaffinity(0)))
    report(date=time.strftime("%F %H:%M"), load_average=os.getloadavg()[0])
    report(**{name: _version(name) for name in ("triton", "msgspec", "h5py", "mpi4py")})
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "none")
    report(c_compiler=compiler, python_h=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists())
    problem = "--device cpu"
    if context.device != "cpu":
        try:
            torch.cuda.init()
            problem = ""
        except (RuntimeError, AssertionError) as error:
            problem = str(error).strip().splitlines()[-1]
    report(device="cpu" if problem else "cuda", num_gpus=0, why_no_gpu=problem)
    if problem:
        return
    gpu = torch.cuda.get_device_properties(0)
    report(num_gpus=torch.cuda.device_count(), gpu=gpu.name, gpu_gib=gpu.total_memory / 2**30)
    report(cuda=torch.version.cuda, compute_capability=f"{gpu.major}.{gpu.minor}")
    report(nccl=".".join(map(str, torch.cuda.nccl.version())))
    if smi := shutil.which("nvidia-smi"):
        argv = [
            smi,
            "--query-gpu=driver_version,compute_mode,mig.mode.current,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20.0)
        report(driver_modes_clock_and_power=(done.stdout or done.stderr).strip())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


_STAMPS: list[tuple[float, float]] = []


def stamp(record: Values) -> None:
    """The function of `--metrics-hook`: stores when the loss of a step was known, and the loss."""
    _STAMPS.append((time.perf_counter(), record["loss"]))


def train(context: Context, *options: object) -> Values:
    """Trains in this process, and returns the summary. A failure ends the process with one line."""
    from ddp_hpc.train import command

    argv = ["--device", context.device, "--dropout", "0", "--summary", "summary.json"]
    command.main(args=[*argv, *map(str, options)], standalone_mode=False)
    summary: Values = json.loads(Path("summary.json").read_text())
    return summary


def _samples(context: Context) -> list[object]:
    """Returns the options for the data of the lesson's model: 50 steps per epoch on a GPU, otherwise one."""
    from data_gen import Recipe, generate

    path, width = context.shared / "lesson.h5", context.width
    if not path.exists():
        num_samples = context.pick(50, 1) * BATCH_SIZE
        generate(Recipe(num_samples=num_samples, src_shape=(1, width), tgt_shape=(20, width)), path)
    return ["--data", path, "--batch-size", BATCH_SIZE]


def loop(context: Context, options: list[str] | None) -> None:
    """Trains the lesson's model: with the loop of a tutorial, or with ours and these options."""
    window, num_windows, num_warm = context.pick((50, 12, 2), (1, 5, 1))
    data = _samples(context)
    begin_s = time.perf_counter()
    if options is None:
        lesson(context.shared / "lesson.h5", context.device, stamp, num_windows)
    else:
        words = [*data, "--epochs", num_windows, "--log-every", window, *options]
        train(context, *words, "--metrics-hook", "benchmarks.gpu.rows:stamp")
    context.report(first_step_after_s=_STAMPS[0][0] - begin_s)
    ends_s = [at_s for at_s, _ in _STAMPS[window - 1 :: window]]
    times_s = [(end_s - start_s) / window for start_s, end_s in pairwise(ends_s)][num_warm - 1 :]
    step_s = statistics.median(times_s)
    context.report(step_s=step_s, min_s=min(times_s), max_s=max(times_s))
    if context.is_gpu:
        import torch

        context.report(peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    losses = [loss for _, loss in _STAMPS[:20]]
    context.report(losses=losses)
    base = context.found[LESSON]
    if "losses" in base:
        off_by = max(abs(own - its) / abs(its) for own, its in zip(losses, base["losses"], strict=True))
        context.report(vs_lesson=step_s / base["step_s"], loss_off_by=off_by)
    is_half = options is not None and "--tuned" in options
    if shortest_s := floor_s(context.width, context.found["rates"], is_half=is_half):
        context.report(vs_floor=step_s / shortest_s)


def decoder(context: Context, options: list[str]) -> None:
    """Trains a decoder, measures its waits for data, and compares its FLOP/s with the rates of products."""
    layers, width, length, batch = context.pick((12, 1024, 1024, 16), (1, 64, 32, 4))
    num_steps = context.pick(100, 4)
    path = context.shared / "tokens.h5"
    _write_tokens(path, num_samples=num_steps * batch, length=length)
    argv = ["--model", "decoder", "--data", path, "--epochs", 1, "--batch-size", batch]
    argv += ["--log-every", num_steps // 2, "--metrics", "metrics.jsonl"]
    for name, value in {"layers": layers, "width": width, "heads": max(width // 64, 1)}.items():
        argv += ["--model-option", f"{name}={value}"]
    summary = train(context, *argv, *options)
    records = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    waits_s, steps_s = ([one[key] for one in records[len(records) // 2 :]] for key in ("data_s", "step_s"))
    step_s = statistics.median(steps_s)  # the rates in the summary include the capture of a CUDA graph
    context.report(step_s=step_s, tokens_per_s=batch * length / step_s)
    context.report(share_waiting_for_data=sum(waits_s) / sum(steps_s))
    context.report(
        parameters=summary["model"]["parameters"], peak_gib=summary["memory"]["peak_bytes"] / 2**30
    )
    if flops_per_s := summary["flops_per_s"]:
        tflops_per_s = flops_per_s / summary["samples_per_s"] * batch / step_s / 1e12
        context.report(tflops_per_s=tflops_per_s)
        name = context.pick("bf16_tflops_per_s", "float32_tflops_per_s")
        if rate := context.found["rates"].get(name):
            context.report(share_of_matmul_rate=tflops_per_s / rate)


def _write_tokens(path: Path, *, num_samples: int, length: int) -> None:
    import h5py
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, (num_samples, length + 1), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file["src"], file["tgt"] = tokens[:, :-1], tokens[:, 1:]
        file.attrs["num_classes"] = 256


def snapshots(context: Context) -> None:
    """Compares the pause of the training during a snapshot with the time to copy its bytes to the host.

    A save waits until the previous one has been written, so the saves are far apart, and the files are in
    memory if there is room. The first save, which allocates the buffers, does not count.
    """
    every, num_saves = context.pick((500, 6), (3, 3))
    parent, shm = Path(), Path("/dev/shm")
    if context.is_gpu and shm.is_dir() and shutil.disk_usage(shm).free > 4 * 2**30:
        parent = Path(tempfile.mkdtemp(prefix="ddp-hpc-gpu-", dir=shm))
    num_steps = every * num_saves + 2
    argv = [*_samples(context), "--epochs", num_steps, "--max-steps", num_steps, "--log-every", 1]
    argv += ["--metrics-hook", "benchmarks.gpu.rows:stamp", "--snapshot-dir", parent / "snapshots"]
    try:
        train(context, *argv, "--snapshot-every-steps", every, "--snapshot-every-s", "1e6")
        [*_, newest] = sorted((parent / "snapshots").glob("step*"))
        state_gb = sum(file.stat().st_size for file in newest.iterdir()) / 1e9
    finally:
        shutil.rmtree(parent / "snapshots", ignore_errors=True)
        if parent.is_absolute():
            shutil.rmtree(parent, ignore_errors=True)
    # times_s[n] is the time between the records of steps n and n + 1. Step n + 1 is recorded after the
    # snapshot of step n. On a GPU, a step is recorded when the next one is complete, except before a
    # snapshot.
    times_s = dict(enumerate((end_s - start_s for (start_s, _), (end_s, _) in pairwise(_STAMPS)), start=1))
    step_s = statistics.median(taken_s for number, taken_s in times_s.items() if number % every)
    extra_s = context.pick(2, 1) * step_s
    pauses_s = [times_s[number] - extra_s for number in range(2 * every, num_steps, every)]
    pause_s = statistics.median(pauses_s)
    context.report(pause_s=pause_s, shortest_pause_s=min(pauses_s), longest_pause_s=max(pauses_s))
    context.report(saves=len(pauses_s), steps_between=every, step_s=step_s, snapshot_gb=state_gb)
    context.report(files_in_memory=parent.is_absolute())
    if rate := context.found["rates"].get("to_host_gb_per_s"):
        context.report(copy_s=state_gb / rate, vs_copy_at_80_percent=pause_s / (state_gb / rate / 0.8))


def trace(context: Context) -> None:
    """Records a trace and keeps it; also writes the report about it if msgspec is installed."""
    directory = context.out / "traces"
    argv = ["--trace-dir", directory, "--trace-window", context.pick("10,2,5,1", "2,1,2,1"), "--epochs", 20]
    train(context, *_samples(context), *argv, "--max-steps", context.pick(20, 6))
    files = list(directory.glob("*.json.gz"))
    context.report(files=len(files), mib=sum(path.stat().st_size for path in files) / 2**20)
    if _version("msgspec") == "not installed":
        context.report(report="msgspec is not installed; `ddp-hpc report traces` works on another machine")
        return
    with (context.out / "report.txt").open("w") as file:
        subprocess.run([sys.executable, "-m", "ddp_hpc", "report", str(directory)], stdout=file, check=True)
    context.report(report="report.txt")


def comm(context: Context) -> None:
    """Measures the collectives between the GPUs of this machine, or between two ranks on its CPU."""
    num_ranks = context.pick(context.found["machine"]["num_gpus"], 2)
    if num_ranks < 2:
        context.report(skipped="needs 2 GPUs")
        return
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    argv += ["-m", "ddp_hpc", "bench", "comm", "--device", context.device, "--bytes", "1MiB"]
    subprocess.run([*argv, "--json", "comm.json", "--iterations", context.pick("20", "3")], check=True)
    document = json.loads(Path("comm.json").read_text())
    context.report(ranks=num_ranks, backend=document["settings"]["backend"])
    context.report(**{f"{row['name']}_us": row["median_us"] for row in document["rows"]})


def tests(context: Context, name: str) -> None:
    """Runs a file of GPU tests, and counts and lists them as they end."""
    from benchmarks.gpu.run_tests import run_tests

    run_tests(ROOT / "tests" / "gpu" / f"test_{name}.py", context.report)


LESSON = "loop: lesson"
_NCCL = ["--single-rank-group"]
_GRAPH = ["--cuda-graph"]


def _loop(name: str, options: list[str] | None, limit_s: float = 45.0, num_gpus: int = 1) -> Row:
    return Row(f"loop: {name}", partial(loop, options=options), limit_s, num_gpus=num_gpus)


def _tests(name: str, limit_s: float, num_gpus: int = 1) -> Row:
    return Row(f"tests: {name}", partial(tests, name=name), limit_s, ("h5py", "pytest"), num_gpus)


ROWS = [
    Row("machine", machine, 60.0, ()),
    Row("rates", lambda context: rates(context.device, context.report), 60.0, ()),
    _tests("gpu", 60.0, num_gpus=0),
    _loop("lesson", None, num_gpus=0),
    _loop("ours", ["--no-fused"], num_gpus=0),
    _loop("ours, fused", ["--fused"], num_gpus=0),
    _loop("ours, CUDA graph", _GRAPH),
    _loop("ours, tuned", ["--tuned"]),
    _loop("ours, fused, DDP over NCCL", ["--fused", *_NCCL]),
    _loop("ours, CUDA graph, DDP over NCCL", [*_GRAPH, *_NCCL]),
    Row("snapshots", snapshots, 75.0),
    _tests("strategies", 90.0),
    _tests("whole_steps", 75.0),
    _loop("ours, tuned, compiled", ["--tuned", "--compile"], 150.0),
    Row("decoder", partial(decoder, options=["--tuned"]), 60.0),
    Row("decoder, compiled", partial(decoder, options=["--tuned", "--compile"]), 120.0, num_gpus=1),
    Row("trace", trace),
    _loop("ours, fsdp over NCCL", ["--strategy", "fsdp", *_NCCL]),
    _loop("ours, zero over NCCL", ["--strategy", "zero", *_NCCL]),
    _tests("loader", 30.0),
    _tests("decoder_steps", 90.0),
    _tests("library", 40.0),
    Row("comm", comm, 60.0, ()),
    _tests("comm", 30.0),
    _tests("compiled_steps", 540.0),
]


def main(argv: list[str]) -> None:
    """Measures the row argv[0] with the context in the file argv[1]; appends the values to values.jsonl."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a kill must not lose lines
    known = json.loads(Path(argv[1]).read_text())
    row = next(row for row in ROWS if row.name == argv[0])
    with Path("values.jsonl").open("a", buffering=1) as file:

        def report(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")

        paths = (Path(known[name]) for name in ("out", "shared"))
        row.measure(Context(known["device"], *paths, known["found"], report))
    sys.exit(0)
