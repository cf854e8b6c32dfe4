"""`python -m ddp_hpc.sample`: text out of a snapshot of the decoder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_hpc.sample import main
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, specs_of
from ddp_hpc.training.snapshots.snapshot_files import MODEL, TRAINING, write_snapshot
from ddp_hpc.training.tasks.decoder import Decoder
from tests.conftest import clean_environ

LENGTH = 8
OPTIONS = {"layers": 1, "heads": 2, "width": 16}


def save(folder: Path, step: int, module: torch.nn.Module, name: str = "decoder", **options: object) -> Path:
    tensors = dict(module.state_dict())
    files = {MODEL: FileBuffer(specs_of(tensors)), TRAINING: FileBuffer({})}
    files[MODEL].fill(tensors.items())
    folder.mkdir(exist_ok=True)
    given = tuple({**OPTIONS, **options}.items())
    return write_snapshot(folder, step, {"model": name, "config": {"model_options": str(given)}}, files)


def made(num_tokens: int = 256, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(num_tokens, LENGTH, **OPTIONS, dropout=0.5, tied=True)
    for parameter in model.parameters():
        parameter.data *= 8  # as if trained: some bytes are likelier
    return model


def counting() -> Decoder:
    """One that has learnt one thing: behind each byte comes the next one."""
    model = made()
    for parameter in model.blocks.parameters():
        parameter.data.zero_()
    model.embedding.positions.weight.data.zero_()
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    codes = torch.cat([bits, 1 - bits], dim=1).float()  # (256, 16), all of one length
    model.embedding.tokens.weight.data = codes
    model.head.scores.weight = torch.nn.Parameter(100 * codes.roll(1, dims=0))
    return model


@pytest.fixture
def folder(tmp_path):
    """Two snapshots; the newer one counts."""
    save(tmp_path / "snapshots", 10, made())
    save(tmp_path / "snapshots", 20, counting(), tied=False)
    return tmp_path / "snapshots"


@pytest.fixture
def sample(capfdbinary):
    """Runs the command here: its exit code, and what it wrote to stdout and to stderr."""

    def run(*words: object) -> tuple[int, bytes, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return int(ended.value.code or 0), out, err.decode()

    num_threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(num_threads)


def test_the_newest_snapshot_continues_the_prompt(folder, sample):
    assert sample(folder, "--prompt", "de", "--num-bytes", 20) == (
        0,
        b"de" + bytes(range(0x66, 0x66 + 20)),
        "",
    )


def test_without_a_prompt_the_text_starts_like_a_new_file(folder, sample):
    assert sample(folder, "--num-bytes", 3)[1] == b"\1\2\3"


def test_a_prompt_can_contain_any_bytes(folder, sample):
    assert sample(folder, "--prompt", "\u00fc\udcff", "--num-bytes", 2)[1] == b"\xc3\xbc\xff\0\1"


def test_the_text_depends_only_on_the_seed(folder, sample):
    old = folder / "step_00000010"
    texts = [sample(old, "--prompt", "x", "--num-bytes", 40, "--seed", seed)[1] for seed in (3, 3, 4)]
    assert [len(text) for text in texts] == [41] * 3
    assert texts[0] == texts[1] != texts[2]


def test_at_temperature_0_the_most_likely_byte_is_chosen_for_every_seed(folder, sample):
    old = folder / "step_00000010"
    options = [old, "--prompt", "x", "--num-bytes", 20]
    ways = ((0, 1), (0, 2), (1e-320, 3))
    texts = {sample(*options, "--temperature", t, "--seed", seed)[1] for t, seed in ways}
    assert len(texts) == 1


@torch.no_grad()
def test_each_byte_is_predicted_from_the_last_bytes(folder, sample):
    """More of them than the model was trained on: the oldest are left behind."""
    model = made().eval()
    text = sample(
        folder / "step_00000010", "--prompt", "a long prompt", "--num-bytes", 5, "--temperature", 0
    )[1]
    for end in range(len(text) - 5, len(text)):
        before = torch.tensor([list(text[end - LENGTH : end])])
        assert text[end] == int(model(before)[0, -1].argmax())


def start(folder: Path, stdout: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ddp_hpc.sample", str(folder), "--num-bytes", "8000"]
    return subprocess.Popen(command, env=clean_environ(), stdout=stdout, stderr=subprocess.PIPE)


def test_bytes_are_written_immediately_until_the_reader_closes_the_pipe(folder):
    with start(folder, subprocess.PIPE) as process:
        assert process.stdout.read(2) == b"\1\2"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_full_disk_is_one_line(folder):
    with Path("/dev/full").open("wb") as full, start(folder, full) as process:
        said = process.stderr.read().decode()
    assert (process.returncode, len(said.splitlines())) == (1, 1), said
    assert "error: cannot write the text (No space left on device)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["snapshots", "--num-bytes", "0"], "--num-bytes must be greater than 0 (got 0)"),
        (["snapshots", "--temperature", "-1"], "--temperature must be 0 or greater (got -1.0)"),
        (["snapshots", "--temperature", "nan"], "--temperature must be 0 or greater (got nan)"),
        (["snapshots", "--temperature", "inf"], "--temperature must be 0 or greater (got inf)"),
        (["snapshots", "--seed", "-1"], "--seed must be at least 0 and less than 2**63 (got -1)"),
        (["missing"], "no snapshots in "),
        (["other"], "contains the model linear; --model decoder is required"),
        (["tokens"], "was trained on 300 different tokens, not on bytes"),
        (["changed"], "does not fit the decoder of this ddp-hpc"),
        (["nothing"], "does not fit the decoder of this ddp-hpc"),
    ],
)
def test_an_invalid_request_is_one_line_without_text(folder, tmp_path, sample, words, said):
    save(tmp_path / "other", 1, torch.nn.Linear(2, 2), "linear")
    save(tmp_path / "tokens", 1, made(300))
    save(tmp_path / "changed", 1, made(), layers=2)
    save(tmp_path / "nothing", 1, torch.nn.Linear(2, 2))
    code, out, err = sample(tmp_path / words[0], *words[1:])
    assert (code, out, len(err.splitlines())) == (2, b"", 1), err
    assert said in err


def test_a_diverged_model_is_reported(tmp_path, sample):
    model = made()
    model.head.norm.weight.data[:] = torch.nan
    save(tmp_path / "nan", 1, model)
    code, out, err = sample(tmp_path / "nan")
    assert (code, out, len(err.splitlines())) == (1, b"", 1), err
    assert "is not finite" in err


def test_a_damaged_snapshot_is_rejected_with_the_name_of_the_previous_one(folder, sample):
    (folder / "step_00000020" / MODEL).write_bytes(b"short")
    code, out, err = sample(folder)
    assert (code, out) == (1, b"")
    assert err.rstrip().endswith("the previous snapshot is " + str(folder / "step_00000010"))
