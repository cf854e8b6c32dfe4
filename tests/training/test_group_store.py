"""The ranks' store as used by torch, compared with torch's own TCPStore."""

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from ddp_hpc.discovery.listening_ports import tcp_sockets
from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.training.process_group.group_store import GroupStore, group_store
from tests.stores import HERE, Served, store_in_process
from tests.training.forked import Forks

PROGRAM = str(Path(__file__).with_name("over_tcp_store.py"))


@pytest.fixture
def served() -> Iterator[Served]:
    with store_in_process() as served:
        yield served


def torchs() -> Store:
    return TCPStore(HERE, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


KEYS = ["a", "b", "c"]
VALUES = ["", "1", "7", "text", "-3"]


def compare(ours: Store, theirs: Store) -> None:
    for seed in range(300):
        results = [do(store, random.Random(seed)) for store in (ours, theirs)]
        assert results[0] == results[1], f"request {seed}"


def do(store: Store, chance: random.Random) -> Any:
    """Sends one request with random arguments; returns its result, or the kind of its error."""
    key, value, other = chance.choice(KEYS), chance.choice(VALUES), chance.choice(VALUES)
    name = chance.choice(["set", "get", "check", "compare_set", "add", "append", "multi", "wait"])
    brief = timedelta(milliseconds=30)
    try:
        match name:
            case "set":
                return store.set(key, value)
            case "get":
                return store.get(key) if store.check([key]) else None
            case "check":
                return store.check([key, chance.choice(KEYS)])
            case "compare_set":
                return store.compare_set(key, value, other)
            case "add":
                store.set(key, "0")
                return store.add(key, 2), store.add(key, -5), store.get(key)
            case "append":
                return store.append(key, value)
            case "multi":
                store.multi_set([key, "d"], [value, other])
                return store.multi_get([key, "d"])
            case "wait":
                store.wait([key, "never" if value else key], brief)
    except dist.DistStoreError as error:
        return type(error)
    return None


def test_every_request_has_the_same_result_as_in_torchs_store(served: Served) -> None:
    """With torch's PrefixStore, each call passes through C++ as in a process group."""
    ours = GroupStore(served.client(), "group/", 5.0)  # C++ does not keep a Python object alive
    compare(PrefixStore("p", ours), PrefixStore("p", torchs()))


def test_binary_values_pass_through_cpp_unchanged(served: Served) -> None:
    ours = GroupStore(served.client(), "group/", 5.0)
    ours.set("p/binary", bytes(range(256)))
    assert PrefixStore("p", ours).get("binary") == bytes(range(256))


def test_a_get_without_an_answer_times_out_like_torchs(served: Served) -> None:
    ours = GroupStore(served.client(), "group/", 0.2)
    assert ours.timeout == timedelta(seconds=0.2)
    prefixed = PrefixStore("p", ours)
    with pytest.raises(dist.DistStoreError, match="no answer from the ranks' store"):
        prefixed.get("never")
    prefixed.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"in 0\.1 s"):
        ours.get("never")


def test_a_lost_store_is_a_network_error_like_torchs() -> None:
    with store_in_process() as served:
        ours = GroupStore(served.client(), "group/", 5.0)
        served.process._process.kill()
        served.process._process.wait()
        with pytest.raises(dist.DistNetworkError, match="lost the connection to the ranks' store"):
            ours.get("a")


def test_the_keys_of_the_group_have_a_prefix(served: Served) -> None:
    client = served.client()
    ours = GroupStore(client, "group/", 5.0)
    client.set("verdict", b"1", 5)
    ours.set("verdict", "2")
    assert client.get(["verdict", "group/verdict"], 5) == [b"1", b"2"]


# The store of GPU backends.


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_works_over_the_tcp_store_of_gpu_backends(forks: Forks, tmp_path: Path, ranks: int) -> None:
    ended = forks.script(PROGRAM, cwd=tmp_path, ranks=ranks)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"


def test_the_tcp_store_listens_only_at_the_address_of_the_rendezvous() -> None:
    world = World(rank=0, world_size=1, local_rank=0, local_size=1, hostname="n1", launcher="slurm")
    endpoint = SimpleNamespace(host=HERE, listen=HERE)
    store = group_store(endpoint, SingleComm(), world, "nccl", 60.0)  # type: ignore[arg-type]
    port = store.underlying_store.port
    rows = [fields for fields in tcp_sockets(Path("/proc/self/net")) if fields[3] == "0A"]
    assert [row[1] for row in rows if row[1].endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
