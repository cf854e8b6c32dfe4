"""Configuration of a training run, composed of the configurations of its components.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import check_values, from_options, option, to_options
from ddp_hpc.training.health.config import HealthConfig
from ddp_hpc.training.input.config import DataConfig
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.process_group.config import ProcessGroupConfig
from ddp_hpc.training.snapshots.config import SnapshotConfig
from ddp_hpc.training.tasks.config import ModelConfig
from ddp_hpc.training.telemetry.config import TelemetryConfig

# Shapes of one sample of src and tgt in the synthetic data, for --model transformer and --model linear.
TRANSFORMER_SHAPES = ((1, 512), (20, 512))
LINEAR_SHAPES = ((20,), (1,))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `python -m ddp_hpc.train`.

    Raises:
        RequestError: options of different components contradict each other.
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    epochs: int = option(10, "Number of epochs to train.", above=0)
    max_steps: int | None = option(
        None, "Stop the training after N steps, even if epochs remain.", above=0, metavar="N"
    )
    seed: int = option(
        0,
        "Random seed for synthetic data, initial parameters, the order of the samples, and dropout.",
        at_least=0,
        below=2**63,
    )
    optimization: OptimizationConfig = OptimizationConfig()
    parallel: ParallelConfig = ParallelConfig()
    process_group: ProcessGroupConfig = ProcessGroupConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    health: HealthConfig = HealthConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def __post_init__(self) -> None:
        check_values(self)
        needed = {
            "classifier": "images and labels; `python -m data_gen digits` makes such a file from "
            "scikit-learn's handwritten digits",
            "decoder": "tokens; `python -m data_gen text` makes such a file",
        }
        if self.data.path is None and (text := needed.get(self.model.name)):
            raise RequestError(f"--model {self.model.name} needs --data with {text}")
        check_combinations(self.parallel, self.optimization)

    @classmethod
    def of(cls, **options: Any) -> TrainConfig:
        """Returns the configuration for the given options, which are named as on the command line.

        Raises:
            RequestError: values contradict each other, or one is out of range.
        """
        return from_options(cls, options)

    def changed(self, **options: Any) -> TrainConfig:
        """Returns a copy of this configuration in which the given options are replaced."""
        return from_options(type(self), {**to_options(self), **options})

    def global_batch(self, data_size: int) -> int:
        """Returns the number of samples of each step on `data_size` data-parallel ranks.

        Raises:
            RequestError: gradients would be accumulated, which another option does not allow.
        """
        at_once, given = self.data.batch_size * data_size, self.optimization.global_batch
        if given is None:
            return at_once * self.optimization.accumulate
        try:
            self.changed(global_batch=None, accumulate=-(-given // at_once))
        except RequestError as error:
            raise RequestError(
                f"--global-batch {given} needs gradient accumulation with --batch-size "
                f"{self.data.batch_size} on {data_size} ranks, but {error}"
            ) from None
        return given

    @property
    def synthetic_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sample of synthetic data: those requested, or the defaults of the model."""
        src, tgt = LINEAR_SHAPES if self.model.name == "linear" else TRANSFORMER_SHAPES
        return self.data.src_shape or src, self.data.tgt_shape or tgt

    def rank_seed(self, rank: int) -> int:
        """Returns the seed for the random number generators of one rank, which for example dropout uses."""
        return (self.seed * 1_000_003 + rank + 1) % 2**63


def against_cuda_graph(parallel: ParallelConfig) -> str:
    """Returns the option with which a step cannot be captured, and why; empty if there is none."""
    against = {
        f"--mesh {parallel.mesh}: only steps of --strategy ddp can be captured": parallel.mesh is not None,
        f"--strategy {parallel.strategy}: only steps of --strategy ddp can be captured": (
            parallel.strategy != "ddp"
        ),
        "--devices-per-rank: a step on several devices cannot be captured": parallel.devices_per_rank > 1,
        "--find-unused-parameters: DDP would read on the host which parameters were used": (
            parallel.find_unused_parameters
        ),
        "--compress-gradients: DDP would convert the gradients in a callback on another stream": (
            parallel.compress_gradients is not None
        ),
        "--activation-checkpointing: a capture cannot read the state of the random number generator": (
            parallel.activation_checkpointing
        ),
    }
    return next((text for text, is_used in against.items() if is_used), "")


def check_combinations(parallel: ParallelConfig, optimization: OptimizationConfig) -> None:
    """Raises RequestError if an option of the strategy cannot be combined with one of the optimization."""
    if parallel.static_graph and optimization.accumulate > 1:
        raise RequestError(
            "--static-graph cannot be used with --accumulate: DDP would omit gradients. Remove one of them."
        )
    if optimization.cuda_graph and (reason := against_cuda_graph(parallel)):
        raise RequestError(f"--cuda-graph cannot be used with {reason}. Remove one of them.")
    if optimization.compile is None:
        return
    if parallel.bucket_mib is not None and parallel.bucket_mib < 1:
        raise RequestError(
            f"--bucket-mib {parallel.bucket_mib:g} cannot be used with --compile: torch splits compiled code "
            "at buckets of at least 1 MiB. Use a larger --bucket-mib, or remove one of them."
        )
    if parallel.devices_per_rank > 1:
        raise RequestError(
            f"--devices-per-rank {parallel.devices_per_rank} cannot be used with --compile: a model that is "
            "split over devices is not compiled. Remove one of them."
        )
    if parallel.strategy == "dataparallel":
        raise RequestError(
            "--strategy dataparallel cannot be used with --compile: every replica would compute with the "
            "parameters of the first device. Remove one of them, or use --strategy ddp."
        )
