"""The settings passed to torch for devices that this machine may not have. Not run on a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.input.batch_loader import Loader
from ddp_hpc.training.optimization.precision import Precision, set_matmul_precision
from ddp_hpc.training.parallel import ddp
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.parallel.warm_up import warm_up
from ddp_hpc.training.process_group.devices import group_backends
from ddp_hpc.training.snapshots.dtensor_shards import shard_like
from ddp_hpc.training.tasks.task import Task
from ddp_hpc.training.telemetry.step_clock import StepClock

from .fake_mesh import two_ranks
from .recorded_group import CUDA


def kinds_of(backends):
    """The backend for each kind of device, as parsed by torch."""
    return dist.BackendConfig(dist.Backend(backends)).get_device_backend_map()


@pytest.mark.parametrize(("backend", "kind"), [("nccl", "cuda"), ("xccl", "xpu"), ("gloo", "cuda")])
def test_offloaded_tensors_have_a_cpu_backend(backend, kind):
    found = kinds_of(group_backends(backend, kind, cpu_offload=True))
    assert {name: found[name] for name in ("cpu", kind)} == {"cpu": "gloo", kind: backend}
    assert kinds_of("nccl").get("cpu") != "gloo", "as one backend alone it is not"


def test_without_offloading_there_is_one_backend():
    assert group_backends("nccl", "cuda", cpu_offload=False) == "nccl"
    assert group_backends("gloo", "cpu", cpu_offload=True) == "gloo"


def distribute_as_torch_2_8(tensor, mesh, placements, *, src_data_rank):
    """Like torch 2.8, whose `Shard._shard_tensor` does not copy contiguous chunks."""
    assert src_data_rank is None
    return DTensor.from_local(tensor.chunk(mesh.size())[mesh.get_local_rank()], mesh, placements)


@pytest.mark.parametrize("distribute", [distribute_as_torch_2_8, distribute_tensor])
def test_a_sharded_state_does_not_keep_the_whole_tensor_in_memory(distribute, monkeypatch):
    monkeypatch.setattr("torch.distributed.tensor.distribute_tensor", distribute)
    with two_ranks() as mesh:
        parameter = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)])
        whole = torch.arange(24.0).view(8, 3)
        part = shard_like(parameter, whole).to_local()
        assert part.tolist() == whole[:4].tolist()
        assert part.untyped_storage().nbytes() == part.nbytes


@pytest.fixture
def tf32():
    """Restores torch's settings."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("level", "products", "convolutions"),
    [(None, "highest", True), ("highest", "highest", False), ("high", "high", True)],
)
def test_without_an_option_tf32_keeps_torchs_default(level, products, convolutions, tf32):
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", True)
    assert TrainConfig().optimization.matmul_precision is None
    assert "--matmul-precision" in set_matmul_precision(level, CUDA)
    assert torch.get_float32_matmul_precision() == products
    assert torch.backends.cudnn.allow_tf32 is convolutions


class Streams:
    """A fake device module of torch, which records its calls and the current stream."""

    def __init__(self):
        self.calls, self.now = [], "main"

    def Stream(self, device):
        return "side"

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_stream(self, device):
        assert self.now == "main"
        return SimpleNamespace(wait_stream=lambda other: self.calls.append(("main waits for", other)))


def test_batches_of_workers_are_copied_on_a_separate_stream(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    batches = [(torch.ones(2, 3), torch.ones(2))] * 2
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda *_, **__: batches)
    to = torch.Tensor.to

    def copied(tensor, device, **options):
        streams.calls.append(("copied on", streams.now))
        return to(tensor, device, **options)

    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a GPU
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: streams.calls.append(("kept for", "main"))
    )
    samples = samples_of_arrays(np.ones((4, 3), np.float32), np.ones(4, np.float32))
    for src, _ in Loader(samples, torch.device("meta"), workers=1).batches([np.arange(2)] * 2):
        assert src.device.type == "meta"
    each = [("copied on", "side")] * 2 + [("main waits for", "side")] + [("kept for", "main")] * 2
    assert streams.calls == each * 2


def test_with_sync_batchnorm_no_rank_compiles_alone(monkeypatch):
    # The forward pass waits for other ranks, which would wait for this one to finish compiling.
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda module, **_: module)
    group = SimpleNamespace(device=torch.device("meta"), backend="gloo")
    config = TrainConfig.of(sync_batchnorm=True, compile="default")
    task = Task(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    precision, mesh = Precision("off", group.device), Mesh({"dp": 2}, {"dp": 0}, None)
    strategy = ddp.Ddp(task, group, config.parallel, config.optimization, precision, mesh)
    assert isinstance(strategy.bare[1], torch.nn.SyncBatchNorm)
    assert (
        warm_up(strategy, torch.zeros(2, 2), torch.zeros(2, 2)) == "in the first step, by all ranks at once"
    )


class FakeEvent:
    """An event of a device on which every recorded event takes a millisecond."""

    num_recorded = 0

    def __init__(self, device: str, *, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("cuda", True)
        self.is_complete = False

    def record(self):
        FakeEvent.num_recorded += 1
        self.at_ms = FakeEvent.num_recorded

    def synchronize(self):
        self.is_complete = True

    def elapsed_time(self, end):
        assert end.is_complete
        return end.at_ms - self.at_ms


def test_a_device_clock_measures_between_events(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    clock = StepClock(torch.device("cuda"))
    for num_micro_batches in (1, 2):
        clock.start_step()
        for _ in range(num_micro_batches):
            with clock.data():
                pass
            clock.end_forward()
        clock.end_step(10)
    # The events are the begin of the step, begin and end of each forward pass, and the end of the step.
    assert [step_s for _, step_s in clock.read()] == pytest.approx([0.003, 0.005])
    assert clock.own_s == pytest.approx(0.0015, abs=0.0005)  # three forward passes in two steps
    assert clock.samples_per_s() == pytest.approx(10 / 0.005)
