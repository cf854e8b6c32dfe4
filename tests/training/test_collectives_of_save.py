"""The collectives of torch that a save uses, on real ranks."""

import json
from pathlib import Path

import pytest

from .forked import Forks


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.soak) for name in ("zero", "fsdp", "tp"))]
)
def test_a_save_uses_only_all_gather(forks: Forks, tmp_path: Path, strategy: str) -> None:
    """With NCCL, `gather` would connect every rank to rank 0, and keep these connections."""
    job = forks.run(strategy, cwd=tmp_path, ranks=2, program="tests.training.collectives_of_save")
    lines = [line for line in job.words().splitlines() if line.startswith("collectives: ")]
    assert len(lines) == 2
    for line in lines:
        names = json.loads(line.removeprefix("collectives: "))
        assert names
        assert all("allgather" in name or "all_gather" in name for name in names), names
