"""Restrictions of NCCL, CUDA and ROCm that do not apply to CPUs, as in torch's source. Not run on a GPU.

Stand-ins raise the same errors as the functions of torch that the comments name, or record the calls.
"""

import pickle
import sys
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.library.wrap import _check_offload
from ddp_hpc.training import evaluation
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.gradients import global_norm
from ddp_hpc.training.optimization.precision import check_bf16
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.process_group.versions import versions
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, specs_of
from ddp_hpc.training.snapshots.state_reader import StateReader
from ddp_hpc.training.snapshots.training_state import TrainingState

from .recorded_group import CUDA, arguments_of_group
from .runs import run, succeeded
from .test_host_buffer import loaded
from .test_launches import Operators

ALONE = World(rank=0, world_size=1, local_rank=0, local_size=1, hostname="n1", launcher="hydra")


@pytest.mark.parametrize(
    ("backend", "options", "bound"),
    [
        ("nccl", {}, CUDA),
        ("nccl", {"devices_per_rank": 2}, None),
        ("nccl", {"cpu_offload": True}, None),
        ("gloo", {}, None),
    ],
)
def test_a_rank_is_bound_to_its_only_device_over_nccl_alone(backend, options, bound, monkeypatch):
    # The errors without this rule: in ProcessGroupNCCL.cpp, initNCCLComm, "Attempt to perform collective on
    # tensor not on device passed to init_process_group"; in split_group of torch 2.8, "does not support
    # splitting" with gloo, and "Unknown c10d backend type CPU:GLOO,CUDA:NCCL".
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = arguments_of_group(monkeypatch, TrainConfig().process_group, backend, **options)
    assert told["device_id"] == bound


@pytest.fixture
def nccl(monkeypatch):
    """Collectives of two ranks with equal tensors.

    They reject tensors that are not contiguous, like check_gpu_single_tensor in ProcessGroupNCCL.cpp.
    """

    def checked(result):
        def call(tensor, **_):
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            tensor.copy_(result(tensor))

        return call

    monkeypatch.setattr(dist, "all_reduce", checked(lambda tensor: 2 * tensor))
    monkeypatch.setattr(dist, "broadcast", checked(torch.ones_like))


def test_values_that_are_not_contiguous_are_summed_in_place(nccl):
    group = Group(
        world=ALONE, comm=SingleComm(), device=torch.device("cpu"), backend="nccl", threads=1, placement=""
    )
    values = torch.arange(6.0).view(2, 3).T
    assert group.sum(values) is values
    assert values.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


def test_an_evaluation_copies_buffers_that_are_not_contiguous(nccl):
    model = torch.nn.Module()
    model.register_buffer("transposed", torch.zeros(2, 3).T)
    mesh = SimpleNamespace(data_size=2, has=lambda _: False)
    evaluation._broadcast_buffers(SimpleNamespace(mesh=mesh, model=model))
    assert model.transposed.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float64, torch.bfloat16])
def test_a_snapshot_is_sent_in_every_data_type(dtype):
    # NCCL supports only the types of ncclDataType (NCCLUtils.hpp); gloo raises "Invalid scalar type".
    tensors = {"matrix": torch.ones(2, 3, dtype=dtype), "scalar": torch.ones((), dtype=dtype)}
    saved = SimpleNamespace(specs=specs_of(tensors), read=lambda name, *_: tensors[name], close=lambda: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = Group(
            world=ALONE, comm=SingleComm(), device=torch.device("cpu"), backend="gloo", threads=1,
            placement="",
        )  # fmt: skip
        found = dict(StateReader(group).tensors(saved, dict.fromkeys(tensors), differs_between_ranks=False))
    finally:
        dist.destroy_process_group()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_a_rank_without_gradients_has_its_norm_on_the_device_of_the_group():
    # With NCCL: "No backend type associated with device type cpu" (ProcessGroup.hpp, getBackend).
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with FakeTensorMode():
        assert global_norm([frozen], device=CUDA).device == CUDA
    assert global_norm([frozen]).item() == 0.0


RECORDS = """
import os
import pickle
import torch
import torch.distributed as dist
from ddp_hpc.training.process_group.flight_recorder import write_flight_record

# torch 2.11.0+cu130 has this function; it returns an empty record if the ranks use gloo.
torch._C._distributed_c10d._dump_nccl_trace = lambda: pickle.dumps({"entries": []})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
write_flight_record(0, 60.0)
dist.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
write_flight_record(1, 60.0)
os._exit(0)
"""


def test_a_torch_with_nccl_writes_the_record_of_the_backend_that_the_ranks_use(tmp_path):
    # A separate process, because torch reads these variables once; torch 2.8 records nothing by default.
    environ = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_")}
    succeeded(run([sys.executable, "-c", RECORDS], tmp_path, environ))
    of_gloo, of_nccl = (
        pickle.loads((tmp_path / f"rank_{number}").read_bytes())["entries"] for number in (0, 1)
    )
    assert [entry["profiling_name"] for entry in of_gloo] == ["gloo:all_reduce"]
    assert of_nccl == []


class Cuda:
    """A stand-in for torch.cuda. As in CUDA, each thread has its own current device."""

    def __init__(self):
        self.of_thread, self.streams, self.waited_on, self.waits = threading.local(), 0, [], 0

    def wait(self, _):
        self.waits += 1

    @contextmanager
    def device(self, device):
        before, self.of_thread.current = self.current, device.index
        yield
        self.of_thread.current = before

    @property
    def current(self):
        return getattr(self.of_thread, "current", 0)

    def Stream(self, device):
        self.streams += 1
        event = SimpleNamespace(synchronize=lambda: self.waited_on.append(self.current))
        return SimpleNamespace(wait_stream=self.wait, record_event=lambda: event)

    @contextmanager
    def stream(self, stream):
        yield

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=self.wait)


class OnGpu:
    """A stand-in for a tensor on the second GPU, whose values are on the CPU."""

    device = torch.device("cuda", 1)

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self.values

    def record_stream(self, stream):
        raise AssertionError("slow: the memory is kept by the waits of the streams")


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


def test_the_thread_that_writes_a_snapshot_waits_on_the_device_of_its_rank(cuda):
    # If the current device of a thread is the first GPU, cudaEventSynchronize creates a context on that GPU.
    buffer = FileBuffer({"weight": ((2,), torch.float32)})
    buffer.fill([("weight", OnGpu(torch.ones(2)))])
    thread = threading.Thread(target=buffer.wait)
    thread.start()
    thread.join()
    assert cuda.waited_on == [1]


@pytest.mark.parametrize("num", [4, 40])
def test_a_save_starts_its_copies_with_few_calls_for_any_number_of_tensors(num, cuda):
    # Adam's state: a step count for each parameter, in one data type, and the parameters in another.
    tensors = {f"step/{number:02d}": torch.tensor(float(number)) for number in range(num)}
    tensors |= {f"weight/{number:02d}": torch.full((3, 2), number).double() for number in range(num)}
    tensors |= {"none": torch.empty(0, 2), "mask": torch.ones((), dtype=torch.bool)}
    buffer = FileBuffer(specs_of(tensors))
    with Operators(views=False) as operators:
        buffer.fill((name, OnGpu(value)) for name, value in tensors.items())
    assert operators.num <= 10
    assert cuda.waits == 2  # of each stream for the other
    saved = loaded(buffer)
    assert {name: value.tolist() for name, value in saved.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }


@pytest.mark.parametrize("num", [4, 40])
def test_the_check_before_a_save_runs_few_operators_for_any_number_of_parameters(num):
    found = SimpleNamespace(tolist=lambda: [0])
    group = SimpleNamespace(device=torch.device("cpu"), gather=lambda _: found, world=ALONE)
    with FakeTensorMode():
        made = {
            f"{number}": torch.nn.Parameter(torch.ones(3, 2, dtype=dtype, device=CUDA))
            for number, dtype in enumerate((torch.float32, torch.bfloat16) * num)
        }
        state = TrainingState(group=group, model=made, optimizers=(), whole={})
        with Operators() as operators:
            assert state.non_finite() is None
    assert operators.num <= 2 * 10


def test_bfloat16_is_rejected_on_a_gpu_that_can_only_store_it(monkeypatch):
    # As on a V100: torch/cuda/__init__.py, is_bf16_supported(including_emulation=True).
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-32GB")
    with pytest.raises(RequestError, match="--amp bf16: Tesla V100-SXM2-32GB does not support bfloat16"):
        check_bf16(OptimizationConfig(amp="bf16"), CUDA)
    check_bf16(OptimizationConfig(amp="fp16"), CUDA)


def test_a_torch_with_cuda_but_without_nccl_reports_its_versions(monkeypatch):
    # Such a torch has no torch._C._nccl_version (torch/cuda/nccl.py).
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.delattr(torch._C, "_nccl_version", raising=False)
    assert "nccl" not in versions()


@pytest.mark.parametrize(("backends", "is_rejected"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", False)])
def test_offloaded_gradients_need_a_backend_for_tensors_of_the_cpu(backends, is_rejected):
    with pytest.raises(RequestError, match="cpu_offload=True") if is_rejected else nullcontext():
        _check_offload(backends)
