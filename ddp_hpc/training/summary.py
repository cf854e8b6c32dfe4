"""Writes the `--summary` file, which describes the software, the ranks and the results of a run."""

from __future__ import annotations

import time

from ddp_hpc.data.samples import Samples
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.process_group.devices import device_name
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.process_group.versions import versions
from ddp_hpc.training.telemetry.metrics_file import write_json
from ddp_hpc.training.trainer import Result


def write_summary(config: TrainConfig, group: Group, samples: Samples, result: Result) -> None:
    """Writes `--summary`: one JSON object, completely or not at all. Called on rank 0."""
    assert config.telemetry.summary is not None
    names = (
        "rank",
        "world_size",
        "local_rank",
        "local_size",
        "node_rank",
        "num_nodes",
        "launcher",
        "hostname",
    )
    test = result.test
    summary = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "world": {name: getattr(group.world, name) for name in names},
        "sources": group.world.sources,
        "backend": group.backend,
        "device": str(group.device),
        "device_name": device_name(group.device),
        "threads": group.threads,
        "model": {"name": config.model.name, "parameters": result.num_parameters},
        "data": {"reader": samples.reader, "samples": samples.num_samples},
        "tokens_per_s": result.samples_per_s * length if (length := _sequence_length(samples)) else None,
        "flops_per_s": result.flops_per_sample * result.samples_per_s or None,
        "share_of_peak": result.share_of_peak(group.world.world_size),
        "strategy": result.strategy,
        "memory": {"state_bytes": result.state_bytes, "peak_bytes": result.peak_bytes},
        "steps": result.steps,
        "resumed_from": result.resumed_from,
        "stopped": result.stopped.reason if result.stopped is not None else None,
        "samples": result.samples,
        "samples_per_s": result.samples_per_s,
        "wall_s": result.wall_s,
        "first_loss": result.first_loss,
        "final_loss": result.final_loss,
        "test": None
        if test is None
        else {"samples": test.num_samples, "loss": test.loss, "accuracy": test.accuracy, **test.metrics},
        "versions": versions(),
    }
    write_json(config.telemetry.summary, summary)


def _sequence_length(samples: Samples) -> int:
    """Returns the number of tokens (integers or vectors) in a sample's target; 0 for other targets."""
    shape = samples.tgt.shape
    is_sequence = len(shape) == 2 or (len(shape) == 1 and samples.tgt.dtype.kind in "iu")
    return shape[0] if is_sequence else 0
