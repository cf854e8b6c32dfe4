"""Agreements between ranks, and the watch that ends all ranks when one fails. Ranks are threads."""

import signal
import time

import pytest

from ddp_hpc.base.errors import RendezvousError, ReportedElsewhereError, RequestError
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group.failure_watch import FailureWatch
from ddp_hpc.training.process_group.group import agree, mismatch_between_ranks
from ddp_hpc.training.process_group.print_error import ErrorElection
from tests.discovery.simulated_mpi import on_all_ranks
from tests.stores import store_in_thread


@pytest.fixture
def store():
    with store_in_thread() as served:
        yield served


def _on_ranks(store, size, body, timeout_s=10.0):
    """Runs `body(comm)` in one thread per rank with separate connections; returns errors as values."""
    return on_all_ranks(lambda rank: body(StoreComm(store.client(), rank, size, timeout_s)), size)


def _world(rank, size):
    return World(
        rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n1", launcher="hydra"
    )


def test_ranks_gather_and_broadcast_in_order(store):
    def body(comm):
        return comm.allgather([comm.rank, "x"]), comm.bcast(comm.rank + 7), comm.allgather(comm.rank)

    expected = ([[0, "x"], [1, "x"], [2, "x"]], 7, [0, 1, 2])
    assert _on_ranks(store, 3, body) == [expected] * 3


def test_members_are_the_ranks_of_the_same_group_in_rank_order(store):
    def body(comm):
        members = comm.members("babca"[comm.rank], comm.rank)
        return members.values, members.index, members.num_groups

    b, a, c = ([0, 2], 0, 3), ([1, 4], 1, 3), ([3], 2, 3)
    assert _on_ranks(store, 5, body) == [b, a, b, c, a]


def test_a_barrier_names_the_missing_ranks(store):
    def body(comm):
        if comm.rank != 1:
            comm.barrier("the data")

    done = _on_ranks(store, 3, body, timeout_s=1.0)
    assert done[1] is None
    assert isinstance(done[0], RendezvousError)
    assert "the data" in str(done[0])
    assert "rank 1 did not arrive" in str(done[0])


def test_a_problem_of_one_rank_stops_all_and_rank_0_reports_it(store):
    def body(comm):
        agree(comm, _world(comm.rank, comm.size), "disk full" if comm.rank == 2 else "")

    done = _on_ranks(store, 3, body)
    assert isinstance(done[0], RequestError)
    assert "disk full (rank 2; 1 rank affected)" in str(done[0])
    assert [type(error) for error in done[1:]] == [ReportedElsewhereError] * 2
    assert [error.exit_code for error in done] == [2, 2, 2]
    assert all(error.on_all_ranks for error in done)


def test_different_backends_are_reported_with_their_ranks(store):
    texts = _on_ranks(store, 2, lambda comm: mismatch_between_ranks(comm, ["nccl", "gloo"][comm.rank]))
    assert texts[0] == texts[1]
    assert "rank 0 uses nccl and rank 1 uses gloo" in texts[0]


def _watch(client, rank):
    """A failure watch in this process, which a failure of another rank must not end."""
    watch = FailureWatch(client, rank, lambda claim: None, lambda limit_s: None)
    watch.begin()
    return watch


def test_only_the_first_failure_is_reported(store, monkeypatch):
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("os._exit", lambda *_: None)
    first, second = _watch(store.client(), 0), _watch(store.client(), 1)
    assert second.run_election() is ErrorElection.WON
    assert first.run_election() is ErrorElection.LOST


def test_one_of_two_simultaneous_failures_is_reported(store, monkeypatch):
    # The second can announce its failure while the election of the first is in progress.
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("os._exit", lambda *_: None)
    client = store.client()
    first, second = _watch(client, 1), _watch(store.client(), 0)
    claims = {}

    class Slow:
        def add(self, key, amount, timeout_s):
            count = client.add(key, amount, timeout_s)
            claims["second"] = second.run_election()
            return count

        def set(self, key, value, timeout_s):
            client.set(key, value, timeout_s)

    first._store = Slow()
    assert first.run_election() is ErrorElection.WON
    assert claims["second"] is ErrorElection.LOST


def _ending_ranks(store, monkeypatch, size=3):
    """Watches of ranks, and a record of the signals that would have ended them."""
    signals, lost = [], []
    monkeypatch.setattr("os.kill", lambda pid, sig: signals.append(sig))
    monkeypatch.setattr("os._exit", lambda code: None)
    monkeypatch.setattr("ddp_hpc.training.process_group.failure_watch._GRACE_S", 0.2)
    watches = [FailureWatch(store.client(), rank, lost.append, lambda _: None) for rank in range(size)]
    for watch in watches:
        watch.begin()
    return watches, signals, lost


def test_ranks_that_finish_normally_are_not_ended(store, monkeypatch):
    watches, signals, lost = _ending_ranks(store, monkeypatch)
    for watch in watches:
        watch.close()
    for client in store.clients:
        client.close()
    store.end_owner()
    time.sleep(1.0)
    assert (signals, lost) == ([], [])


def test_a_slow_rank_does_not_mistake_the_exit_of_rank_0_for_a_failure(store, monkeypatch):
    watches, signals, lost = _ending_ranks(store, monkeypatch)
    watches[0].close()
    store.clients[0].close()
    store.end_owner()
    time.sleep(1.0)
    watches[1].close()
    watches[2].close()
    assert (signals, lost) == ([], [])


def test_a_lost_rank_0_is_reported_once_and_ends_all(store, monkeypatch):
    watches, signals, lost = _ending_ranks(store, monkeypatch)
    watches[0]._closed.set()  # simulates the exit of rank 0
    store.clients[0].close()
    store.end_owner()
    time.sleep(1.5)
    assert sorted(claim.name for claim in lost) == ["LOST", "WON"]
    assert signals == [signal.SIGTERM] * 2


def test_without_a_store_each_rank_decides_alone(store, monkeypatch):
    _, signals, lost = _ending_ranks(store, monkeypatch)
    for client in store.clients:
        client.close()
    time.sleep(1.5)
    assert [claim.name for claim in lost] == ["NO_STORE"] * 3
    assert signals == [signal.SIGTERM] * 3
