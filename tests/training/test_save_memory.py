"""The memory of a save, as documented in docs/explanation/parallel-strategies.md."""

import json


def test_a_save_takes_little_more_memory_on_each_rank_than_its_own_part_of_the_state(forks, tmp_path):
    # Shards of each tensor on all ranks, and whole tensors on different ranks.
    strategies = ["fsdp", "pp"]
    job = forks.start(*strategies, "m.json", cwd=tmp_path, ranks=2, program="tests.training.save_memory")
    assert job.wait() == [0, 0], job.words()
    found = json.loads((tmp_path / "m.json").read_text())
    assert list(found) == strategies
    for name, saves in found.items():
        for save in ("first", "second"):
            assert all(0.9 < ratio < 1.1 for ratio in saves[save]), (name, save, saves)
