"""The memory of a start, as documented in docs/explanation/parallel-strategies.md."""

import json

import pytest


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp"])
def test_no_rank_holds_half_of_the_model_while_it_starts(strategy, forks, tmp_path):
    # A model of 1 GiB, of which each rank has a quarter, beside 64 MiB and what torch imports.
    words = ["--rank", "--json", "m.json", "--layers", "64", "--width", "2048", "--dtype", "float32"]
    for way in ("parts", "whole"):
        job = forks.start(
            *words, "--strategies", strategy, "--way", way, cwd=tmp_path, ranks=4,
            program="benchmarks.start_memory",
        )  # fmt: skip
        assert job.wait(200) == [0, 0, 0, 0], job.words()
        row = json.loads((tmp_path / "m.json").read_text())
        assert row["whole_bytes"] == 2**30
        assert row["own_bytes"] == 2**28
        # Otherwise, this test could not fail.
        assert (row["peak_bytes"] > 2**30) == (way == "whole"), row
        if way == "parts":
            assert max(row["ratios"]) < 2, row
