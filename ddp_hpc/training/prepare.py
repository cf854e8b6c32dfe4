"""The data of a run: opened by all ranks, made by rank 0 first where none was named."""

from __future__ import annotations

from pathlib import Path

from data_gen import Recipe, default_file_name, generate
from data_gen.progress import report_progress
from ddp_hpc.data.formats import check_matches, open_samples
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import Group, failure_of
from ddp_hpc.training.progress import Progress


def open_data(config: TrainConfig, group: Group, progress: Progress) -> Samples:
    """The samples, made by rank 0 first where there is no --data. Collective: every rank must call this."""
    path = config.data or _ensure_synthetic(config, group, progress)
    problem, samples = "", None
    try:
        samples = open_samples(path, src_key=config.src_key, tgt_key=config.tgt_key)
        if config.data is not None:
            check_matches(samples, config.src_shape, config.tgt_shape, config.dtype)
    except RequestError as error:
        problem = str(error)
        if group.world.rank != 0 and not path.exists():
            problem += f" (as seen from {group.world.hostname}: is it on a file system that all nodes share?)"
    group.agree(problem, RequestError.exit_code)
    assert samples is not None
    shapes = " ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'}"
        for name, shape in (("src", samples.src_shape), ("tgt", samples.tgt_shape))
    )
    progress.say(
        f"data: {path} ({samples.num_samples:,} samples, {shapes}, {samples.src_dtype}; {samples.reader})"
    )
    return samples


def _ensure_synthetic(config: TrainConfig, group: Group, progress: Progress) -> Path:
    """The path of the synthetic data: rank 0 makes it, the others wait in the store, not in NCCL."""
    src_shape, tgt_shape = config.synthetic_shapes
    recipe = Recipe(
        num_samples=config.num_samples,
        src_shape=src_shape,
        tgt_shape=tgt_shape,
        dtype=config.dtype or "float32",
        seed=config.seed,
        distribution="learnable" if config.model == "linear" else "uniform",
    )
    path = config.data_dir / default_file_name(recipe)
    problem, code = "", 0
    if group.world.rank == 0:
        try:
            with report_progress(f"making {path.name}") as report:
                made = generate(recipe, path, progress=report)
            verb = "using" if made.reused else "made"
            progress.say(f"{verb} {path} ({made.elapsed_s:.1f} s)")
        except DdpHpcError as error:
            problem, code = str(error), error.exit_code
    group.comm.barrier("rank 0 to make the data (--timeout)")
    problem = group.comm.bcast(problem)
    code = group.comm.bcast(code)
    if problem:
        stop_together(group.world.rank, failure_of(problem, code))
    return path
