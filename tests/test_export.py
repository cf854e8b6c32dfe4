"""`python -m ddp_hpc.export`: a trained model in a file that plain torch can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ddp_hpc.export import main
from tests.training.shards import ranks_in, saved_whole


@pytest.fixture
def folder(tmp_path):
    """Two snapshots of a linear map; all values of the newer one are ones."""
    for step, value in ((10, 0.0), (20, 1.0)):
        model = {"1.weight": torch.full((3, 4), value), "1.bias": torch.full((3,), value)}
        training = {"optimizer.step/1.bias": torch.tensor(5.0)}
        saved_whole(tmp_path / "snapshots", step, model, training)
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


@pytest.mark.parametrize(
    ("snapshot", "output", "words"),
    [
        ("snapshots", "model.bin", "use .safetensors or .pt"),
        ("snapshots", "there.pt", "already exists"),
        ("snapshots", "nowhere/model.pt", "does not exist"),
        ("missing", "model.pt", "no snapshots in "),
        ("there.pt", "model.pt", "cannot read the directory"),
        ("missing/step_00000010", "model.pt", "is not a snapshot"),
    ],
)
def test_an_invalid_request_is_one_line_and_changes_nothing(
    folder, tmp_path, export, snapshot, output, words
):
    (tmp_path / "there").mkdir()
    (tmp_path / "there.pt").write_text("precious")
    code, said = export(tmp_path / snapshot, tmp_path / output)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert words in said
    assert (tmp_path / "there.pt").read_text() == "precious"


MODEL = {"embedding": torch.randn(50, 32), "norm": torch.ones(32)}


@pytest.fixture
def sharded(tmp_path):
    """Two sharded snapshots of a model, of three ranks."""
    training = {"optimizer.step/norm": torch.tensor(5.0)}
    with ranks_in(tmp_path / "snapshots", 3) as ranks:
        for step in (10, 20):
            ranks.save(step, MODEL, training)
        assert ranks.said == []
    return tmp_path / "snapshots"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_sharded_snapshot_is_exported_to_one_file(sharded, tmp_path, export, suffix):
    output = tmp_path / f"model{suffix}"
    assert export(sharded, output)[0] == 0
    found = torch.load(output, weights_only=True) if suffix == ".pt" else safetensors.torch.load_file(output)
    assert found.keys() == MODEL.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in MODEL.items())
    code, said = export(sharded, output)
    assert (code, "use --force" in said) == (2, True)
    assert export(sharded, output, "--force")[0] == 0


@pytest.mark.parametrize("output", ["model.safetensors", "model.pt"])
def test_a_damaged_shard_is_reported_with_the_previous_snapshot_and_nothing_is_written(
    sharded, tmp_path, export, output
):
    file = sharded / "step_00000020" / "model-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    code, said = export(sharded, tmp_path / output)
    assert (code, len(said.splitlines())) == (1, 1)
    assert f"{file}: a SHA-256 checksum does not match" in said
    assert said.rstrip().endswith("the previous snapshot is " + str(sharded / "step_00000010"))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.check
def test_the_export_of_a_sharded_snapshot_reads_one_tensor_at_a_time(tmp_path, export):
    model = {f"layer{number}": torch.full((1024, 1024), float(number)) for number in range(32)}
    with ranks_in(tmp_path / "snapshots", 2) as ranks:
        ranks.save(1, model, {"optimizer.step/layer0": torch.tensor(1.0)})
    measured = """
import re, sys
from pathlib import Path
from ddp_hpc.export import main
import ddp_hpc.training.snapshots.snapshot_files
def now(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = now("VmRSS")
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(now("VmHWM") - before)
"""
    argv = [sys.executable, "-c", measured, "snapshots", "model.safetensors"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total = sum(tensor.nbytes for tensor in model.values())
    assert int(done.stdout) < total / 2
    found = safetensors.torch.load_file(Path(tmp_path, "model.safetensors"))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
