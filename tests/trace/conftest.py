"""A recording of four ranks with planted faults, made once per session."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.summarize_run import read_capture


@dataclass(frozen=True)
class Planted:
    directory: Path
    capture: Capture
    measured: list[dict[str, Any]]
    """The measurements of each rank."""


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory, forks) -> Planted:
    directory = tmp_path_factory.mktemp("planted")
    job = forks.start(str(directory), cwd=directory, ranks=4, program="tests.trace.planted")
    assert job.wait() == [0] * 4, job.words()
    measured = [json.loads((directory / f"measured-{rank}-of-4").read_text()) for rank in range(4)]
    return Planted(directory, read_capture(directory), measured)
