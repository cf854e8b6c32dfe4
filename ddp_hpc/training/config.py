"""What a training run was asked to do: one frozen record, checked before anything starts. No torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ddp_hpc.errors import RequestError, nearest

# The lesson's workload: arXiv 1706.03762's Transformer on uniform random numbers.
TRANSFORMER_SHAPES = ((1, 512), (20, 512))
LINEAR_SHAPES = ((20,), (1,))
MODELS = ("transformer", "classifier", "linear", "decoder")
LR_SCALINGS = ("linear", "sqrt", "none")
LR_SCHEDULES = ("constant", "cosine")
OPTIMIZERS = ("adam", "adamw", "sgd")
STRATEGIES = ("ddp", "zero", "fsdp", "tp", "pp", "dataparallel")
AMPS = ("off", "bf16", "fp16")
MATMULS = ("highest", "high", "medium")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PIPELINE_SCHEDULES = ("gpipe", "1f1b")
# What goes with some strategies alone.
_OF_DDP = ("ddp", "zero")
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "bucket_mib": _OF_DDP,
    "static_graph": _OF_DDP,
    "find_unused_parameters": _OF_DDP,
    "compress_gradients": _OF_DDP,
    "sync_batchnorm": _OF_DDP,
    "devices_per_rank": _OF_DDP,
    "cpu_offload": ("fsdp",),
    "pipeline_chunks": ("pp",),
    "pipeline_schedule": ("pp",),
}
BACKENDS = ("auto", "nccl", "gloo", "mpi", "xccl")
MAX_WORKERS = 64
DEVICES = ("auto", "cuda", "cpu", "xpu")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `python -m ddp_hpc.train`, which documents each.

    Raises:
        RequestError: on construction, for values that contradict each other or make no sense.
    """

    data: Path | None = None
    data_dir: Path = Path("data")
    stage: Path | None = None
    check_data: bool = False
    src_key: str = "src"
    tgt_key: str = "tgt"
    num_samples: int = 2048
    src_shape: tuple[int, ...] | None = None
    tgt_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    model: str = "transformer"
    model_options: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.1
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32  # samples a rank and micro-batch
    shuffle: bool = True
    workers: int = 0  # processes a rank that read
    seed: int = 0
    lr: float = 0.001
    lr_scaling: str = "linear"
    warmup_steps: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    lr_schedule: str = "constant"
    optimizer: str = "adam"
    weight_decay: float = 0.0
    fused: bool | None = None  # None: on a GPU
    strategy: str = "ddp"
    mesh: str | None = None
    bucket_mib: float | None = None  # as DDP has it: a first one of 1 MiB, which leaves early, then of 25
    static_graph: bool = False
    find_unused_parameters: bool = False
    compress_gradients: str | None = None
    sync_batchnorm: bool = False
    devices_per_rank: int = 1
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    pipeline_chunks: int | None = None
    pipeline_schedule: str = "gpipe"
    amp: str = "off"
    matmul_precision: str = "highest"
    compile: str | None = None
    check_gradients: bool = False
    discovery: str = "auto"
    backend: str = "auto"
    device: str = "auto"
    threads: int | None = None
    init_timeout_s: float = 300.0
    timeout_s: float = 1800.0
    snapshots: bool = True
    snapshot_dir: Path | None = None
    snapshot_every_steps: int | None = None
    snapshot_every_s: float = 600.0
    keep: int = 3
    hang_timeout_s: float = 600.0
    metrics: Path | None = None
    tensorboard: Path | None = None
    metrics_hook: str | None = None
    skew_limit: float = 1.5
    trace_dir: Path | None = None
    trace_window: tuple[int, ...] = (1, 1, 2, 1)  # steps: wait, warmup, active; and rounds of them
    trace_ranks: frozenset[int] | None = None  # None: all
    trace_stacks: bool = False
    trace_flops: bool = False
    trace_max_mib: float = 1024.0
    summary: Path | None = None
    log_every: int = 10

    def __post_init__(self) -> None:
        positive = ("num_samples", "epochs", "batch_size", "accumulate", "log_every", "max_steps", "threads")
        times = ("init_timeout_s", "timeout_s", "snapshot_every_s", "hang_timeout_s")
        more = ("snapshot_every_steps", "keep", "lr", "clip_norm", "bucket_mib", "devices_per_rank")
        for name in (*positive, *more, "pipeline_chunks", "trace_max_mib", *times):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RequestError(
                    f"--{name.replace('timeout_s', 'timeout').replace('_', '-')} {value}: has to be above 0"
                )
        if self.model not in MODELS and not self.is_own_model:
            raise RequestError(
                f"--model {self.model}: unknown{nearest(self.model, MODELS)}; one of {', '.join(MODELS)}, "
                "or package.module:factory for one of your own"
            )
        if not self.skew_limit > 1:
            raise RequestError(
                f"--skew-limit {self.skew_limit}: has to be above 1, such as 1.5 times the others"
            )
        if len(self.trace_window) != 4 or min(self.trace_window[:2]) < 0 or min(self.trace_window[2:]) < 1:
            raise RequestError(
                f"--trace-window {','.join(map(str, self.trace_window))}: four numbers are needed: steps to "
                "wait, to warm up (0 or more) and to record, and rounds (1 or more), such as 1,1,2,1"
            )
        if not self.snapshots and (self.snapshot_dir or self.snapshot_every_steps):
            raise RequestError("--no-snapshots saves nothing: leave the other options of snapshots out")
        if not 0 <= self.weight_decay < inf:
            raise RequestError(f"--weight-decay {self.weight_decay}: has to be 0 or more, and finite")
        self._check_strategy()
        if not 0 <= self.dropout < 1:
            raise RequestError(f"--dropout {self.dropout}: has to be 0 or more and below 1")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed}: has to be 0 or more and below 2**63")
        if self.warmup_steps < 0:
            raise RequestError(f"--warmup-steps {self.warmup_steps}: has to be 0 or more")
        if not 0 <= self.workers <= MAX_WORKERS:
            raise RequestError(
                f"--workers {self.workers}: has to be 0 to {MAX_WORKERS}; each rank starts as many, "
                "and each takes half a gigabyte"
            )
        if self.model == "classifier" and self.data is None:
            raise RequestError(
                "--model classifier needs --data with images and labels; "
                "`python -m data_gen digits` makes such a file from scikit-learn's handwritten digits"
            )
        if self.model == "decoder" and self.data is None:
            raise RequestError(
                "--model decoder needs --data with tokens; `python -m data_gen text` makes such a file"
            )
        if self.backend == "nccl" and self.device in ("cpu", "xpu"):
            raise RequestError(
                f"--backend nccl moves CUDA tensors only, but --device {self.device} was asked for"
            )

    def _check_strategy(self) -> None:
        if self.mesh is not None and self.strategy != "ddp":
            raise RequestError(
                f"--mesh {self.mesh} says how ranks share: leave --strategy {self.strategy} out"
            )
        dimensions = [entry.partition("=")[0].strip() for entry in (self.mesh or "").split(",")]
        used = {self.strategy} if self.mesh is None else {"mesh", *dimensions}
        for name, strategies in _ONLY_WITH.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and not used & {
                *strategies
            }:
                raise RequestError(
                    f"--{name.replace('_', '-')} goes with --strategy {' or '.join(strategies)}, "
                    f"not with {f'--mesh {self.mesh}' if self.mesh is not None else self.strategy}"
                )
        if self.static_graph and self.accumulate > 1:
            raise RequestError(
                "--static-graph goes wrong with --accumulate (DDP then leaves gradients out): give one"
            )
        if self.static_graph and self.find_unused_parameters:
            raise RequestError(
                "--static-graph finds unused parameters itself: leave --find-unused-parameters out"
            )

        if self.sync_batchnorm and self.devices_per_rank > 1:
            raise RequestError("--sync-batchnorm goes with one device a rank: leave --devices-per-rank out")
        if self.check_gradients and self.amp == "fp16":
            raise RequestError(
                "--check-gradients with --amp fp16: gradients that overflow are usual there, and their "
                "update is left out; leave --check-gradients out, or use --amp bf16"
            )

    @property
    def is_own_model(self) -> bool:
        """Whether --model names the user's own, as package.module:factory."""
        return ":" in self.model

    @property
    def synthetic_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sample of synthetic data, as asked for or as the model's default has them."""
        src, tgt = LINEAR_SHAPES if self.model == "linear" else TRANSFORMER_SHAPES
        return self.src_shape or src, self.tgt_shape or tgt

    def rank_seed(self, rank: int) -> int:
        """Where a rank's own random numbers, such as dropout's, begin."""
        return (self.seed * 1_000_003 + rank + 1) % 2**63

    def scaled_lr(self, num_ranks: int) -> float:
        """The learning rate for this many ranks: arXiv 1706.02677 scales it with the global batch."""
        factor: float = {"linear": float(num_ranks), "sqrt": float(num_ranks**0.5), "none": 1.0}[
            self.lr_scaling
        ]
        return self.lr * factor


def parse_option(text: str) -> tuple[str, Any]:
    """`layers=6` as a name and a value: a Python literal, else the text.

    Raises:
        RequestError: there is no name.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise RequestError(f"--model-option {text}: NAME=VALUE is needed, such as layers=6")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,1,2,1` as numbers.

    Raises:
        RequestError: one of them is no whole number.
    """
    if not all(word.strip().isascii() and word.strip().isdigit() for word in text.split(",")):
        raise RequestError(f"{option} {text}: whole numbers with commas between them are needed, such as 0,7")
    return tuple(int(word[:18]) for word in text.split(","))
