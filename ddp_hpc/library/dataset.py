"""`ddp_hpc.dataset`: a data file as a torch Dataset, for the DataLoader of any framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from ddp_hpc.base.data_file_layout import SRC, TGT
from ddp_hpc.base.errors import RequestError
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.input.batch_loader import as_tensor

Item = tuple[Tensor, Tensor] | dict[str, Tensor]


class FileDataset(Dataset[Any]):
    """The samples of a data file. Created by `ddp_hpc.dataset`.

    A DataLoader reads each batch with one call. Every process that reads opens the file itself, so that the
    object can be sent to workers.
    """

    def __init__(self, samples: Samples, names: tuple[str, str] | None) -> None:
        self.samples = samples
        self.names = names

    def __len__(self) -> int:
        return self.samples.num_samples

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Item]:
        """Returns the samples with these numbers; torch's DataLoader calls it once per batch."""
        src, tgt = self.samples.read(np.asarray(indices, np.int64))
        pairs = zip(as_tensor(src, self.samples.src), as_tensor(tgt, self.samples.tgt), strict=True)
        if self.names is None:
            return list(pairs)
        return [dict(zip(self.names, pair, strict=True)) for pair in pairs]


def dataset(
    data: str | Path, *, names: tuple[str, str] | None = None, src_key: str = SRC, tgt_key: str = TGT
) -> FileDataset:
    """Returns the samples of a `.h5`, `.pt` or `.safetensors` file as a map-style dataset.

    An item is a pair (input, target) of tensors, or a dict if `names` is given, such as
    `("input_ids", "labels")` for the Hugging Face Trainer.

    Args:
        data: the file.
        names: the keys of the input and the target of each item.
        src_key: name of the file's dataset of inputs.
        tgt_key: name of the file's dataset of targets.

    Raises:
        RequestError: `names` does not contain two different names.
        DataError: the file is missing, damaged or truncated, or its two arrays differ in length.
    """
    if names is not None and (len(names) != 2 or names[0] == names[1]):
        raise RequestError(f"names={names!r:.80} must contain two different names")
    return FileDataset(open_samples(Path(data), src_key=src_key, tgt_key=tgt_key), names)
