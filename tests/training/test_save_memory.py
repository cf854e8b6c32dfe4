"""The memory of a save, as documented in docs/explanation/parallel-strategies.md."""

import json

import pytest


@pytest.mark.check
def test_a_save_takes_little_more_memory_on_each_rank_than_its_own_part_of_the_state(forks, tmp_path):
    # Shards of each tensor on all ranks, and whole tensors on different ranks.
    strategies = ["fsdp", "pp"]
    words = ["--rank", "--directory", tmp_path, "--json", "m.json", "--layers", "24", "--width", "512"]
    job = forks.start(
        *words, "--strategies", *strategies, cwd=tmp_path, ranks=2, program="benchmarks.save_memory"
    )
    assert job.wait() == [0, 0], job.words()
    rows = json.loads((tmp_path / "m.json").read_text())
    assert [row["strategy"] for row in rows] == ["fsdp", "fsdp", "pp", "pp"]
    for row in rows:
        assert all(0.9 < ratio < 1.1 for ratio in row["ratios"]), row
