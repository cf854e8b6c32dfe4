"""The command `ddp-hpc estimate`, which estimates the memory that a training needs per rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.click_options import click_options, given_values
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import from_options, to_options
from ddp_hpc.commands.completion import complete_profiles
from ddp_hpc.estimate.memory import (
    GIB,
    STRATEGIES,
    Machine,
    Training,
    fits,
    footprint,
    smallest_ranks,
)

if TYPE_CHECKING:
    from ddp_hpc.base.text_table import Row

_DTYPES = {4: "float32", 2: "bfloat16"}
_REQUIRED = ("params", "layers", "hidden", "seq", "batch")


@click.command("estimate")
@click_options(Training)
@click_options(Machine, completions={"profile": complete_profiles})
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def command(as_json: bool, **options: Any) -> None:
    """Estimate how much memory each rank needs to train a Transformer.

    For each parallelization strategy, the command lists the sizes of the parameters, gradients, optimizer
    states and activations. Parameters, gradients and optimizer states are exact; the rest is an estimate. See
    docs/reference/memory-estimate.md.

    \b
    Examples:
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype amp
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype mixed \\
          --checkpointing --vocab 32000 --profile polaris
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype mixed \\
          --gpus-per-node 8 --gpu-memory-gib 80 --ranks 64
      ddp-hpc estimate --params 1e12 --layers 120 --hidden 12288 --seq 2048 --batch 1 --strategy fsdp --json
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    given = given_values(options)
    if missing := [f"--{name}" for name in _REQUIRED if name not in given]:
        raise click.UsageError(f"Missing option {missing[0]!r}.")
    machine = from_options(
        Machine, {name: given.pop(name) for name in to_options(Machine()) if name in given}
    )
    training = from_options(Training, given)
    gpus_per_node, memory_gib = machine.gpus_per_node, machine.gpu_memory_gib
    if machine.profile:
        of_profile = _node_of(machine.profile, bool(memory_gib))
        gpus_per_node, memory_gib = gpus_per_node or of_profile[0], memory_gib or of_profile[1]
    gpus_per_node = 1 if gpus_per_node is None else gpus_per_node  # 0 if the nodes of the site differ
    gpu_memory_bytes = int((memory_gib or 0) * GIB) or None
    by_size = training.params_of_layers + (training.vocab or 0) * training.hidden
    if not by_size // 2 <= training.params <= by_size * 2:
        click.echo(
            f"warning: --params is {training.params:.3g}, but these layers have {by_size:.3g} parameters",
            err=True,
        )
    names = [machine.strategy] if machine.strategy else list(STRATEGIES)
    rows = [_row(training, name, machine.ranks, gpus_per_node, gpu_memory_bytes) for name in names]
    if as_json:
        request = {
            **asdict(training),
            "gpus_per_node": gpus_per_node or None,
            "gpu_memory_bytes": gpu_memory_bytes,
        }
        click.echo(json.dumps({"name": "estimate", "request": request, "rows": rows}, indent=2))
    else:
        click.echo(_table(training, rows))


def _node_of(profile: str, memory_is_given: bool) -> tuple[int, int]:
    """Returns the number of GPUs per node and the memory per GPU in GiB; 0 if it is unknown."""
    from ddp_hpc.sites.site import load_site

    site = load_site(profile)
    if not (memory_is_given or site.node.device_memory_gib):
        raise RequestError(
            f"profile {profile} does not define the memory per GPU of {site.title}. Use --gpu-memory-gib."
        )
    return site.node.devices, site.node.device_memory_gib


def _row(
    training: Training, strategy: str, ranks: int | None, gpus_per_node: int, gpu_memory_bytes: int | None
) -> dict[str, Any]:
    """Returns the bytes per rank of one strategy and, if the memory of a GPU is known, whether it fits.

    The smallest number of nodes is unknown if `gpus_per_node` is 0.
    """
    ranks = ranks or gpus_per_node or 1
    need = footprint(training, strategy, ranks)
    if STRATEGIES[strategy].one_rank:
        ranks = 1
    row = {"name": strategy, "ranks": ranks, **asdict(need), "total_bytes": need.total_bytes}
    row["all_ranks_bytes"] = need.total_bytes * ranks
    if gpu_memory_bytes:
        least = smallest_ranks(training, strategy, gpu_memory_bytes)
        row["fits"] = fits(training, strategy, ranks, gpu_memory_bytes)
        row["min_gpus"] = least
        if gpus_per_node:
            row["min_nodes"] = least and -(-least // gpus_per_node)
    return row


def _table(training: Training, rows: list[dict[str, Any]]) -> str:
    """Returns a table with one column per strategy. Rows that are 0 for all strategies are left out."""
    from ddp_hpc.base.text_table import Column, table
    from ddp_hpc.base.units import format_bytes

    precision = training.precision
    labels = {
        "parameters_bytes": f"parameters, {_DTYPES[precision.parameters]}",
        "master_copy_bytes": "master copy, float32",
        "gradients_bytes": f"gradients, {_DTYPES[precision.gradients]}",
        "optimizer_bytes": f"{training.optimizer} states, {_DTYPES[precision.states]}",
        "cast_weights_bytes": "weights cast by autocast",
        "gathered_bytes": "~ gathered layers",
        "activations_bytes": "~ activations",
        "backward_bytes": "~ layer backward",
        "logits_bytes": "~ logits",
        "optimizer_step_bytes": "~ optimizer step",
        "overhead_bytes": "~ overhead",
    }
    totals = {"total_bytes": "= on the GPU", "host_bytes": "in host memory", "all_ranks_bytes": "on all GPUs"}

    def line(label: str, key: str, write: Callable[[Any], str], if_zero: str = "-") -> Row:
        return {"": label} | {row["name"]: write(row[key]) if row[key] else if_zero for row in rows}

    shown = {key: label for key, label in labels.items() if any(row[key] for row in rows)} | totals
    lines = [line("ranks", "ranks", str)]
    lines += [line(label, key, format_bytes) for key, label in shown.items()]
    if "fits" in rows[0]:
        lines.append(line("fits", "fits", lambda _: "yes", "no"))
        lines.append(line("fewest GPUs", "min_gpus", str, "never"))
    if "min_nodes" in rows[0]:
        lines.append(line("fewest nodes", "min_nodes", str, "never"))
    names = [row["name"] for row in rows]
    return table([Column("", "per rank, ~ estimate"), *(Column(name, name) for name in names)], lines)
