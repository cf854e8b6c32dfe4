"""The two things that a training needs: samples, and a task that fits them, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_hpc.data.formats import check_matches
from ddp_hpc.data.in_memory import check_workers, samples_of_arrays, samples_of_dataset
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import Group
from ddp_hpc.training.models import TASKS
from ddp_hpc.training.prepare import check_finite, open_data
from ddp_hpc.training.progress import Progress
from ddp_hpc.training.strategies.mesh import parse_mesh
from ddp_hpc.training.task import Factory, SampleSpec, Task, find_factory, make_task, shapes_text


def set_up(config: TrainConfig, group: Group, progress: Progress) -> tuple[Task, Samples]:
    """The task with its model on the CPU, and the samples. Collective: every rank must call this.

    The data is --data, else what the user's task brings, else synthetic.

    Raises:
        RequestError: the data or the model is not to be had, or differs between ranks.
    """
    problem, factory = "", None
    try:
        if config.mesh is not None:
            parse_mesh(config.mesh, group.world.world_size)
        factory = find_factory(config.model) if config.is_own_model else TASKS[config.model]
    except RequestError as error:
        problem = str(error)
    group.agree(problem, RequestError.exit_code)
    assert factory is not None
    if config.data is None and config.is_own_model and config.src_shape is None:
        task = _make(config, group, factory, None)
        if task.dataset is None:
            group.agree(
                f"--model {config.model}: there is nothing to train on: its task brings no `dataset`; "
                "name a file with --data, or give --src-shape and --tgt-shape for random numbers",
                RequestError.exit_code,
            )
        return task, _samples_of(task, config, group, progress)
    samples = open_data(config, group, progress)
    task = _make(config, group, factory, samples)
    if config.data is None and task.dataset is not None:
        progress.say(f"warning: --src-shape: random numbers take the place of the data of {config.model}")
    return task, samples


def _make(config: TrainConfig, group: Group, factory: Factory, samples: Samples | None) -> Task:
    """The same task on every rank. Collective: every rank must call this."""
    problem, task = "", None
    try:
        spec = None if samples is None else SampleSpec.of(samples)
        task = make_task(config.model, factory, spec, config.dropout, dict(config.model_options), config.seed)
    except RequestError as error:
        problem = str(error)
    group.agree(problem, RequestError.exit_code)
    assert task is not None
    own = shapes_text(task.model)
    first = group.comm.bcast(own)
    if own != first:
        pairs = zip(own.split("; "), first.split("; "), strict=False)
        seen, needed = next((pair for pair in pairs if pair[0] != pair[1]), (own[-80:], first[-80:]))
        problem = (
            f"--model {config.model}: the factory gives other models on other ranks: {seen} on rank "
            f"{group.world.rank} and {needed} on rank 0; it must not depend on the rank"
        )
    group.agree(problem, RequestError.exit_code)
    return task


def _samples_of(task: Task, config: TrainConfig, group: Group, progress: Progress) -> Samples:
    """The samples that a task brings, and its test split. Collective: every rank must call this."""
    problem, samples, test = "", None, None
    try:
        if not isinstance(task.dataset, str | Path):
            samples = _in_memory(task.dataset)
            check_workers(config.workers)
            check_matches(samples, config.src_shape, config.tgt_shape, config.dtype)
        if task.test_dataset is not None:
            test = _in_memory(task.test_dataset)
    except RequestError as error:
        problem = f"--model {config.model}: {error}"
    group.agree(problem, RequestError.exit_code)
    for brought in filter(None, (samples, test)):
        group.agree(_differs(brought, group), RequestError.exit_code)
    if samples is None:
        samples = open_data(config, group, progress, Path(task.dataset))
        samples.test = test or samples.test
    else:
        samples.test = test
        if config.check_data:
            check_finite(samples, samples.path, group, progress)
        held = "" if test is None else f", {test.num_samples:,} for tests"
        progress.say(f"data: of the task ({samples.num_samples:,} samples{held}; {samples.reader})")
    return samples


def _in_memory(dataset: Any) -> Samples:
    if isinstance(dataset, tuple) and len(dataset) == 2:
        return samples_of_arrays(*dataset)
    return samples_of_dataset(dataset)


def _differs(samples: Samples, group: Group) -> str:
    lengths = group.comm.allgather(samples.num_samples)
    if len(set(lengths)) == 1:
        return ""
    return f"the task's dataset has not as many samples on all ranks: {lengths[:8]}"
