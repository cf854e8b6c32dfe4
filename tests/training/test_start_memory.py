"""The memory of a start, as documented in docs/explanation/parallel-strategies.md."""

import json

import pytest


def measure(forks, directory, strategy, way, layers):
    """Starts a model of `layers` * 16 MiB, of which each of 4 ranks has a quarter."""
    words = ["--rank", "--json", "m.json", "--width", "2048", "--dtype", "float32", "--layers", str(layers)]
    job = forks.start(
        *words, "--strategies", strategy, "--way", way, cwd=directory, ranks=4,
        program="benchmarks.start_memory",
    )  # fmt: skip
    assert job.wait(200) == [0, 0, 0, 0], job.words()
    row = json.loads((directory / "m.json").read_text())
    assert (row["whole_bytes"], row["own_bytes"]) == (layers * 2**24, layers * 2**22)
    return row


# In addition to its part, a rank uses less than 120 MiB, for the matrix that it creates and for the modules
# that torch imports.
@pytest.mark.parametrize("layers", [32, pytest.param(64, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.check) for s in ("tp", "pp"))]
)
def test_no_rank_holds_half_of_the_model_while_it_starts(strategy, layers, forks, tmp_path):
    row = measure(forks, tmp_path, strategy, "parts", layers)
    assert max(row["ratios"]) < 2, row


# All strategies are measured in the same way, so one of them is enough in `make check`.
@pytest.mark.check
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [("fsdp", 16), *(pytest.param(name, 64, marks=pytest.mark.soak) for name in ("fsdp", "tp", "pp"))],
)
def test_a_whole_model_on_every_rank_is_seen(strategy, layers, forks, tmp_path):
    row = measure(forks, tmp_path, strategy, "whole", layers)
    assert row["peak_bytes"] > row["whole_bytes"], row
