"""The options of the optimizer, the precision and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import check_values, option

LrScaling = Literal["linear", "sqrt", "none"]
LrSchedule = Literal["constant", "cosine"]
OptimizerName = Literal["adam", "adamw", "sgd"]
Amp = Literal["off", "bf16", "fp16"]
MatmulPrecision = Literal["highest", "high", "medium"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """The options of the parameter update and of its precision.

    Raises:
        RequestError: values contradict each other, or one is out of range.
    """

    lr: float = option(
        0.001,
        "Learning rate for one rank; --lr-scaling adapts it to the number of ranks.",
        above=0,
        changes_losses=True,
    )
    lr_scaling: LrScaling = option(
        "linear", "How to scale the learning rate with the number of ranks.", changes_losses=True
    )
    warmup_steps: int = option(
        0,
        "Number of warm-up steps, during which the learning rate increases linearly to its full value.",
        at_least=0,
        changes_losses=True,
    )
    accumulate: int = option(
        1, "Number of micro-batches whose gradients are accumulated in each step.", above=0
    )
    global_batch: int | None = option(
        None,
        "Number of samples of each step, on any number of ranks. If it is more than --batch-size on each "
        "rank, gradients are accumulated.",
        above=0,
        metavar="N",
        shown_default="--batch-size times --accumulate times the data-parallel ranks",
    )
    clip_norm: float | None = option(
        None, "Clip the total norm of the gradients to this value.", above=0, changes_losses=True
    )
    lr_schedule: LrSchedule = option(
        "constant", "Learning-rate schedule after the warm-up steps.", changes_losses=True
    )
    optimizer: OptimizerName = option(
        "adam", "Optimizer that updates the parameters; sgd uses a momentum of 0.9.", changes_losses=True
    )
    weight_decay: float = option(
        0.0,
        "Weight decay of weight matrices; it does not apply to biases and normalization layers.",
        at_least=0,
        changes_losses=True,
    )
    fused: bool | None = option(
        None, "Use the fused implementation of the optimizer.", shown_default="on a GPU"
    )
    amp: Amp = option("off", "Data type of mixed-precision training with torch.amp.", changes_losses=True)
    matmul_precision: MatmulPrecision | None = option(
        None,
        "Precision of float32 matrix products on a GPU: high uses TF32, medium uses bfloat16.",
        shown_default="torch's defaults",
        changes_losses=True,
    )
    compile: CompileMode | None = option(
        None, "Compile the model with torch.compile in this mode.", bare_value="default"
    )
    cuda_graph: bool = option(
        False,
        "Run each step as one CUDA graph, which the host starts with one call; needs a GPU and "
        "--strategy ddp.",
    )
    tuned: bool = option(
        False,
        "On GPUs, also use the options that make steps fast, where they are possible: --amp bf16, "
        "--matmul-precision high and --cuda-graph. The log says which.",
    )
    check_gradients: bool = option(
        False,
        "If gradients are not finite, stop with an error before they are applied, and report the layer and "
        "the rank.",
    )
    allow_non_finite_loss: bool = option(
        False, "Continue the training when the loss is NaN or infinite, as long as all parameters are finite."
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.check_gradients and self.amp == "fp16":
            raise RequestError(
                "--check-gradients cannot be used with --amp fp16: fp16 gradients often overflow, "
                "and torch then skips the update. Remove --check-gradients, or use --amp bf16."
            )
        if self.uses_cuda_graphs and self.accumulate > 1:
            # https://github.com/pytorch/pytorch/issues/169545
            raise RequestError(
                f"--compile {self.compile} cannot be used with --accumulate: torch cannot accumulate "
                "gradients in the memory of its CUDA graphs. Use --compile without a mode, or --cuda-graph."
            )
        if self.global_batch is not None and self.accumulate > 1:
            raise RequestError(
                "--global-batch already determines the micro-batches per step. Remove --accumulate."
            )
        if self.cuda_graph and (reason := self.against_cuda_graph()):
            raise RequestError(f"--cuda-graph cannot be used with {reason}.")

    @property
    def half_dtype(self) -> str | None:
        """The data type of the matrix products, bf16 or fp16; None if it is the data type of the samples."""
        return None if self.amp == "off" else self.amp

    def against_cuda_graph(self) -> str:
        """Returns an option with which a step cannot be captured, and why; empty if there is none."""
        against = {
            f"--compile {self.compile}, which creates its own CUDA graphs. Use --compile without a mode": (
                self.uses_cuda_graphs
            ),
            "--optimizer sgd, which torch cannot capture. Use --optimizer adamw": self.optimizer == "sgd",
            "--no-fused. Remove --no-fused": self.fused is False,
            "--amp fp16, whose loss scale changes on the host. Use --amp bf16": self.amp == "fp16",
            "--check-gradients, which reads a value in each step. Remove one of them": self.check_gradients,
        }
        return next((text for text, is_used in against.items() if is_used), "")

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether compiled code is replayed as CUDA graphs, which use the same memory each time."""
        return self.compile in ("reduce-overhead", "max-autotune")

    def scaled_lr(self, num_ranks: int) -> float:
        """Returns the learning rate, scaled with the global batch of these ranks as in arXiv 1706.02677."""
        factor: float = {"linear": float(num_ranks), "sqrt": float(num_ranks**0.5), "none": 1.0}[
            self.lr_scaling
        ]
        return self.lr * factor
