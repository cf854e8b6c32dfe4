"""`ddp-hpc estimate`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.errors import RequestError

if TYPE_CHECKING:
    from ddp_hpc.batch.estimate import Machine, Training

# No float: 1e400 would be infinite, and a number of 10,000 digits takes its time.
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:e\+?\d{1,2})?)([kmbt]?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
_LARGEST = 10**18
_DTYPES = {4: "float32", 2: "bfloat16"}


def _count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001 - click's signature
    """A whole number from 1, also as 7e9 or 7B."""
    if value is None:
        return None
    number = _number(value)
    if number is None or number.denominator != 1 or not 1 <= number <= _LARGEST:
        raise RequestError(
            f"{param.opts[0]} {value[:40]!r} was given; a whole number from 1 to 1e18 is needed; "
            "write it as 7000000000, 7e9 or 7B"
        )
    return int(number)


def _gib(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001 - click's signature
    """The bytes of a number of GiB."""
    if value is None:
        return None
    number = _number(value)
    size = int((number or 0) * 2**30)
    if number is None or number > _LARGEST or (size == 0 and param.opts[0] != "--overhead-gib"):
        raise RequestError(
            f"{param.opts[0]} {value[:40]!r} was given; a number of GiB above 0 is needed, such as 40"
        )
    return size


def _number(text: str) -> Fraction | None:
    """The number exactly; None where the text is none."""
    match = _NUMBER.fullmatch(text.strip())
    return Fraction(match[1]) * 10 ** _POWERS[match[2].lower()] if match else None


@click.command("estimate")
@click.option(
    "--params",
    callback=_count,
    metavar="N",
    required=True,
    help="Parameters of the model: 7000000000, 7e9 or 7B.",
)
@click.option("--layers", callback=_count, metavar="N", required=True, help="Transformer layers.")
@click.option("--hidden", callback=_count, metavar="N", required=True, help="Hidden size.")
@click.option("--seq", callback=_count, metavar="N", required=True, help="Sequence length.")
@click.option(
    "--batch", callback=_count, metavar="N", required=True, help="Samples a rank holds at once (micro-batch)."
)
@click.option("--ffn", callback=_count, metavar="N", help="Width of the MLP.  [4 x hidden]")
@click.option("--heads", callback=_count, metavar="N", help="Attention heads; needed for --attention stored.")
@click.option("--vocab", callback=_count, metavar="N", help="Vocabulary; adds the logits.")
@click.option(
    "--dtype",
    default="fp32",
    show_default=True,
    metavar="fp32|bf16|amp|mixed",
    help="amp: autocast over float32 parameters; mixed: bfloat16, float32 master copy. float16: as bf16.",
)
@click.option("--optimizer", default="adam", show_default=True, metavar="sgd|momentum|adam|adamw")
@click.option(
    "--attention",
    default="flash",
    show_default=True,
    metavar="flash|stored",
    help="stored: seq x seq scores of each head are kept.",
)
@click.option("--dropout", is_flag=True, help="Count what dropout keeps.")
@click.option(
    "--checkpointing", is_flag=True, help="Keep the layers' inputs alone, and compute the rest again."
)
@click.option("--no-bucket-view", is_flag=True, help="DDP without gradient_as_bucket_view.")
@click.option(
    "--fused", is_flag=True, help="Adam with fused=True, as ddp_hpc.train has it on GPUs: no temporaries."
)
@click.option("--strategy", metavar="NAME", help="One alone of single, ddp, zero1, fsdp, fsdp-offload.")
@click.option("--ranks", callback=_count, metavar="N", help="Ranks, one a GPU.  [the GPUs of a node]")
@click.option(
    "--profile", metavar="NAME", help="The site whose nodes are meant: see `ddp-hpc profiles list`."
)
@click.option("--gpus-per-node", callback=_count, metavar="N", help="[the profile's, else 1]")
@click.option(
    "--gpu-memory-gib",
    "gpu_memory_bytes",
    callback=_gib,
    metavar="GIB",
    help="Memory of a GPU: says what fits.  [the profile's]",
)
@click.option(
    "--host-memory-gib",
    "host_memory_bytes",
    callback=_gib,
    metavar="GIB",
    help="Memory of a node, which fsdp-offload fills.",
)
@click.option(
    "--overhead-gib",
    "overhead_bytes",
    callback=_gib,
    metavar="GIB",
    default="2",
    show_default=True,
    help="For the CUDA context, NCCL and fragments.",
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(
    strategy: str | None,
    ranks: int | None,
    profile: str | None,
    gpus_per_node: int | None,
    gpu_memory_bytes: int | None,
    host_memory_bytes: int | None,
    no_bucket_view: bool,
    as_json: bool,
    **sizes: Any,
) -> None:
    """How much memory training a Transformer takes a rank, by state, precision and strategy.

    Parameters, gradients and optimizer states are exact; the rest is an estimate: see docs/estimate.md.

    \b
    Examples:
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype amp
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype mixed \\
          --checkpointing --vocab 32000 --profile polaris
      ddp-hpc estimate --params 7B --layers 32 --hidden 4096 --seq 4096 --batch 1 --dtype mixed \\
          --gpus-per-node 8 --gpu-memory-gib 80 --ranks 64
      ddp-hpc estimate --params 1e12 --layers 120 --hidden 12288 --seq 2048 --batch 1 --strategy fsdp --json
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.batch.estimate import STRATEGIES, Machine, Training

    training = Training(**sizes, bucket_view=not no_bucket_view)
    if profile:
        of_profile = _node_of(profile, known=bool(gpus_per_node and gpu_memory_bytes))
        gpus_per_node, gpu_memory_bytes = gpus_per_node or of_profile[0], gpu_memory_bytes or of_profile[1]
    gpus_per_node = gpus_per_node or 1
    if host_memory_bytes and not gpu_memory_bytes:
        raise RequestError("--host-memory-gib says what fits beside --gpu-memory-gib; give both")
    machine = None
    if gpu_memory_bytes:
        machine = Machine(
            gpu_memory_bytes=gpu_memory_bytes,
            gpus_per_node=gpus_per_node,
            host_memory_bytes=host_memory_bytes,
        )
    by_size = training.params_of_layers + (training.vocab or 0) * training.hidden
    if not by_size // 2 <= training.params <= by_size * 2:
        click.echo(
            f"warning: --params {training.params:.3g}, but layers of these sizes have about {by_size:.3g}",
            err=True,
        )
    names = [strategy] if strategy else list(STRATEGIES)
    rows = [_row(training, name, ranks or gpus_per_node, machine) for name in names]
    if as_json:
        request = {**asdict(training), "gpus_per_node": gpus_per_node, "gpu_memory_bytes": gpu_memory_bytes}
        request["host_memory_bytes"] = host_memory_bytes
        click.echo(json.dumps({"name": "estimate", "request": request, "rows": rows}, indent=2))
    else:
        click.echo(_table(training, rows))


def _node_of(profile: str, *, known: bool) -> tuple[int, int]:
    """GPUs of a node of that site, and bytes of one; whatever they are where the user has said both."""
    from ddp_hpc.batch.site import load_site

    site = load_site(profile)
    if not known and not (site.node.devices and site.node.device_memory_gib):
        raise RequestError(
            f"profile {profile} does not say how many GPUs a node of {site.title} has, or their memory; "
            "say it with --gpus-per-node and --gpu-memory-gib"
        )
    return site.node.devices, site.node.device_memory_gib * 2**30


def _row(training: Training, strategy: str, ranks: int, machine: Machine | None) -> dict[str, Any]:
    """One strategy, flat: bytes a rank, and what fits where the machine is known."""
    from ddp_hpc.batch.estimate import STRATEGIES, fits, footprint, smallest_ranks

    need = footprint(training, strategy, ranks)
    if STRATEGIES[strategy].one_rank:
        ranks = 1
    row = {"name": strategy, "ranks": ranks, **asdict(need), "total_bytes": need.total_bytes}
    row["all_ranks_bytes"] = need.total_bytes * ranks
    if machine:
        least = smallest_ranks(training, strategy, machine)
        row["fits"] = fits(training, strategy, ranks, machine)
        row["min_gpus"] = least
        row["min_nodes"] = least and -(-least // machine.gpus_per_node)
    return row


def _table(training: Training, rows: list[dict[str, Any]]) -> str:
    """A column a strategy; states that nobody keeps are left out."""
    from ddp_hpc.units import format_bytes

    precision = training.precision
    labels = {
        "parameters_bytes": f"parameters, {_DTYPES[precision.parameters]}",
        "master_copy_bytes": "master copy, float32",
        "gradients_bytes": f"gradients, {_DTYPES[precision.gradients]}",
        "optimizer_bytes": f"{training.optimizer} states, {_DTYPES[precision.states]}",
        "ddp_buckets_bytes": "DDP buckets",
        "cast_weights_bytes": "weights cast by autocast",
        "gathered_bytes": "~ gathered layers",
        "activations_bytes": "~ activations",
        "backward_bytes": "~ a layer's backward",
        "logits_bytes": "~ logits",
        "optimizer_step_bytes": "~ optimizer step",
        "overhead_bytes": "~ overhead",
    }
    lines = [
        ["a rank, ~ estimated", *(row["name"] for row in rows)],
        ["ranks", *(str(row["ranks"]) for row in rows)],
    ]
    lines += [
        [label, *(format_bytes(row[key]) if row[key] else "-" for row in rows)]
        for key, label in labels.items()
        if any(row[key] for row in rows)
    ]
    shown = {"total_bytes": "= on the GPU", "host_bytes": "in host memory", "all_ranks_bytes": "on all GPUs"}
    lines += [
        [label, *(format_bytes(row[key]) if row[key] else "-" for row in rows)]
        for key, label in shown.items()
    ]
    if "fits" in rows[0]:
        lines.append(["fits", *("yes" if row["fits"] else "no" for row in rows)])
        lines.append(["fewest GPUs", *(str(row["min_gpus"] or "never") for row in rows)])
        lines.append(["fewest nodes", *(str(row["min_nodes"] or "never") for row in rows)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows) + 1)]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    )
