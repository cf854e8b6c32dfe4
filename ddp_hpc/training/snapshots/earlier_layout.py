"""Reads snapshots of earlier versions, in which the model's values were stored in other tensors.

A tensor of the current model consists of rows of earlier tensors. Model and optimizer are converted in the
same way, and of a sharded snapshot, only the rows that a rank needs are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import Specs
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of an earlier tensor."""

    tensor: str
    begin: int
    end: int


Layout = Mapping[str, Sequence[Rows]]
"""The rows of which each tensor of the current model consists, by name; other tensors are unchanged."""
LayoutOf = Callable[[Specs], Layout]
"""Returns the layout of a snapshot with these tensors; empty if it is that of the current model."""


def rearranged(saved: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
    """Returns the tensors of a snapshot, of the model or of its optimizer, under their current names."""
    if isinstance(saved, StoredTensors):
        return _RearrangedTensors(saved, layout)
    names = _names(saved, layout)
    return {
        name: saved[rows[0].tensor] if saved[rows[0].tensor].dim() == 0 else _joined(rows, _whole_of(saved))
        for name, rows in names.items()
    } | {name: saved[name] for name in saved if name not in _sources(names)}


def _whole_of(saved: Mapping[str, Tensor]) -> Callable[[str, int, int], Tensor]:
    return lambda name, begin, end: saved[name][begin:end]


def _names(saved: Mapping[str, object], layout: Layout) -> dict[str, list[Rows]]:
    """Returns the rearranged tensors that can be made of the saved ones.

    The optimizer's tensors are named after those of the model, such as `optimizer.exp_avg/head.weight`.
    """
    prefixes = dict.fromkeys(name[: name.rfind("/") + 1] for name in saved)
    found = {
        prefix + name: [Rows(prefix + one.tensor, one.begin, one.end) for one in rows]
        for prefix in prefixes
        for name, rows in layout.items()
    }
    return {name: rows for name, rows in found.items() if all(one.tensor in saved for one in rows)}


def _sources(names: Mapping[str, Sequence[Rows]]) -> set[str]:
    return {one.tensor for rows in names.values() for one in rows}


def _joined(rows: Sequence[Rows], read: Callable[[str, int, int], Tensor]) -> Tensor:
    """Joins the rows. Reads each tensor once, because verified bytes are read in large chunks."""
    spans: dict[str, tuple[int, int]] = {}
    for one in rows:
        begin, end = spans.get(one.tensor, (one.begin, one.end))
        spans[one.tensor] = min(begin, one.begin), max(end, one.end)
    blocks = {name: read(name, *span) for name, span in spans.items()}
    begins = {name: begin for name, (begin, _) in spans.items()}
    return torch.cat(
        [blocks[one.tensor][one.begin - begins[one.tensor] : one.end - begins[one.tensor]] for one in rows]
    )


def _between(rows: Sequence[Rows], begin: int, end: int) -> list[Rows]:
    """Returns the rows from `begin` to `end` of the joined tensor."""
    found, at = [], 0
    for one in rows:
        num = one.end - one.begin
        first, last = max(begin - at, 0), min(end - at, num)
        if first < last:
            found.append(Rows(one.tensor, one.begin + first, one.begin + last))
        at += num
    return found


class _RearrangedTensors(StoredTensors):
    """The tensors of one section of a sharded snapshot, under their current names."""

    def __init__(self, saved: StoredTensors, layout: Layout) -> None:
        self._saved = saved
        self._names = _names(saved, layout)
        sources = _sources(self._names)
        self._specs = {name: spec for name, spec in saved.specs.items() if name not in sources}
        for name, rows in self._names.items():
            shape, dtype = saved.specs[rows[0].tensor]
            num = sum(one.end - one.begin for one in rows)
            self._specs[name] = ((num, *shape[1:]) if shape else (), dtype)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads the rectangular part of a tensor that begins at `offset`."""
        rows = self._names.get(name)
        if rows is None:
            return self._saved.read(name, offset, shape)
        if not shape:  # such as the number of steps, which is the same for all
            return self._saved.read(rows[0].tensor, offset, shape)
        wanted = _between(rows, offset[0], offset[0] + shape[0])
        if not wanted:
            return torch.empty(shape, dtype=self._specs[name][1])
        return _joined(
            wanted,
            lambda tensor, begin, end: self._saved.read(
                tensor, (begin, *offset[1:]), (end - begin, *shape[1:])
            ),
        )

    def check_sizes(self) -> None:
        """Raises DamagedSnapshotError if a file of this section is missing or has the wrong size."""
        self._saved.check_sizes()

    def close(self) -> None:
        """Closes the open files, which the next access opens again."""
        self._saved.close()
