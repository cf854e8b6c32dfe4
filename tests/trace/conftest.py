"""A recording of four ranks with known faults, made once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.trace.capture import read_capture
from ddp_hpc.trace.model import Capture


@dataclass(frozen=True)
class Planted:
    folder: Path
    capture: Capture
    told: list[dict[str, Any]]
    """By rank: what it measured itself."""


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory, forks) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    job = forks.start(str(folder), cwd=folder, ranks=4, program="tests.trace.planted")
    assert job.wait() == [0] * 4, job.words()
    told = [json.loads((folder / f"told-{rank}-of-4").read_text()) for rank in range(4)]
    return Planted(folder, read_capture(folder), told)
