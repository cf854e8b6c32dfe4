"""`python -m ddp_hpc.export`: a trained model in a file that plain torch can read."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ddp_hpc.export import main
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, specs_of
from ddp_hpc.training.snapshots.snapshot_files import MODEL, TRAINING, write_snapshot


@pytest.fixture
def folder(tmp_path):
    """Two snapshots of a linear map; all values of the newer one are ones."""
    for step, value in ((10, 0.0), (20, 1.0)):
        model = {"1.weight": torch.full((3, 4), value), "1.bias": torch.full((3,), value)}
        training = {"optimizer.step/1.bias": torch.tensor(5.0)}
        files = {}
        for name, tensors in ((MODEL, model), (TRAINING, training)):
            files[name] = FileBuffer(specs_of(tensors))
            files[name].fill(tensors.items())
        (tmp_path / "snapshots").mkdir(exist_ok=True)
        write_snapshot(tmp_path / "snapshots", step, {"position": {"step": step}}, files)
    return tmp_path / "snapshots"


@pytest.fixture
def export(capsys):
    """Runs the command in this process; returns its exit code and stderr."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def test_the_newest_snapshot_is_exported_to_safetensors(folder, tmp_path, export):
    code, said = export(folder, tmp_path / "model.safetensors")
    assert code == 0, said
    assert "2 tensors, 15 values" in said
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model[1].weight, torch.ones(3, 4))


def test_a_given_snapshot_is_exported_to_a_pt_file_that_torch_loads_safely(folder, tmp_path, export):
    assert export(folder / "step_00000010", tmp_path / "model.pt")[0] == 0
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["1.weight"], torch.zeros(3, 4))


def test_a_damaged_snapshot_is_rejected_and_nothing_is_written(folder, tmp_path, export):
    file = folder / "step_00000020" / MODEL
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, said = export(folder, tmp_path / "model.safetensors")
    assert (code, len(said.splitlines())) == (1, 1)
    assert "SHA-256" in said
    assert said.rstrip().endswith("the previous snapshot is " + str(folder / "step_00000010"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("snapshot", "output", "words"),
    [
        ("snapshots", "model.bin", "use .safetensors or .pt"),
        ("snapshots", "there.pt", "already exists"),
        ("snapshots", "nowhere/model.pt", "does not exist"),
        ("missing", "model.pt", "no snapshots in "),
        (".", "model.pt", "no snapshots in "),
        ("there.pt", "model.pt", "cannot read the directory"),
        ("missing/step_00000010", "model.pt", "is not a snapshot"),
    ],
)
def test_an_invalid_request_is_one_line_and_changes_nothing(
    folder, tmp_path, export, snapshot, output, words
):
    (tmp_path / "there.pt").write_text("precious")
    code, said = export(tmp_path / snapshot, tmp_path / output)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert words in said
    assert (tmp_path / "there.pt").read_text() == "precious"
