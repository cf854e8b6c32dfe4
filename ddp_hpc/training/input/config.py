"""Options of the input pipeline: data file, synthetic data, batch size, shuffling, workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_gen.recipe import parse_shape
from ddp_hpc.base.option_names import OptionError
from ddp_hpc.base.options import Conversion, check_values, option, show_numbers

MAX_WORKERS = 64
DType = Literal["float32", "float64", "float16", "bfloat16"]


_SHAPE: Conversion = {
    "read": lambda _, text: parse_shape(text),
    "show": show_numbers,
    "metavar": "D1,D2,...",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The options that select the samples, the way in which they are read, and their order.

    Raises:
        RequestError: a value is out of range.
    """

    path: Path | None = option(
        None,
        "Data file to train on (.h5, .pt or .safetensors). By default, the training uses synthetic data.",
        flag="--data",
        changes_losses=True,
    )
    data_dir: Path = option(
        Path("data"),
        "Directory in which the file with the synthetic data is created; later runs reuse the file.",
    )
    src_key: str = option(
        "src", "Name of the array in the data file that contains the inputs.", changes_losses=True
    )
    tgt_key: str = option(
        "tgt", "Name of the array in the data file that contains the targets.", changes_losses=True
    )
    num_samples: int = option(2048, "Number of samples in the synthetic data.", above=0)
    src_shape: tuple[int, ...] | None = option(
        None, "Shape of one input in the synthetic data.", shown_default="1,512; linear: 20", **_SHAPE
    )
    tgt_shape: tuple[int, ...] | None = option(
        None, "Shape of one target in the synthetic data.", shown_default="20,512; linear: 1", **_SHAPE
    )
    dtype: DType | None = option(
        None,
        "Data type of the samples. With float64, the model is trained in float64 too.",
        shown_default="float32",
    )
    batch_size: int = option(32, "Number of samples per rank and micro-batch.", above=0)
    shuffle: bool = option(True, "Shuffle the samples in each epoch.")
    workers: int = option(
        0,
        "Number of processes per rank that read data, useful for compressed files. With 0, a "
        "thread reads the data.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if not 0 <= self.workers <= MAX_WORKERS:
            remedy = "Each rank starts that many processes, and each process uses half a gigabyte"
            raise OptionError("workers", self.workers, f"must be from 0 to {MAX_WORKERS}", remedy)
