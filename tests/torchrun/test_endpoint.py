"""torchrun's endpoint on one node; tests/slurm/test_discovery.py tests it on two."""

import json
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.launch_secret import read_secret
from ddp_hpc.rendezvous.store_client import connect
from ddp_hpc.torchrun.endpoint import node_rank_of
from ddp_hpc.torchrun.step import Rendezvous
from tests.conftest import Launch

ENDPOINT = [sys.executable, "-m", "ddp_hpc.torchrun.endpoint"]
# As in torchrun_script.sh: a shell that reads the line and continues.
SHELL = f"exec {{a}}< <(exec {' '.join(ENDPOINT)} --nodes 1); read -r line <&$a; echo $line; exec sleep 60"


def listens(port: int, reuse: bool) -> bool:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            other.bind(("", port))
            other.listen()
        except OSError:
            return False
        return True


def test_the_store_runs_until_the_script_ends(launch: Launch, tmp_path: Path) -> None:
    script = launch.start(["bash", "-c", SHELL], env={"TMPDIR": str(tmp_path)})
    assert script.stdout is not None
    point = Rendezvous(**json.loads(script.stdout.readline()))
    assert (point.host, point.node_rank, point.local_addr) == ("127.0.0.1", 0, "127.0.0.1")
    key_file = Path(point.key_file)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    time.sleep(1)  # long enough for an endpoint that ends after its line
    client = connect(point.host, [point.port], lambda: read_secret(key_file), 5)
    client.set("a", b"b", 5)
    client.close()
    script.send_signal(signal.SIGKILL)
    script.wait(5)
    end = time.monotonic() + 10
    while not listens(point.port, reuse=False) or list(tmp_path.iterdir()):
        assert time.monotonic() < end, "the helper outlived its script"
        time.sleep(0.1)


def test_c10d_gets_a_reserved_port_for_its_store(launch: Launch) -> None:
    script = launch.start(["bash", "-c", SHELL.replace("--nodes 1", "--nodes 1 --rendezvous c10d")])
    assert script.stdout is not None
    port = json.loads(script.stdout.readline())["port"]
    assert not listens(port, reuse=False)
    assert listens(port, reuse=True)


def test_ranks_without_an_address_are_refused(launch: Launch, tmp_path: Path) -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ended = launch([*ENDPOINT, "--nodes", "2", "--timeout-s", "2"], env=by_hand, cwd=tmp_path)
    assert ended.exit_code == 2
    assert "without MPI they cannot exchange an address" in ended.stderr


def test_several_tasks_on_a_node_without_an_index_are_refused() -> None:
    world = World(rank=1, world_size=4, local_rank=1, local_size=2, hostname="n1", launcher="hydra")
    with pytest.raises(LaunchError, match=r"hydra started 2 tasks on n1 .*start one task per node"):
        node_rank_of(world)
