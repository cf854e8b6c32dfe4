"""Contents and errors that are specific to .pt and .safetensors files."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ddp_hpc.data.open_file import open_samples


def test_the_number_of_classes(tmp_path, refusal):
    torch.save({"src": torch.zeros(3), "tgt": torch.zeros(3), "num_classes": 10}, tmp_path / "file.pt")
    assert open_samples(tmp_path / "file.pt").num_classes == 10
    path = tmp_path / "file.safetensors"
    arrays = {"src": np.zeros((3, 2)), "tgt": np.zeros(3)}
    save_file(arrays, path, metadata={"num_classes": "10"})
    assert open_samples(path).num_classes == 10
    # Python refuses to convert more than 4300 digits.
    for text in ("ten", "9" * 5000):
        save_file(arrays, path, metadata={"num_classes": text})
        assert f"num_classes is '{text[:40]}'; it must be an integer" in refusal(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_reading_takes_memory_for_the_batch_alone(tmp_path, suffix):
    # For each batch NumPy would copy the whole of an array that is misaligned or not contiguous.
    path = tmp_path / f"file{suffix}"
    values = torch.arange(4_000_000.0)
    if suffix == ".pt":
        torch.save({"src": values.reshape(40, -1).T, "tgt": torch.zeros(100_000, dtype=torch.uint8)}, path)
    else:
        header = {
            "tgt": {"dtype": "U8", "shape": [100_000], "data_offsets": [0, 100_000]},
            "odd": {"dtype": "U8", "shape": [1], "data_offsets": [100_000, 100_001]},
            "src": {"dtype": "F32", "shape": [100_000, 40], "data_offsets": [100_001, 16_100_001]},
        }
        text = json.dumps(header).encode()
        content = values.reshape(100_000, 40).numpy().tobytes()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100_001) + content)
    samples = open_samples(path)
    samples.read(np.array([0]))
    tracemalloc.start()
    src, _ = samples.read(np.array([99_999, 7, 7]))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert src[1:, 3].tolist() == ([300_007.0] * 2 if suffix == ".pt" else [283.0] * 2)
    assert peak_bytes < 100_000


def test_a_tensor_that_is_a_view_or_needs_gradients(tmp_path):
    path = tmp_path / "file.pt"
    whole = torch.arange(24.0).reshape(4, 6)
    torch.save({"src": whole.T, "tgt": torch.ones(6, requires_grad=True)}, path)
    src, tgt = open_samples(path).read(np.array([5, 1]))
    assert src.tolist() == [[5.0, 11.0, 17.0, 23.0], [1.0, 7.0, 13.0, 19.0]]
    assert tgt.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ([1.0, 2.0, 3.0], "src is a value of type list; a tensor is required"),
        (torch.eye(3).to_sparse(), "a dense tensor"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
    ],
)
def test_a_pt_entry_that_cannot_be_used(tmp_path, refusal, src, message):
    path = tmp_path / "file.pt"
    torch.save({"src": src, "tgt": torch.zeros(3)}, path)
    assert message in refusal(path)


@pytest.mark.parametrize("content", [torch.zeros(3), [torch.zeros(3)], 5])
def test_a_pt_file_that_does_not_contain_a_dict(tmp_path, refusal, content):
    path = tmp_path / "file.pt"
    torch.save(content, path)
    assert "a dict of tensors is required" in refusal(path)


class Command:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("saved_by", ["torch", "pickle"])
def test_a_command_in_a_pt_file_is_not_executed(tmp_path, refusal, saved_by):
    path, marker = tmp_path / "file.pt", tmp_path / "it ran"
    content = {"src": torch.zeros(3), "tgt": torch.zeros(3), "more": Command(marker)}
    if saved_by == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    said = refusal(path)
    assert not marker.exists()
    if saved_by == "torch":
        assert "it contains getattr, but only tensors and plain values are loaded" in said
    # torch's message advises to load the file anyway.
    assert "weights" not in said.lower()
    assert "safe_globals" not in said


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 1200]},
        {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]},
        {"dtype": "float", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "BF16", "shape": [6], "data_offsets": [0, 12]},
        None,
    ],
)
def test_a_safetensors_header_with_a_wrong_entry(tmp_path, refusal, entry):
    header = json.dumps(
        {"src": entry, "tgt": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}}
    ).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    refusal(path)
