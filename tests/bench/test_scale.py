"""`python benchmarks/scale.py` measures the start of a job and the exchange of a step with few ranks."""

import json
import sys

import pytest

from tests.conftest import PROJECT


@pytest.mark.check
def test_each_rank_is_connected_and_the_costs_are_counted(launch, tmp_path):
    argv = [sys.executable, "benchmarks/scale.py", "--ranks", "16", "--json", tmp_path / "rows.json"]
    done = launch(argv, cwd=PROJECT, timeout_s=120.0)
    assert done.exit_code == 0, done.stderr
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert (row["ranks"], row["store_connections"], row["beat_connections"]) == (16, 16, 15)
    assert row["out_bytes"] > 0
    assert row["exchange_s"] > 0
