"""`python -m ddp_hpc.train`: parse, discover, rendezvous, ensure the data, train.

The same code whether one process was started or mpiexec, srun or torchrun
started many. Everything that does something lives below it: `training/session.py`
connects the ranks, `training/ending.py` turns errors into one line for the whole
job and an exit code.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from data_gen.recipe import parse_shape
from ddp_hpc import __version__
from ddp_hpc.errors import EXIT_INTERRUPTED, EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.training.claim import Claim
from ddp_hpc.training.config import (
    AMPS,
    BACKENDS,
    COMPILE_MODES,
    DEVICES,
    LR_SCALINGS,
    LR_SCHEDULES,
    MATMULS,
    OPTIMIZERS,
    PIPELINE_SCHEDULES,
    STRATEGIES,
    TrainConfig,
    parse_numbers,
    parse_option,
)
from ddp_hpc.training.ending import Parts, end_stopped, speak
from ddp_hpc.training.session import introduce, session, start_watching
from ddp_hpc.world.launch_env import peek_rank
from ddp_hpc.world.topology import DISCOVERIES

if TYPE_CHECKING:
    from ddp_hpc.training.group import Group
    from ddp_hpc.training.tracing import Trace

_EXAMPLES = """\b
Examples:
  python -m ddp_hpc.train --epochs 1
  mpiexec -n 8 python -m ddp_hpc.train
  srun --ntasks-per-node=4 python -m ddp_hpc.train --data train.h5
  torchrun --standalone --nproc-per-node 2 -m ddp_hpc.train --max-steps 20
  mpiexec -n 2 python -m ddp_hpc.train --model classifier --data data/digits.h5 --epochs 15
  mpiexec -n 2 python -m ddp_hpc.train --model mine:net --model-option width=64 --data train.h5
"""


def _shape(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else parse_shape(text)


def _model_options(
    _: click.Context, __: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, Any], ...]:
    return tuple(map(parse_option, texts))


def _window(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    return parse_numbers(option.opts[0], text)


def _ranks(_: click.Context, option: click.Parameter, text: str) -> frozenset[int] | None:
    return None if text == "all" else frozenset(parse_numbers(option.opts[0], text))


def _folder(_: click.Context, option: click.Parameter, text: str | None) -> Path | None:
    if text == "":  # which would be the current folder
        raise RequestError(f'{option.opts[0]} "" names no folder: its variable is empty or not set')
    return None if text is None else Path(text)


_PATH = click.Path(path_type=Path)


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100, "show_default": True})
@click.option(
    "--data", type=_PATH, help="File to train on: .h5, .pt or .safetensors. Without it, synthetic data."
)
@click.option("--data-dir", type=_PATH, default=Path("data"), help="Where synthetic data is made, once.")
@click.option(
    "--stage",
    callback=_folder,
    metavar="DIR",
    help="Copy the file once a node to this folder, such as $TMPDIR, and read it there.",
)
@click.option("--check-data", is_flag=True, help="First look for NaN and infinities in all samples.")
@click.option("--src-key", default="src", help="Dataset of the inputs.")
@click.option("--tgt-key", default="tgt", help="Dataset of the targets.")
@click.option("--num-samples", type=int, default=2048, help="Samples of synthetic data.")
@click.option(
    "--src-shape",
    callback=_shape,
    metavar="D1,D2,...",
    help="Shape of one input.  [default: 1,512; linear: 20]",
)
@click.option(
    "--tgt-shape",
    callback=_shape,
    metavar="D1,D2,...",
    help="Shape of one target.  [default: 20,512; linear: 1]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "float16", "bfloat16"]),
    help="Type of the data; float64 also trains in it.  [default: float32]",
)
@click.option(
    "--model",
    default="transformer",
    help="transformer, classifier, linear, decoder, or your own as package.module:factory "
    "(docs/own-model.md).",
)
@click.option(
    "--model-option",
    "model_options",
    callback=_model_options,
    metavar="NAME=VALUE",
    multiple=True,
    help="An argument of the factory, such as layers=6; may be given again.",
)
@click.option("--dropout", type=float, default=0.1, help="Share of activations dropped.")
@click.option("--epochs", type=int, default=10, help="Passes over the data.")
@click.option("--max-steps", type=int, help="Stop after this many steps, whatever --epochs says.")
@click.option("--batch-size", type=int, default=32, help="Samples a rank and micro-batch.")
@click.option("--shuffle/--no-shuffle", default=True, help="A new order of samples each epoch.")
@click.option(
    "--workers",
    type=int,
    default=0,
    help="Processes a rank that read data, for compressed files; 0: a thread.",
)
@click.option("--seed", type=int, default=0, help="Of the data, the parameters, the order and the dropout.")
@click.option("--lr", type=float, default=0.001, help="Adam's learning rate, for one rank.")
@click.option(
    "--lr-scaling", type=click.Choice(LR_SCALINGS), default="linear", help="How it grows with the ranks."
)
@click.option("--warmup-steps", type=int, default=0, help="Steps over which the rate rises to its value.")
@click.option("--accumulate", type=int, default=1, help="Micro-batches a step.")
@click.option("--clip-norm", type=float, help="Largest norm of the gradients.")
@click.option(
    "--lr-schedule",
    type=click.Choice(LR_SCHEDULES),
    default="constant",
    help="Of the rate, after the warm-up.",
)
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adam", help="sgd has momentum 0.9.")
@click.option("--weight-decay", type=float, default=0.0, help="Of matrices; biases and norms do not decay.")
@click.option(
    "--fused/--no-fused", default=None, help="Update all parameters in one pass.  [default: on a GPU]"
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="ddp",
    help="How ranks share the training: docs/strategies.md.",
)
@click.option(
    "--mesh", metavar="dp=2,tp=2", help="A grid of ranks of pp, dp, fsdp and tp, instead of --strategy."
)
@click.option(
    "--bucket-mib", type=float, help="DDP: gradients that are sent at once.  [25, and 1 for the first]"
)
@click.option("--static-graph", is_flag=True, help="DDP: every step uses the same parameters.")
@click.option(
    "--find-unused-parameters", is_flag=True, help="DDP: some parameters may be left out of a step."
)
@click.option(
    "--compress-gradients", type=click.Choice(("bf16", "fp16")), help="DDP: send gradients in this type."
)
@click.option("--sync-batchnorm", is_flag=True, help="DDP on GPUs: batch norms over all ranks.")
@click.option("--devices-per-rank", type=int, default=1, help="DDP: a replica over so many devices.")
@click.option("--cpu-offload", is_flag=True, help="FSDP on GPUs: keep what is not used in host memory.")
@click.option(
    "--activation-checkpointing", is_flag=True, help="Compute activations again instead of keeping them."
)
@click.option("--pipeline-chunks", type=int, help="Pipeline: parts of a batch.  [default: 2 a stage]")
@click.option(
    "--pipeline-schedule", type=click.Choice(PIPELINE_SCHEDULES), default="gpipe", help="Their order."
)
@click.option("--amp", type=click.Choice(AMPS), default="off", help="Mixed precision.")
@click.option(
    "--matmul-precision",
    type=click.Choice(MATMULS),
    default="highest",
    help="Of float32 products on a GPU; high and medium use TF32 and bfloat16.",
)
@click.option(
    "--compile",
    "compile",
    is_flag=False,
    flag_value="default",
    type=click.Choice(COMPILE_MODES),
    help="torch.compile the model, in this mode.",
)
@click.option(
    "--check-gradients", is_flag=True, help="Stop before a bad update, and name its layer and rank."
)
@click.option(
    "--discovery",
    type=click.Choice(DISCOVERIES),
    default="auto",
    metavar="NAME",
    help=("Who says which rank this is: auto, " + ", ".join(DISCOVERIES[1:]) + "."),
)
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", help="auto: NCCL on GPUs, gloo on CPUs."
)
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="What to compute on.")
@click.option("--threads", type=int, help="CPU threads a rank.  [default: the cores it may use]")
@click.option(
    "--init-timeout",
    "init_timeout_s",
    type=float,
    default=300.0,
    help=("Seconds for all ranks to find each other."),
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=1800.0,
    help=("Seconds a rank waits for the others in one collective, or for the data to be made."),
)
@click.option(
    "--snapshots/--no-snapshots",
    default=True,
    help="Whether a job script's training is saved at all; benchmarks need not be.",
)
@click.option(
    "--snapshot-dir",
    callback=_folder,
    metavar="DIR",
    help=(
        "Save the state of the training here, stop in time before the walltime, and go on from the newest "
        "snapshot.  [default: $DDP_HPC_RUN_DIR/snapshots in a job script, else nothing is saved]"
    ),
)
@click.option("--snapshot-every-steps", type=int, help="Save after every so many steps.")
@click.option(
    "--snapshot-every-s",
    type=float,
    default=600.0,
    help="Save when the last snapshot is so many seconds old.",
)
@click.option("--keep", type=int, default=3, help="Snapshots that are kept.")
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    type=float,
    default=600.0,
    help="Seconds without any progress after which the job is ended, with the rank that hangs by name.",
)
@click.option("--metrics", type=_PATH, help="JSON lines, one a step, written by rank 0.")
@click.option(
    "--tensorboard", type=_PATH, metavar="DIR", help="TensorBoard's event files, written by rank 0."
)
@click.option(
    "--metrics-hook",
    metavar="MODULE:FUNCTION",
    help="Your function, called on rank 0 with each step's numbers, for other trackers.",
)
@click.option(
    "--skew-limit", type=float, default=1.5, help="A rank so many times slower than others is named."
)
@click.option(
    "--trace-dir",
    callback=_folder,
    metavar="DIR",
    help="Chrome traces and tables of torch.profiler, one a rank, of some steps.",
)
@click.option(
    "--trace-window",
    callback=_window,
    default="1,1,2,1",
    metavar="WAIT,WARMUP,ACTIVE,REPEAT",
    help="Steps to leave out, to warm the profiler up and to record, and how often.",
)
@click.option(
    "--trace-ranks",
    callback=_ranks,
    default="all",
    metavar="all|0|0,7",
    help="Ranks that record.",
)
@click.option("--trace-stacks", is_flag=True, help="Record the Python lines too: steps take longer.")
@click.option("--trace-flops", is_flag=True, help="Estimate FLOPs of matrix products and convolutions too.")
@click.option(
    "--trace-max-mib",
    type=float,
    default=1024,
    metavar="MIB",
    help="A rank's trace that is larger is not kept; its table is.",
)
@click.option("--summary", type=_PATH, help="One JSON object at the end, written by rank 0.")
@click.option("--log-every", type=int, default=10, help="Steps between two lines of progress.")
@click.version_option(__version__, prog_name="ddp-hpc")
def command(**options: Any) -> None:
    """Train a model on every rank that the launcher started, on GPUs with NCCL, on CPUs with gloo.

    With no option at all: the default Transformer on synthetic data, 10 epochs.
    """
    config = TrainConfig(**options)
    if config.discovery == "device_count":
        _become_torchrun()
    _run(config)


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    try:
        command.main(args=argv, standalone_mode=False)
        code = 0
    except click.exceptions.Exit as stop:  # --help and --version
        code = stop.exit_code
    except click.ClickException as error:
        # Every rank got the same wrong line: one of them says so.
        if peek_rank(os.environ) == 0:
            error.show()
        code = error.exit_code
    except RequestError as error:
        if peek_rank(os.environ) == 0:
            speak(Claim.FIRST, str(error), None)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = EXIT_INTERRUPTED
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Python would end with 120 where the log cannot be written: that is no failure of the training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _run(config: TrainConfig) -> None:
    """Everything after parsing. Leaves by ending the process where it fails."""
    parts = Parts()
    with session(config, parts) as group:
        stopped = _train(config, group, parts)
    # torchrun would start again what ends with another code than 0; the run folder's `state` tells.
    if stopped and group.world.launcher != "torchrun":
        end_stopped(group.world)


def _train(config: TrainConfig, group: Group, parts: Parts) -> str:
    """Data, training, summary; gives why it stopped before its end. Collective: every rank must call this."""
    from ddp_hpc.training.metrics import check_outputs
    from ddp_hpc.training.progress import Progress
    from ddp_hpc.training.setup import set_up
    from ddp_hpc.training.summary import write_summary
    from ddp_hpc.training.survival import survive
    from ddp_hpc.training.trainer import train

    world = group.world
    progress = Progress(world.rank == 0)
    introduce(group, progress)
    outputs = {"--metrics": config.metrics, "--summary": config.summary}
    group.agree(check_outputs(outputs, config.data) if world.rank == 0 else "", EXIT_WRONG_REQUEST)
    task, samples = set_up(config, group, progress)

    with survive(config, group, progress, last_words=parts.last_words, is_lost=parts.is_lost) as survival:
        parts.survival = survival
        heart = start_watching(config, group, parts, survival.stacks)
        if heart.note:
            progress.say(f"note: {heart.note}")
        with _traced(config, group) as trace:
            result = train(config, group, task, samples, progress, survival, heart, trace)
        heart.close()
    samples.close()
    here = f" ({result.steps - result.resumed_from} here)" if result.resumed_from else ""
    if result.stopped:
        progress.say(f"stopping, the state is saved, run it again to go on: {result.stopped}")
    how = f"stopped: {result.steps} of {result.total_steps}" if result.stopped else f"done: {result.steps}"
    progress.say(
        f"{how} steps{here}, {result.samples:,} samples in {result.wall_s:.1f} s, "
        f"{result.samples_per_s:.1f} samples/s, loss {result.first_loss:.6f} -> {result.final_loss:.6f}"
        + (
            f", {share:.0%} of the devices' peak FLOP/s"
            if (share := result.share_of_peak(world.world_size))
            else ""
        )
    )
    trained = result.steps > result.resumed_from
    # A run that was done already has no speed to tell, and its summary may be there.
    if config.summary is not None and world.rank == 0 and (trained or not config.summary.exists()):
        write_summary(config, group, samples, result)
    return result.stopped


def _traced(config: TrainConfig, group: Group) -> AbstractContextManager[Trace]:
    from ddp_hpc.training.tracing import traced

    rank = group.world.rank
    records = config.trace_ranks is None or rank in config.trace_ranks
    wait, warmup, active, repeat = config.trace_window
    folder = config.trace_dir if records else None
    return traced(
        folder, rank, group.world.world_size, group.device,
        wait=wait, warmup=warmup, active=active, repeat=repeat,
        with_stack=config.trace_stacks, with_flops=config.trace_flops, max_mib=config.trace_max_mib,
    )  # fmt: skip


def _become_torchrun() -> NoReturn:
    """One process turns into one rank per device of this node, by torchrun, which does that well."""
    import torch

    from ddp_hpc.training.devices import device_kind

    kind = device_kind("auto")
    count = 1 if kind == "cpu" else torch.get_device_module(kind).device_count()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # Of an option that is given twice the last counts.
    training = ["-m", "ddp_hpc.train", *sys.argv[1:], "--discovery", "auto"]
    os.execv(sys.executable, [sys.executable, *torchrun, *training])  # noqa: S606 - an argv list


if __name__ == "__main__":
    main()
