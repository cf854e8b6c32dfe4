"""Prepares the data of a run: creates synthetic data, and opens files."""

from __future__ import annotations

from pathlib import Path

from data_gen import Recipe, default_file_name, generate
from data_gen.progress import shown_progress
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.open_file import check_matches, open_samples
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.progress import Progress


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


def _ensure_synthetic(config: TrainConfig, group: Group, progress: Progress) -> Path:
    """Returns the path of the synthetic data, which rank 0 writes. Collective: every rank must call this."""
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
    with group.failing_together():
        if group.world.rank == 0:
            with shown_progress(f"making {path.name}") as report:
                made = generate(recipe, path, progress=report)
            progress.say(f"{'using' if made.reused else 'made'} {path} ({made.elapsed_s:.1f} s)")
    return path
