"""Devices, tasks and options, without a second process."""

import pytest
import torch

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.world import World
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.process_group.devices import choose_backend, device_kind, device_name, pick_device
from ddp_hpc.training.run.directories import find_run_directories
from ddp_hpc.training.tasks.builtin_models import TASKS
from ddp_hpc.training.tasks.task import SampleSpec, make_task


def _world(rank, size):
    return World(
        rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n1", launcher="hydra"
    )


def test_auto_selects_an_available_device(no_gpu):
    assert device_kind("auto") == "cpu"
    assert choose_backend("auto", "cpu") == "gloo"
    with pytest.raises(RequestError, match="built without it"):
        choose_backend("mpi", "cpu")


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
