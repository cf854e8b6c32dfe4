"""`torchrun --virtual-local-rank` sets LOCAL_RANK=0 for all ranks and shows each of them only its own GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ddp_hpc.discovery.world import discover
from tests.conftest import Launch

TORCHRUN = Path(sys.executable).with_name("torchrun")
PROGRAM = """
import json, os
import torch
from ddp_hpc.discovery.world import discover
from ddp_hpc.training.process_group.devices import pick_device
world = discover(os.environ)
torch.get_device_module = lambda kind: type("M", (), {"device_count": lambda: 1, "set_device": print})
device = pick_device("cuda", world)
seen = os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]
print("world", json.dumps([world.rank, world.local_rank, world.local_size, device.index, *seen]))
"""


@pytest.mark.check
def test_ranks_of_a_node_have_different_local_ranks_and_device_0(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = [TORCHRUN, "--standalone", "--nproc-per-node=3", "--virtual-local-rank", "program.py"]
    ended = launch(argv, cwd=tmp_path, timeout_s=90)
    assert ended.exit_code == 0, ended.stderr
    found = sorted(json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("world "))
    assert found == [[0, 0, 3, 0, "0", "0"], [1, 1, 3, 0, "0", "1"], [2, 2, 3, 0, "0", "2"]]


def _environ(rank: int, group: int, size: int, sizes: list[int]) -> dict[str, str]:
    """The variables of a rank, as torch's local_elastic_agent.py sets them."""
    return {
        "TORCHELASTIC_RUN_ID": "run", "RANK": str(rank), "WORLD_SIZE": str(sum(sizes)), "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": str(group), "GROUP_WORLD_SIZE": str(len(sizes)),
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [[4], [2, 2], [2, 2, 2], [1, 3], [3, 1]])
def test_local_ranks_on_several_nodes(sizes: list[int]) -> None:
    first = 0
    for group, size in enumerate(sizes):
        worlds = [discover(_environ(first + local, group, size, sizes)) for local in range(size)]
        assert [world.local_rank for world in worlds] == list(range(size))
        first += size
