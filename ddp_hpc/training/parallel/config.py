"""The options of the parallelization strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import OptionError, named
from ddp_hpc.base.options import check_values, option, options_of

StrategyName = Literal["ddp", "zero", "fsdp", "tp", "pp", "dataparallel"]
PipelineSchedule = Literal["gpipe", "1f1b"]
HalfType = Literal["bf16", "fp16"]

_DDP = ("ddp", "zero")
# Options that only some strategies support.
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "bucket_mib": _DDP,
    "static_graph": _DDP,
    "find_unused_parameters": _DDP,
    "compress_gradients": _DDP,
    "sync_batchnorm": _DDP,
    "devices_per_rank": _DDP,
    "cpu_offload": ("fsdp",),
    "pipeline_chunks": ("pp",),
    "pipeline_schedule": ("pp",),
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The strategy that distributes the training over ranks, and its options.

    Raises:
        RequestError: values contradict each other, or one is out of range.
    """

    strategy: StrategyName = option(
        "ddp", "Parallelization strategy; see docs/explanation/parallel-strategies.md."
    )
    mesh: str | None = option(
        None,
        "Device mesh, to be used instead of --strategy: the number of ranks in each of the dimensions pp, "
        "dp, fsdp and tp.",
        metavar="dp=2,tp=2",
    )
    bucket_mib: float | None = option(
        None,
        "DDP: size of each bucket of gradients, which are reduced together.",
        above=0,
        metavar="MIB",
        shown_default="25, and 1 for the first",
    )
    static_graph: bool = option(
        False, "DDP: assume that every step uses the same set of parameters (static_graph)."
    )
    find_unused_parameters: bool = option(
        False, "DDP: allow steps that do not use all parameters (find_unused_parameters)."
    )
    compress_gradients: HalfType | None = option(
        None, "DDP: convert the gradients to this data type for communication.", changes_losses=True
    )
    sync_batchnorm: bool = option(
        False, "DDP on GPUs: synchronize the statistics of batch normalization over all ranks."
    )
    devices_per_rank: int = option(
        1, "DDP: number of devices over which each rank splits its replica of the model.", above=0
    )
    cpu_offload: bool = option(False, "FSDP on GPUs: keep parameters in host memory while they are not used.")
    activation_checkpointing: bool = option(
        False, "Recompute activations in the backward pass instead of keeping them in memory."
    )
    pipeline_chunks: int | None = option(
        None,
        "Pipeline parallelism: number of micro-batches into which each batch is split.",
        above=0,
        shown_default="2 per stage",
    )
    pipeline_schedule: PipelineSchedule = option(
        "gpipe", "Pipeline parallelism: schedule of the micro-batches."
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.mesh is not None and self.strategy != "ddp":
            remedy = f"Remove {named('strategy')} {self.strategy}."
            raise OptionError("mesh", self.mesh, "already defines the parallelization", remedy)
        used = {self.strategy} if self.mesh is None else {"mesh", *self.mesh_dimensions}
        given = self.strategy if self.mesh is None else f"{named('mesh')} {self.mesh}"
        defaults = {option.name: option.declared["default"] for option in options_of(type(self))}
        for name, strategies in _ONLY_WITH.items():
            if getattr(self, name) != defaults[name] and not used & {*strategies}:
                works_with = f"{named('strategy')} {' or '.join(strategies)}"
                raise RequestError(f"{named(name)} works with {works_with}, not with {given}")
        if self.strategy == "dataparallel" and self.activation_checkpointing:
            raise RequestError(
                "--strategy dataparallel cannot be used with --activation-checkpointing: every replica would "
                "compute with the parameters of the first device. Remove one of them, or use --strategy ddp."
            )
        if self.static_graph and self.find_unused_parameters:
            remedy = f"Remove {named('find_unused_parameters')}."
            raise RequestError(f"{named('static_graph')} already handles unused parameters. {remedy}")
        if self.sync_batchnorm and self.devices_per_rank > 1:
            raise RequestError("--sync-batchnorm needs one device per rank. Remove --devices-per-rank.")

    @property
    def mesh_dimensions(self) -> list[str]:
        """The names of the dimensions in --mesh."""
        return [entry.partition("=")[0].strip() for entry in (self.mesh or "").split(",")]
