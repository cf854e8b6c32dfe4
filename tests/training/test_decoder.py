"""The example decoder: it learns, resumes exactly after a kill, and generates text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from data_gen.text import write_text
from ddp_hpc.sample import main
from tests.conftest import PROJECT, Launch

from .runs import losses

SMALL = ["--model", "decoder", "--model-option", "layers=2", "--model-option", "width=32"]
STEPS = 60
OPTIONS = [*SMALL, "--data", "../text.h5", "--batch-size", "8", "--lr", "0.003", "--max-steps", str(STEPS)]
SAVING = ["--snapshot-dir", "run", "--metrics", "m.jsonl", "--snapshot-every-steps", "10"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A directory with text.h5: the sources of Python's json module as bytes."""
    folder = tmp_path_factory.mktemp("text")
    sources = Path(json.__file__).parent
    write_text(list(sources.glob("*.py")), folder / "text.h5", length=32)
    return folder


@pytest.fixture(scope="module")
def whole(text, forks):
    """The directory of an uninterrupted run of 2 ranks."""
    home = text / "whole"
    home.mkdir()
    forks.run(*OPTIONS, *SAVING, cwd=home, ranks=2)
    return home


def test_the_loss_falls(whole: Path) -> None:
    found = losses(whole / "m.jsonl")
    assert found[0] == pytest.approx(5.55, abs=0.2), "nats per byte if all 256 are equally likely"
    assert sum(found[-5:]) / 5 < 3.5


def test_the_trained_decoder_generates_reproducible_text(whole: Path, capfdbinary) -> None:
    texts = [sample(whole / "run", capfdbinary) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"def ")
    assert len(texts[0]) == 4 + 50


def sample(run_folder: Path, capfdbinary) -> bytes:
    with pytest.raises(SystemExit) as ended:
        main([str(run_folder), "--prompt", "def ", "--num-bytes", "50"])
    assert not ended.value.code
    sys.stdout.flush()
    return capfdbinary.readouterr().out


def commands_of_the_page() -> tuple[list[str], str, str]:
    """The commands of the first block of the page: create the data, train, and sample."""
    block = (
        (PROJECT / "docs" / "how-to" / "train-a-decoder.md").read_text().split("```")[1].replace("\\\n", "")
    )
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    *data, training, sampling = commands
    assert training.startswith("mpiexec -n 2 python -m ddp_hpc.train ")
    assert sampling.startswith("python -m ddp_hpc.sample ")
    return data, training, sampling


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_reach_1_9_nats_per_byte_in_ten_minutes(
    tmp_path: Path, launch: Launch
) -> None:
    data, training, sampling = commands_of_the_page()
    script = "\n".join(["set -euo pipefail", *data, training, sampling])
    done = launch(["bash", "-c", script], cwd=tmp_path, timeout_s=1200)
    assert done.exit_code == 0, done.stderr
    [test_loss] = re.findall(r"test: loss (\S+)", done.stdout)
    print(f"{done.wall_s:.0f} s, {test_loss} nats a byte\n{done.stdout}")
    assert float(test_loss) < 1.9
    assert done.wall_s < 600
    assert len(done.stdout.partition("\ndef ")[2]) > 300
