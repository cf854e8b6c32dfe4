"""The memory of a save on rank 0, as documented in docs/explanation/parallel-strategies.md."""

import json


def test_a_save_takes_twelve_bytes_per_parameter_for_every_strategy(forks, tmp_path):
    # Sharded tensors on all ranks, and whole tensors on different ranks, as with zero.
    strategies = ["fsdp", "pp"]
    job = forks.start(*strategies, "m.json", cwd=tmp_path, ranks=2, program="tests.training.save_memory")
    assert job.wait() == [0, 0], job.words()
    found = json.loads((tmp_path / "m.json").read_text())
    assert list(found) == strategies
    for name, saves in found.items():
        # Also a few tensors in transit: each is a twenty-fourth of the parameters.
        assert 11.5 < saves["first"] < 13, (name, saves)
        assert 11.5 < saves["second"] < 13, (name, saves)
