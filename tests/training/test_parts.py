"""Parts of the training that need no second process."""

import io
import signal
import threading
import time

import pytest
import torch

from ddp_hpc.base.errors import RendezvousError, ReportedElsewhereError, RequestError
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.process_group.devices import choose_backend, device_kind, device_name, pick_device
from ddp_hpc.training.process_group.failure_watch import FailureWatch
from ddp_hpc.training.process_group.group import agree, mismatch_between_ranks
from ddp_hpc.training.process_group.print_error import ErrorElection
from ddp_hpc.training.run.directories import find_run_directories
from ddp_hpc.training.tasks.builtin_models import TASKS
from ddp_hpc.training.tasks.task import SampleSpec, make_task
from ddp_hpc.training.telemetry.progress_bar import Progress
from ddp_hpc.training.telemetry.step_clock import StepClock
from tests.stores import store_in_thread


@pytest.fixture
def store():
    with store_in_thread() as served:
        yield served


def _on_ranks(store, size, body, timeout_s=10.0):
    """Runs `body(comm)` in one thread per rank with separate connections; returns errors as values."""
    results = [None] * size

    def one(rank):
        comm = StoreComm(store.client(), rank, size, timeout_s)
        try:
            results[rank] = body(comm)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def _world(rank, size):
    return World(
        rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n1", launcher="hydra"
    )


def test_ranks_gather_and_broadcast_in_order(store):
    def body(comm):
        return comm.allgather([comm.rank, "x"]), comm.bcast(comm.rank + 7), comm.allgather(comm.rank)

    expected = ([[0, "x"], [1, "x"], [2, "x"]], 7, [0, 1, 2])
    assert _on_ranks(store, 3, body) == [expected] * 3


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


def test_auto_selects_an_available_device(no_gpu):
    assert device_kind("auto") == "cpu"
    assert choose_backend("auto", "cpu") == "gloo"
    with pytest.raises(RequestError, match="built without it"):
        choose_backend("mpi", "cpu")


def test_a_cpu_clock_counts_data_within_the_step():
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.start_step()
        with clock.data():
            time.sleep(0.02)
        time.sleep(0.01)
        clock.end_step(10)
    times = clock.read()
    assert len(times) == 3
    assert all(0.02 <= data_s <= step_s - 0.01 for data_s, step_s in times)
    assert clock.read() == []
    # 20 samples in the two steps after the first.
    assert clock.samples_per_s() == pytest.approx(20 / sum(step_s for _, step_s in times[1:]))


@pytest.mark.parametrize(
    ("scaling", "expected"), [("linear", 0.008), ("sqrt", 0.001 * 8**0.5), ("none", 0.001)]
)
def test_the_learning_rate_scales_with_the_number_of_ranks(scaling, expected):
    assert OptimizationConfig(lr_scaling=scaling).scaled_lr(8) == pytest.approx(expected)


def _built_in(name, spec, seed=0):
    return make_task(name, TASKS[name], spec, 0.1, {}, seed)


def test_parameters_equal_those_of_torch_manual_seed():
    spec = SampleSpec((1, 64), (20, 64), None)
    ours = _built_in("transformer", spec, seed=7).model
    torch.manual_seed(7)
    plain = torch.nn.Transformer(d_model=64, batch_first=True)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_default_transformer_has_the_lessons_number_of_parameters():
    model = _built_in("transformer", SampleSpec((1, 512), (20, 512), None)).model
    assert sum(p.numel() for p in model.parameters()) == 44_140_544


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 8, 8), (3, 28, 28), (2, 2)])
def test_the_classifier_supports_images_and_vectors(shape):
    task = _built_in("classifier", SampleSpec(shape, (), 10))
    images = torch.zeros(5, *shape)
    assert task.forward(task.model, images, images).shape == (5, 10)


@pytest.mark.parametrize(
    ("name", "spec", "word"),
    [
        ("transformer", SampleSpec((512,), (20, 512), None), "length, embedding"),
        ("transformer", SampleSpec((1, 512), (20, 256), None), "the same embedding size"),
        ("classifier", SampleSpec((1, 8, 8), (), None), "one integer label"),
        ("classifier", SampleSpec((1, 8, 8), (3,), 10), "one integer label"),
    ],
)
def test_samples_that_do_not_match_the_model_are_rejected(name, spec, word):
    with pytest.raises(RequestError, match=word):
        _built_in(name, spec)


def test_a_batch_log_gets_plain_lines():
    log = io.StringIO()
    progress = Progress(True, log)
    progress.step(1, 10, "1/1", 2.5, 100.0)
    progress.step(10, 10, "1/1", 2.0, 100.0)
    lines = log.getvalue().splitlines()
    assert len(lines) == 2
    assert "\r" not in log.getvalue()
    assert lines[0] == "epoch 1/1 step 1/10 loss 2.500000 100.0 samples/s eta ?"
    assert lines[1] == "epoch 1/1 step 10/10 loss 2.000000 100.0 samples/s eta 0:00:00"


def test_a_terminal_gets_one_updating_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    progress = Progress(True, screen)
    progress.step(5, 10, "1/1", 2.5, 100.0)
    progress.say("done")
    assert screen.getvalue().startswith("[############------------] epoch 1/1 step 5/10")
    assert screen.getvalue().endswith("\r\x1b[Kdone\n")


def test_the_other_ranks_are_silent():
    log = io.StringIO()
    progress = Progress(False, log)
    progress.say("x")
    progress.step(1, 1, "1/1", 1.0, 1.0)
    assert log.getvalue() == ""


class _Gpus:
    """A fake device module of torch for a node with several devices."""

    def __init__(self, count):
        self.count, self.current = count, None

    def device_count(self):
        return self.count

    def set_device(self, device):
        self.current = device


@pytest.mark.parametrize(
    ("seen", "per_rank", "expected"),
    [(4, 1, [0, 1, 2, 3]), (1, 1, [0, 0, 0, 0]), (8, 2, [0, 2, 4, 6]), (2, 2, [0, 0, 0, 0])],
)
def test_ranks_of_a_node_get_different_devices(seen, per_rank, expected, monkeypatch):
    gpus = _Gpus(seen)
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpus)
    assert [pick_device("cuda", _world(rank, 4), per_rank).index for rank in range(4)] == expected


def test_too_few_visible_devices_are_reported(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: _Gpus(1))
    with pytest.raises(RequestError, match="--devices-per-rank 2: rank 0 on n1 sees only 1"):
        pick_device("cuda", _world(0, 1), 2)


def test_without_snapshots_nothing_is_resumed() -> None:
    environ = {"DDP_HPC_RUN_DIR": "runs/ddp"}
    assert find_run_directories(TrainConfig(), environ) is not None
    assert find_run_directories(TrainConfig.of(snapshots=False), environ) is None


def test_no_snapshots_cannot_be_combined_with_snapshot_options() -> None:
    with pytest.raises(RequestError, match="--no-snapshots cannot be combined"):
        TrainConfig.of(snapshots=False, snapshot_every_steps=3)


def test_a_device_has_its_product_name() -> None:
    name = device_name(torch.device("cpu"))
    assert name
    assert name.isprintable()
