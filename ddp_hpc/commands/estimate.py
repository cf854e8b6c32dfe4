"""The command `ddp-hpc estimate`, which estimates the memory that a training needs per rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.completion import complete_profiles

if TYPE_CHECKING:
    from ddp_hpc.base.text_table import Row
    from ddp_hpc.estimate.memory import Machine, Training

# A float would be infinite for 1e400. The number of digits is limited because Fraction is slow for long ones.
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:e\+?\d{1,2})?)([kmbt]?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
_LARGEST = 10**18
_DTYPES = {4: "float32", 2: "bfloat16"}


def _count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001 - click's signature
    """Parses a whole number of at least 1, also written as 7e9 or 7B."""
    if value is None:
        return None
    number = _number(value)
    if number is None or number.denominator != 1 or not 1 <= number <= _LARGEST:
        raise RequestError(
            f"{param.opts[0]} must be a whole number from 1 to 1e18, such as 7000000000, 7e9 or 7B "
            f"(got {value[:40]!r})"
        )
    return int(number)


def _gib(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001 - click's signature
    """Converts a number of GiB to bytes."""
    if value is None:
        return None
    number = _number(value)
    size = int((number or 0) * 2**30)
    if number is None or number > _LARGEST or (size == 0 and param.opts[0] != "--overhead-gib"):
        raise RequestError(
            f"{param.opts[0]} must be a number of GiB greater than 0, such as 40 (got {value[:40]!r})"
        )
    return size


def _number(text: str) -> Fraction | None:
    """Returns the exact number, or None if the text is not a number."""
    match = _NUMBER.fullmatch(text.strip())
    return Fraction(match[1]) * 10 ** _POWERS[match[2].lower()] if match else None


@click.command("estimate")
@click.option(
    "--params",
    callback=_count,
    metavar="N",
    required=True,
    help="Number of model parameters, for example 7000000000, 7e9 or 7B.",
)
@click.option("--layers", callback=_count, metavar="N", required=True, help="Number of Transformer layers.")
@click.option("--hidden", callback=_count, metavar="N", required=True, help="Hidden size of the model.")
@click.option("--seq", callback=_count, metavar="N", required=True, help="Sequence length.")
@click.option(
    "--batch", callback=_count, metavar="N", required=True, help="Number of samples per rank and micro-batch."
)
@click.option(
    "--ffn", callback=_count, metavar="N", help="Width of the MLP in each layer.  [default: 4 x hidden]"
)
@click.option(
    "--vocab",
    callback=_count,
    metavar="N",
    help="Vocabulary size. If it is given, the estimate includes the logits.",
)
@click.option(
    "--dtype",
    default="fp32",
    show_default=True,
    metavar="fp32|bf16|amp|mixed",
    help="Training precision. amp: autocast with float32 parameters; mixed: bfloat16 with a "
    "float32 master copy.",
)
@click.option(
    "--optimizer",
    default="adam",
    show_default=True,
    metavar="sgd|momentum|adam|adamw",
    help="Optimizer used for training.",
)
@click.option("--dropout", is_flag=True, help="Include the memory of the dropout masks.")
@click.option(
    "--checkpointing",
    is_flag=True,
    help="Activation checkpointing: keep only the layers' inputs and recompute the rest.",
)
@click.option(
    "--fused",
    is_flag=True,
    help="Assume Adam with fused=True, which needs no temporary buffers; ddp_hpc.train uses it on GPUs.",
)
@click.option(
    "--strategy", metavar="NAME", help="Show only this strategy: single, ddp, zero1, fsdp or fsdp-offload."
)
@click.option(
    "--ranks",
    callback=_count,
    metavar="N",
    help="Number of ranks, one per GPU.  [default: the number of GPUs per node]",
)
@click.option(
    "--profile",
    shell_complete=complete_profiles,
    metavar="NAME",
    help="Site profile that defines the number of GPUs per node and the memory per GPU; see "
    "`ddp-hpc profiles list`.",
)
@click.option(
    "--gpus-per-node",
    callback=_count,
    metavar="N",
    help="Number of GPUs per node.  [default: from the profile, or 1]",
)
@click.option(
    "--gpu-memory-gib",
    "gpu_memory_bytes",
    callback=_gib,
    metavar="GIB",
    help="Memory per GPU in GiB. If it is known, the output shows which strategies fit.  [default: from the "
    "profile]",
)
@click.option(
    "--host-memory-gib",
    "host_memory_bytes",
    callback=_gib,
    metavar="GIB",
    help="Host memory per node in GiB, which fsdp-offload uses.",
)
@click.option(
    "--overhead-gib",
    "overhead_bytes",
    callback=_gib,
    metavar="GIB",
    default="2",
    show_default=True,
    help="Memory per GPU in GiB that is reserved for the CUDA context, NCCL and fragmentation.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def command(
    strategy: str | None,
    ranks: int | None,
    profile: str | None,
    gpus_per_node: int | None,
    gpu_memory_bytes: int | None,
    host_memory_bytes: int | None,
    as_json: bool,
    **sizes: Any,
) -> None:
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
    from ddp_hpc.estimate.memory import STRATEGIES, Machine, Training

    training = Training(**sizes)
    if profile:
        of_profile = _node_of(profile, bool(gpu_memory_bytes), bool(gpus_per_node or not host_memory_bytes))
        gpus_per_node, gpu_memory_bytes = gpus_per_node or of_profile[0], gpu_memory_bytes or of_profile[1]
    gpus_per_node = 1 if gpus_per_node is None else gpus_per_node  # 0 if the nodes of the site differ
    if host_memory_bytes and not gpu_memory_bytes:
        raise RequestError("--host-memory-gib requires --gpu-memory-gib. Give both options.")
    machine = None
    if gpu_memory_bytes:
        machine = Machine(
            gpu_memory_bytes=gpu_memory_bytes,
            gpus_per_node=gpus_per_node or 1,
            host_memory_bytes=host_memory_bytes,
        )
    by_size = training.params_of_layers + (training.vocab or 0) * training.hidden
    if not by_size // 2 <= training.params <= by_size * 2:
        click.echo(
            f"warning: --params is {training.params:.3g}, but these layers have {by_size:.3g} parameters",
            err=True,
        )
    names = [strategy] if strategy else list(STRATEGIES)
    rows = [_row(training, name, ranks, gpus_per_node, machine) for name in names]
    if as_json:
        request = {
            **asdict(training),
            "gpus_per_node": gpus_per_node or None,
            "gpu_memory_bytes": gpu_memory_bytes,
        }
        request["host_memory_bytes"] = host_memory_bytes
        click.echo(json.dumps({"name": "estimate", "request": request, "rows": rows}, indent=2))
    else:
        click.echo(_table(training, rows))


def _node_of(profile: str, memory_is_given: bool, devices_are_optional: bool) -> tuple[int, int]:
    """Returns the number of GPUs per node and the bytes of memory per GPU; 0 if it is unknown."""
    from ddp_hpc.sites.site import load_site

    site = load_site(profile)
    if not (memory_is_given or site.node.device_memory_gib):
        raise RequestError(
            f"profile {profile} does not define the memory per GPU of {site.title}. Use --gpu-memory-gib."
        )
    if not (devices_are_optional or site.node.devices):
        raise RequestError(
            f"profile {profile} does not define the number of GPUs per node of {site.title}, which "
            "--host-memory-gib requires. Use --gpus-per-node."
        )
    return site.node.devices, site.node.device_memory_gib * 2**30


def _row(
    training: Training, strategy: str, ranks: int | None, gpus_per_node: int, machine: Machine | None
) -> dict[str, Any]:
    """Returns the bytes per rank of one strategy and, if the machine is known, whether it fits.

    The smallest number of nodes is unknown if `gpus_per_node` is 0.
    """
    from ddp_hpc.estimate.memory import STRATEGIES, fits, footprint, smallest_ranks

    ranks = ranks or gpus_per_node or 1
    need = footprint(training, strategy, ranks)
    if STRATEGIES[strategy].one_rank:
        ranks = 1
    row = {"name": strategy, "ranks": ranks, **asdict(need), "total_bytes": need.total_bytes}
    row["all_ranks_bytes"] = need.total_bytes * ranks
    if machine:
        least = smallest_ranks(training, strategy, machine)
        row["fits"] = fits(training, strategy, ranks, machine)
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
