"""The index of a snapshot: which file has which part of a tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import FileBuffer, Place, specs_of
from ddp_hpc.training.snapshots.shard_file import WrittenShards, shard_file, write_shards
from ddp_hpc.training.snapshots.shard_index import index_of, read_header, report_of_rank
from ddp_hpc.training.snapshots.snapshot_files import FORMAT, _sealed, read_snapshot
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError

Box = tuple[slice, ...]
Boxes = Callable[[int, str, Tensor], Box | None]
"""Returns the part of a tensor that a rank holds; None if the rank holds no part of it."""


def _saved(folder: Path, num_ranks: int, tensors: Mapping[str, Tensor], boxes: Boxes) -> dict[str, Any]:
    """Writes a snapshot whose tensors are divided by `box`; returns its index and the ranks' reports."""
    folder.mkdir()
    reports = []
    for rank in range(num_ranks):
        parts = {name: boxes(rank, name, tensor) for name, tensor in tensors.items()}
        own = {name: tensors[name][part] for name, part in parts.items() if part is not None}
        places = {
            name: Place(tuple(tensors[name].shape), tuple(one.start for one in parts[name] or ()))
            for name in own
        }
        written, of_sections = {}, {}
        if own:
            buffer = FileBuffer(specs_of(own))
            buffer.fill(own.items())
            of_sections["model"] = buffer.specs
            written["model"] = write_shards(folder / shard_file("model", rank), buffer, places, 2**12)
        reports.append(report_of_rank(written, of_sections, {"model": places}))
    index = _index_of(folder, reports)
    (folder / "snapshot.json").write_bytes(_sealed({"format": FORMAT, **index}))
    return {**index, "reports": reports}


def _index_of(folder: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
    return index_of(
        reports,
        lambda section, rank: read_header(
            folder / shard_file(section, rank), WrittenShards(*reports[rank]["files"][section])
        ),
    )


def _rows(num_ranks: int) -> Boxes:
    """The rows of a rank, as fsdp divides them."""

    def box(rank: int, name: str, tensor: Tensor) -> Box | None:
        own = -(-len(tensor) // num_ranks)
        begin, end = rank * own, min((rank + 1) * own, len(tensor))
        return (
            (slice(begin, end), *map(slice, [0] * (tensor.dim() - 1), tensor.shape[1:]))
            if begin < end
            else None
        )

    return box


def _model(num_layers: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embedding": (1000, 4), "norm": (520,), "up": (777, 2), "down": (300, 3)}
    return {
        f"layers.{layer}.{name}": torch.randn(shape, generator=draw)
        for layer in range(num_layers)
        for name, shape in shapes.items()
    }


def _read(folder: Path) -> StoredTensors:
    return read_snapshot(folder).model


def _assert_equal(stored: StoredTensors, tensors: Mapping[str, Tensor]) -> None:
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 400])
def test_rows_on_any_number_of_ranks_are_read_as_they_were_written(tmp_path: Path, num_ranks: int) -> None:
    _saved(tmp_path / "step_00000001", num_ranks, _model(), _rows(num_ranks))
    _assert_equal(_read(tmp_path / "step_00000001"), _model())


def test_the_reports_do_not_grow_with_ranks_and_tensors(tmp_path: Path) -> None:
    sizes = {}
    for num_ranks, num_layers in ((8, 4), (400, 4), (8, 40)):
        folder = tmp_path / f"{num_ranks}-{num_layers}"
        found = _saved(folder, num_ranks, _model(num_layers), _rows(num_ranks))
        sizes[num_ranks, num_layers] = len(json.dumps(found["reports"][1]))
    # The size of the file and the offsets have more digits.
    assert max(sizes.values()) < sizes[8, 4] + 20


def test_parts_of_a_mesh_of_two_dimensions_are_found(tmp_path: Path) -> None:
    def box(rank: int, name: str, tensor: Tensor) -> Box | None:
        """Rows over 5 ranks, and columns over 4, of the first of two copies."""
        row, column = divmod(rank % 20, 4)
        return (slice(row * 6, row * 6 + 6), slice(column * 2, column * 2 + 2)) if rank < 20 else None

    tensors = {"a": torch.randn(30, 8), "b": torch.randn(30, 8)}
    found = _saved(tmp_path / "step_00000001", 40, tensors, box)
    [group] = found["shards"]["model"]
    assert group == {
        "tensors": ["a", "b"],
        "parts": [
            {
                "dims": (0, 1),
                "shape": (6, 2),
                "members": [(rank, rank // 4 * 6, rank % 4 * 2) for rank in range(20)],
            }
        ],
    }
    stored = _read(tmp_path / "step_00000001")
    _assert_equal(stored, tensors)
    assert torch.equal(stored.read("a", (7, 3), (9, 4)), tensors["a"][7:16, 3:7])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda box: slice(box.start, box.stop - 1), "do not have as many values as the tensor"),
        (lambda box: None, "do not have as many values as the tensor"),
    ],
)
def test_missing_rows_are_an_error_of_the_save(tmp_path: Path, change: Any, words: str) -> None:
    def box(rank: int, name: str, tensor: Tensor) -> Box | None:
        found = _rows(5)(rank, name, tensor)
        if rank != 3 or found is None:
            return found
        return (changed,) if (changed := change(found[0])) is not None else None

    with pytest.raises(ValueError, match=words):
        _saved(tmp_path / "step_00000001", 5, {"a": torch.arange(50.0)}, box)


def test_values_that_no_rank_has_written_are_not_read_as_zeros(tmp_path: Path) -> None:
    def box(rank: int, name: str, tensor: Tensor) -> Box | None:
        return (slice(0, 10),) if rank < 2 else (slice(20, 30),)

    _saved(tmp_path / "step_00000001", 3, {"a": torch.arange(30.0)}, box)
    with pytest.raises(DamagedSnapshotError, match="does not contain all values of a"):
        _read(tmp_path / "step_00000001").read("a", (12,), (5,))


def test_a_tensor_with_another_shape_on_another_rank_is_an_error_of_the_save(tmp_path: Path) -> None:
    reports = []
    for rank, size in enumerate((10, 12)):
        tensors = {"a": torch.arange(float(size))[5 * rank : 5 * rank + 5]}
        buffer = FileBuffer(specs_of(tensors))
        buffer.fill(tensors.items())
        places = {"a": Place((size,), (5 * rank,))}
        written = write_shards(tmp_path / shard_file("model", rank), buffer, places, 2**12)
        reports.append(report_of_rank({"model": written}, {"model": buffer.specs}, {"model": places}))
    with pytest.raises(ValueError, match="a does not have the same shape and data type on all ranks"):
        _index_of(tmp_path, reports)


def test_an_index_with_a_larger_tensor_than_its_files_is_damage_and_needs_no_memory(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000001"
    index = _saved(folder, 1, {"a": torch.arange(10.0)}, _rows(1))
    del index["reports"]
    index["tensors"]["model"]["a"] = ["F32", [2**50]]
    (folder / "snapshot.json").write_bytes(_sealed({"format": FORMAT, **index}))
    with pytest.raises(
        DamagedSnapshotError, match=r"model-00000\.safetensors does not contain its part of a"
    ):
        _read(folder)["a"]
