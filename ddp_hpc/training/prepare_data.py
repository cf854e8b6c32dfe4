"""Prepares the data of a run: creates synthetic data, copies files to the nodes, opens and checks them."""

from __future__ import annotations

import time
from pathlib import Path

from data_gen import Recipe, default_file_name, generate
from data_gen.progress import shown_progress
from ddp_hpc.base.errors import DataError, RequestError, stop_together
from ddp_hpc.data.check_finite import first_bad_sample
from ddp_hpc.data.open_file import check_matches, open_samples
from ddp_hpc.data.samples import Samples
from ddp_hpc.discovery.rank_communication import first_text
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.process_group.errors_of_torch import known_cause
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.progress import Progress

# If a copy takes less than this time, no progress is shown.
_PROGRESS_AFTER_S = 3.0


def open_data(
    config: TrainConfig, group: Group, progress: Progress, task_data: Path | None = None
) -> Samples:
    """Opens the samples; creates synthetic data without --data. Collective: every rank must call this.

    `task_data` is the file that the user's task names.
    """
    path = config.data.path or task_data or _ensure_synthetic(config, group, progress)
    samples = _open(path, config, group)
    shapes = " ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'}"
        for name, shape in (("src", samples.src.shape), ("tgt", samples.tgt.shape))
    )
    progress.say(
        f"data: {path} ({samples.num_samples:,} samples, {shapes}, {samples.src.dtype_name}; "
        f"{samples.reader})"
    )
    if config.data.check_data:
        check_finite(samples, path, group, progress)
    return samples


def _open(path: Path, config: TrainConfig, group: Group) -> Samples:
    """Opens the samples and checks the requested shapes. Collective: every rank must call this."""
    with group.failing_together():
        try:
            samples = open_samples(path, src_key=config.data.src_key, tgt_key=config.data.tgt_key)
            if config.data.path is not None or config.model.is_own:
                check_matches(samples, config.data.src_shape, config.data.tgt_shape, config.data.dtype)
        except RequestError as error:
            if group.world.rank == 0 or path.exists():
                raise
            where = f"on {group.world.hostname}: is it on a file system that all nodes share?"
            raise DataError(f"{error} ({where})") from None
    return samples


def check_finite(samples: Samples, path: Path, group: Group, progress: Progress) -> None:
    """Stops all ranks at the first sample with a non-finite value. Collective: every rank must call this.

    Each rank checks a section of the samples; the test split is checked too.
    """
    begin_s = time.monotonic()
    rank, world_size = group.world.rank, group.world.world_size
    for split in filter(None, (samples, samples.test)):
        start, stop = (split.num_samples * index // world_size for index in (rank, rank + 1))
        problem = ""
        try:
            if bad := first_bad_sample(split, start, stop):
                problem = (
                    f"{path}: sample {bad.number} of {bad.key} contains {bad.kind}. "
                    "Fix the file, or omit --check-data"
                )
        except DataError as error:
            if known_cause(error):
                raise  # the others get the text only
            problem = f"{error} (rank {rank} on {group.world.hostname})"
        group.comm.barrier("the check of the data (--timeout)")
        # The sections are in the order of the ranks, so the first problem by rank is the first in the file.
        if problem := group.comm.combine(problem, first_text):
            stop_together(rank, DataError(problem))
    progress.say(f"checked: {samples.num_samples:,} samples are finite ({time.monotonic() - begin_s:.1f} s)")


def _ensure_synthetic(config: TrainConfig, group: Group, progress: Progress) -> Path:
    """Returns the path of the synthetic data, which all ranks write together. Collective."""
    src_shape, tgt_shape = config.synthetic_shapes
    recipe = Recipe(
        num_samples=config.data.num_samples,
        src_shape=src_shape,
        tgt_shape=tgt_shape,
        dtype=config.data.dtype or "float32",
        seed=config.seed,
        distribution="learnable" if config.model.name == "linear" else "uniform",
    )
    path = config.data.data_dir / default_file_name(recipe)
    with shown_progress(f"making {path.name}") as report:
        made = generate(recipe, path, progress=report, comm=group.comm)
    progress.say(f"{'using' if made.reused else 'made'} {path} ({made.elapsed_s:.1f} s)")
    return path
