"""Traces and data files with the Trainers of frameworks."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.conftest import Launch, skip_without
from tests.training.forked import Forks

PROGRAM = Path(__file__).with_name("traced_fit.py")


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_report_finds_the_recorded_steps_of_a_trainer(
    framework: str, framework_forks: Forks, launch: Launch, tmp_path: Path
) -> None:
    skip_without(framework)
    with h5py.File(tmp_path / "data.h5", "w") as h5:
        h5["src"] = np.ones((40, 3), np.float32)
        h5["tgt"] = np.ones(40, np.float32)
    ended = framework_forks.script(PROGRAM, framework, "data.h5", "traces", cwd=tmp_path, ranks=1)
    assert ended.exit_code == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "rank00000-of-00001.json.gz",
        "rank00000-of-00001.txt",
    ]
    report = launch([sys.executable, "-m", "ddp_hpc", "report", "traces"], cwd=tmp_path)
    assert "traces: 1 of 1 rank, 2 steps, on cpu" in report.stdout
    for region in ("backward", "optimizer"):
        assert region in report.stdout.splitlines()[2]
