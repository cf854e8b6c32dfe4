"""--compile combined with options that affect gradients: the losses equal those of one eager process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.parallel.warm_up import warm_up
from ddp_hpc.training.tasks.task import Task, default_loss

from .graphs import Graphs
from .one_process import Steps, group_on
from .runs import LINEAR
from .strategy_rows import DATA, EXACT, Row, distance, measure

CLIPPED = "--clip-norm 0.5"


@pytest.mark.parametrize(
    "row",
    [
        Row("--compile --bucket-mib 1 --static-graph", DATA),
        pytest.param(
            Row(f"--compile --strategy zero --accumulate 2 {CLIPPED}", DATA, like=CLIPPED),
            marks=pytest.mark.check,
        ),
        pytest.param(
            Row("--compile --strategy fsdp --activation-checkpointing", DATA), marks=pytest.mark.check
        ),
    ],
    ids=str,
)
def test_compiled_steps_have_the_losses_of_one_eager_process(row, forks, tmp_path):
    homes = [tmp_path / "eager", tmp_path / "compiled"]
    for home in homes:
        home.mkdir()
    single = measure(forks, homes[0], row, 1, *LINEAR, num_samples=38)
    compiled = measure(forks, homes[1], row, 2, *LINEAR, program="tests.training.graphs", num_samples=38)
    assert len(compiled.losses) == 6
    assert distance(compiled, single) < EXACT


def test_compiled_code_sends_buckets_during_the_backward_pass():
    graphs, src, tgt = Graphs(), torch.rand(8, 512), torch.rand(8, 512)
    torch._dynamo.reset()

    def send(_, bucket):
        graphs.events.append("all-reduce")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with graphs.used():
            config = TrainConfig.of(compile="default", bucket_mib=1.0)
            task = Task(model=nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), loss=default_loss)
            group = replace(group_on("cpu"), backend="gloo")
            strategy = make_strategy(task, group, config.parallel, config.optimization)
            strategy.model.register_comm_hook(None, send)
            warm_up(strategy, torch.zeros_like(src), torch.zeros_like(tgt))
            num = graphs.num
            assert num > 2
            for _ in range(2):  # in the first step, DDP has a single bucket
                graphs.events.clear()
                strategy.loss(src, tgt).backward()
            last_backward = len(graphs.events) - 1 - graphs.events[::-1].index("backward")
            assert graphs.events.index("all-reduce") < last_backward, graphs.events
            assert graphs.num == num, "compiled again after the warm-up"
    finally:
        dist.destroy_process_group()


def test_a_smaller_last_batch_does_not_change_the_code_for_full_batches():
    # By default, torch marks the size as dynamic at the smaller batch, and then uses that code for all sizes.
    sizes = [8, 8, 5, 8, 8, 5]
    graphs, used = Graphs(), []

    def batches():
        for size in sizes:
            yield torch.rand(size, 4), torch.rand(size, 4)

    torch._dynamo.reset()
    with graphs.used():
        steps = Steps(Task(model=nn.Linear(4, 4), loss=default_loss), batches(), compile="default")
        for size in sizes:
            before = graphs.num
            steps.step(size)
            used.append((graphs.num - before, graphs.last))
    assert used == [(1, 0), (0, 0), (1, 1), (0, 0), (0, 0), (0, 1)]
