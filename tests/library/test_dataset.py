"""`ddp_hpc.dataset` with torch's own DataLoader, which reads with the same values as h5py and safetensors."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, default_collate

import ddp_hpc


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5:
        h5["src"] = np.arange(60, dtype=np.float32).reshape(20, 3)
        h5["tgt"] = np.arange(20)
    return path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_returns_each_sample_once(file: Path, num_workers: int) -> None:
    loader = DataLoader(ddp_hpc.dataset(file), batch_size=6, shuffle=True, num_workers=num_workers)
    batches = list(loader)
    assert [len(src) for src, _ in batches] == [6, 6, 6, 2]
    src, tgt = (torch.cat(each) for each in zip(*batches, strict=True))
    assert sorted(tgt.tolist()) == list(range(20))
    assert torch.equal(src[:, 0], 3.0 * tgt)


def test_an_item_is_a_pair_of_tensors_or_a_dict_with_the_given_names(file: Path) -> None:
    src, tgt = ddp_hpc.dataset(file)[7]
    assert (src.tolist(), tgt.item()) == ([21.0, 22.0, 23.0], 7)
    item = ddp_hpc.dataset(file, names=("x", "labels"))[7]
    assert {name: value.tolist() for name, value in item.items()} == {"x": [21.0, 22.0, 23.0], "labels": 7}


def test_bfloat16_values_keep_their_type(tmp_path: Path) -> None:
    values = torch.randn(4, 2).to(torch.bfloat16)
    save_file({"src": values, "tgt": torch.zeros(4)}, tmp_path / "data.safetensors")
    src, _ = default_collate([ddp_hpc.dataset(tmp_path / "data.safetensors")[i] for i in range(4)])
    assert src.dtype == torch.bfloat16
    assert torch.equal(src, values)


@pytest.mark.parametrize("index", [20, -1])
def test_a_number_outside_of_the_file_is_an_index_error(file: Path, index: int) -> None:
    with pytest.raises(IndexError, match="not in the range 0 to 19"):
        ddp_hpc.dataset(file)[index]


def test_invalid_arguments_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ddp_hpc.RequestError, match="must contain two different names"):
        ddp_hpc.dataset(file, names=("x", "x"))
    with pytest.raises(ddp_hpc.DdpHpcError, match="no such file"):
        ddp_hpc.dataset(tmp_path / "missing.h5")


def test_traces_can_be_recorded_outside_of_distributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with ddp_hpc.tracing(tmp_path / "traces") as trace:
        for _ in range(4):
            torch.ones(2).sum()
            trace.step()
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "rank00003-of-00008.json.gz",
        "rank00003-of-00008.txt",
    ]
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ddp_hpc.RequestError, match="RANK='8' and WORLD_SIZE='8'"):
        ddp_hpc.tracing(tmp_path).__enter__()
