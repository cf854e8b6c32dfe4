"""The bytes of a safetensors file in host memory, into which a save copies the tensors."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ddp_hpc.training.snapshots import host_buffer as buffer_module
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, file_layout, specs_of


def _filled(tensors: dict[str, torch.Tensor]) -> FileBuffer:
    buffer = FileBuffer(specs_of(tensors))
    buffer.fill(tensors.items())
    return buffer


def loaded(buffer: FileBuffer) -> dict[str, torch.Tensor]:
    """The tensors of a buffer."""
    parts = (part.numpy().tobytes() for part in buffer.parts)
    return dict(safetensors.torch.load(b"".join([file_layout(buffer.specs)[0], *parts])))


def test_a_buffer_is_reused_only_for_matching_tensors() -> None:
    first = {"a": torch.arange(6, dtype=torch.int8).reshape(2, 3), "step": torch.tensor(1.0)}
    second = {"a": -first["a"], "step": torch.tensor(2.0)}
    buffer = _filled(first)
    place = buffer.parts[0].data_ptr()
    buffer.fill(second.items())
    assert buffer.parts[0].data_ptr() == place
    assert torch.equal(loaded(buffer)["a"], second["a"])
    assert buffer.matches(specs_of(second))
    assert not buffer.matches(specs_of({**second, "step": second["step"].double()}))
    assert not buffer.matches(specs_of({**second, "step": second["step"].reshape(1)}))
    assert not buffer.matches(specs_of({"a": second["a"]}))


def test_only_the_values_of_a_slice_are_saved() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    values = loaded(_filled({"column": matrix[:, 1], "transposed": matrix.t()}))
    assert torch.equal(values["column"], torch.tensor([1.0, 5.0, 9.0]))
    assert torch.equal(values["transposed"], matrix.t())


def test_an_unsupported_dtype_is_reported() -> None:
    with pytest.raises(TypeError, match=r"wave has the type torch\.complex64"):
        FileBuffer({"wave": ((2,), torch.complex64)})


def test_a_buffer_takes_little_more_memory_than_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    # Like pinned memory of torch. Tensors cross the boundaries of the pieces.
    monkeypatch.setattr(buffer_module, "_MOST_BYTES", 2**12)
    monkeypatch.setattr(buffer_module, "_LEAST_BYTES", 2**8)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}": torch.randint(-100, 100, (5, 997), generator=draw).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8)
    }
    buffer = _filled(tensors)
    values = loaded(buffer)
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors.items())
    sizes = [part.untyped_storage().nbytes() for part in buffer.parts]
    assert all(size & (size - 1) == 0 for size in sizes)
    assert buffer.num_bytes <= sum(sizes) < buffer.num_bytes + 2**8
