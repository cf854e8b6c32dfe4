"""Creates the task of a training and opens its samples, in the same way on all ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.mesh_sizes import parse_mesh
from ddp_hpc.data.in_memory import check_workers, samples_of_arrays, samples_of_dataset
from ddp_hpc.data.open_file import check_matches
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.prepare_data import open_data
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.tasks.builtin_models import factory_of
from ddp_hpc.training.tasks.task import Factory, SampleSpec, Task, make_task, shapes_text
from ddp_hpc.training.telemetry.progress import Progress


def set_up(config: TrainConfig, group: Group, progress: Progress) -> tuple[Task, Samples]:
    """Returns the task, with its model on the CPU, and the samples. Collective: every rank must call this.

    The data is --data, otherwise the dataset of the user's task, otherwise synthetic data.

    Raises:
        RequestError: the data or the model is not available, or differs between ranks.
    """
    with group.failing_together():
        if config.parallel.mesh is not None:
            parse_mesh(config.parallel.mesh, group.world.world_size)
        factory = factory_of(config.model.name)
    if config.data.path is None and config.model.is_own and config.data.src_shape is None:
        task = _make(config, group, factory, None)
        if task.dataset is None:
            group.agree(
                f"--model {config.model.name}: no training data: its task has no `dataset`. Use --data FILE, "
                "or --src-shape and --tgt-shape for random numbers"
            )
        return task, _samples_of(task, config, group, progress)
    samples = open_data(config, group, progress)
    task = _make(config, group, factory, samples)
    if config.data.path is None and task.dataset is not None:
        progress.say(
            f"warning: --src-shape: using random numbers instead of the dataset of {config.model.name}"
        )
    return task, samples


def _make(config: TrainConfig, group: Group, factory: Factory, samples: Samples | None) -> Task:
    """Creates the same task on every rank. Collective: every rank must call this."""
    model = config.model
    with group.failing_together():
        spec = None if samples is None else SampleSpec.of(samples)
        task = make_task(model.name, factory, spec, model.dropout, dict(model.options), config.seed)
    own = shapes_text(task.model)
    # The shapes of a large model are a long text, so the ranks compare its checksum first.
    checksum = hashlib.sha256(own.encode()).hexdigest()
    is_same = group.comm.combine(checksum, lambda checksums: len(set(checksums)) == 1)
    first, problem = own if is_same else group.comm.bcast(own), ""
    if own != first:
        pairs = zip(own.split("; "), first.split("; "), strict=False)
        seen, needed = next((pair for pair in pairs if pair[0] != pair[1]), (own[-80:], first[-80:]))
        problem = (
            f"--model {model.name}: the factory returned different models: {seen} on rank "
            f"{group.world.rank}, but {needed} on rank 0. It must not depend on the rank"
        )
    group.agree(problem)
    return task


def _samples_of(task: Task, config: TrainConfig, group: Group, progress: Progress) -> Samples:
    """Returns the samples of a task's dataset and its test split. Collective: every rank must call this."""
    samples = test = None
    with group.failing_together():
        try:
            if not isinstance(task.dataset, str | Path):
                samples = _in_memory(task.dataset)
                check_workers(config.data.workers)
                check_matches(samples, config.data.src_shape, config.data.tgt_shape, config.data.dtype)
            if task.test_dataset is not None:
                test = _in_memory(task.test_dataset)
        except RequestError as error:
            raise RequestError(f"--model {config.model.name}: {error}") from None
    for from_task in filter(None, (samples, test)):
        group.agree(_differs(from_task, group))
    if samples is None:
        samples = open_data(config, group, progress, Path(task.dataset))
        samples.test = test or samples.test
    else:
        samples.test = test
        tests = "" if test is None else f", {test.num_samples:,} for tests"
        progress.say(f"data: provided by the task ({samples.num_samples:,} samples{tests}; {samples.reader})")
    return samples


def _in_memory(dataset: Any) -> Samples:
    if isinstance(dataset, tuple) and len(dataset) == 2:
        return samples_of_arrays(*dataset)
    return samples_of_dataset(dataset)


def _differs(samples: Samples, group: Group) -> str:
    return group.comm.combine(samples.num_samples, _differing_lengths)


def _differing_lengths(lengths: list[int]) -> str:
    if len(set(lengths)) == 1:
        return ""
    return (
        f"the task's dataset has different numbers of samples on the ranks: {lengths[:8]}. "
        "It must not depend on the rank"
    )
