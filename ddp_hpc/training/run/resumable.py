"""Whether a run can resume from a snapshot, and what has changed since it was written.

The description of a snapshot contains everything about the run except its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import DataError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.options import options_of, to_options
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.process_group.versions import versions

_MAX_NUMBER = 2**63


@dataclass(frozen=True)
class Losses:
    """The run's first and last loss, over all its attempts."""

    first: float = float("nan")
    last: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What this attempt would write into a snapshot, for comparison with what a snapshot contains.

    `num_samples` is None if the run does not count samples. `layout` is how the ranks divide the samples of
    a step, and `data_size` the number of data-parallel ranks.
    """

    config: TrainConfig
    world_size: int
    data_size: int
    layout: str
    num_samples: int | None

    @property
    def global_batch(self) -> int:
        """The number of samples of a step."""
        return self.config.global_batch(self.data_size)

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of samples."""
        data = self.config.data
        return {"num_samples": self.num_samples, "seed": self.config.seed, "shuffle": data.shuffle}

    def as_dict(self, position: Position, losses: Losses, optimizer: str, lr_ranks: int) -> dict[str, Any]:
        """Returns the description that is stored in a snapshot.

        `optimizer` has the names of the optimizers, and `lr_ranks` is the number of ranks for --lr-scaling.
        """
        return {
            "position": asdict(position),
            "losses": asdict(losses),
            "model": self.config.model.name,
            "world_size": self.world_size,
            "layout": self.layout,
            "optimizer": optimizer,
            "global_batch": self.global_batch,
            "lr_ranks": lr_ranks,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config": _as_json(self.config),
            "versions": versions(),
            **self.order,
        }

    def check(self, about: Mapping[str, Any], path: Path, optimizer: str) -> None:
        """Raises an exception unless this run can resume from the snapshot with the description `about`.

        Raises:
            DataError: the snapshot belongs to another run.
            KeyError: the description lacks an entry.
            TypeError: an entry has another type.
        """
        _check_form(about)
        had_samples = about["num_samples"] is not None
        if had_samples != (self.num_samples is not None):
            raise DataError(
                f"{path} was made {'with' if had_samples else 'without'} a loader. Call "
                f"ddp_hpc.snapshots() {'with' if had_samples else 'without'} loader=, or use another "
                f"{named('snapshot_dir')}"
            )
        for name, value in self.order.items():
            if (theirs := about[name]) != value:
                raise DataError(
                    f"{path} was made with {name}={theirs}, not {value}, so the "
                    "order of samples would differ. Use the same data and options, or another "
                    f"{named('snapshot_dir')}"
                )
        theirs = about["optimizer"]
        # Adam and AdamW store the same tensors.
        if theirs != optimizer and {theirs, optimizer} != {"Adam", "AdamW"}:
            raise DataError(
                f"{path} was made with the optimizer {theirs}, not {optimizer}, whose state differs. "
                f"Use the same {named('optimizer')}, or another {named('snapshot_dir')}"
            )

    def changes(self, about: Mapping[str, Any], *, is_exact: bool) -> Iterator[str]:
        """Yields one line for each difference to the snapshot that the user should know.

        `is_exact` is whether random numbers continue exactly as in the snapshot.
        """
        if about["world_size"] != self.world_size:
            yield f"the number of ranks changed from {about['world_size']} to {self.world_size}"
        elif not is_exact:
            yield "the parallel strategy or the kind of device changed: random numbers will differ"
        if self.num_samples is not None and about["global_batch"] != self.global_batch:
            yield (
                f"the global batch changed from {about['global_batch']} to {self.global_batch} "
                f"samples ({named('batch_size')} is per rank; --global-batch keeps it); the step count "
                "continues, and no sample of the epoch is used twice"
            )
        now, before = _as_json(self.config), about["config"]
        # Options that affect the order of samples are not here: a change of them is rejected.
        options = [option.name for option in options_of(TrainConfig) if "changes_losses" in option.declared]
        others = [
            f"{name} {now[name]} (was {before[name]})"
            for name in options
            if name in before and now[name] != before[name]
        ]
        if others:
            yield f"changed options: {', '.join(others)}"


def _check_form(about: Mapping[str, Any]) -> None:
    """Raises KeyError or TypeError unless a description has all entries with their types."""
    if not isinstance(about["config"], dict):
        raise TypeError
    for name in ("layout", "num_samples"):
        about[name]
    _check_whole_numbers(asdict(Position(**about["position"])), at_least=0)
    if not all(type(loss) is float for loss in asdict(Losses(**about["losses"])).values()):
        raise TypeError
    _check_whole_numbers(
        {name: about[name] for name in ("world_size", "global_batch", "lr_ranks")}, at_least=1
    )


def _check_whole_numbers(numbers: Mapping[str, Any], at_least: int) -> None:
    for value in numbers.values():
        if type(value) is not int or not at_least <= value < _MAX_NUMBER:
            raise TypeError


def _as_json(config: TrainConfig) -> dict[str, Any]:
    values = to_options(config).items()
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in values}
