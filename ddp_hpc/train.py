"""`python -m ddp_hpc.train`: parses the options, discovers and connects the ranks, prepares the data, and
trains.

The same code runs in a single process and in ranks started by mpiexec, srun or torchrun.
`training/session.py` connects the ranks, and `training/run/end.py` converts errors to one
line for the whole job and an exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ddp_hpc.base.click_options import click_options, given_values
from ddp_hpc.base.errors import EXIT_INTERRUPTED, RequestError
from ddp_hpc.base.options import merged_values
from ddp_hpc.base.pip_extras import require
from ddp_hpc.base.process_control import set_umask
from ddp_hpc.base.toml_options import toml_options
from ddp_hpc.base.version import __version__
from ddp_hpc.discovery.launcher_environment import peek_rank
from ddp_hpc.discovery.node_check_request import run_check_if_requested
from ddp_hpc.discovery.rank_output import open_output
from ddp_hpc.discovery.rank_program import end_like, run_as_child
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.process_group.print_error import ErrorElection, print_error
from ddp_hpc.training.process_group.start_phases import STARTING
from ddp_hpc.training.run.end import end_stopped
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.session import introduce, session, watching_of

if TYPE_CHECKING:
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.process_group.group import Group
    from ddp_hpc.training.telemetry.config import TelemetryConfig
    from ddp_hpc.training.telemetry.profiler import Trace

_EXAMPLES = """\b
Examples:
  python -m ddp_hpc.train --epochs 1
  mpiexec -n 8 python -m ddp_hpc.train
  srun --ntasks-per-node=4 python -m ddp_hpc.train --data train.h5
  torchrun --standalone --nproc-per-node 2 -m ddp_hpc.train --max-steps 20
  mpiexec -n 2 python -m ddp_hpc.train --model classifier --data data/digits.h5 --epochs 15
  mpiexec -n 2 python -m ddp_hpc.train --model mine:net --model-option width=64 --data train.h5
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click_options(TrainConfig)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="TOML file that contains options; options on the command line take precedence.",
)
@click.version_option(__version__, prog_name="ddp-hpc")
def command(file: Path | None, **options: Any) -> None:
    """Train a model on all ranks that the launcher started: with NCCL on GPUs, and with gloo on CPUs.

    Without options, the command trains the default Transformer on synthetic data for 10 epochs.
    """
    require("ddp-hpc train", "train", "torch", "numpy")
    config = config_of(file, options)
    if config.process_group.discovery == "device_count":
        _become_torchrun()
    _run(config)


def config_of(file: Path | None, options: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration from the options on the command line and those in a TOML file.

    Raises:
        RequestError: the file or an option is invalid.
    """
    of_file = {} if file is None else toml_options(file, TrainConfig)
    return TrainConfig.of(**merged_values(TrainConfig, of_file, given_values(options)))


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    run_check_if_requested(os.environ)
    set_umask(os.environ)
    _keep_output()
    try:
        command.main(args=argv, prog_name="python -m ddp_hpc.train", standalone_mode=False)
        code = 0
    except click.exceptions.Exit as stop:  # raised by --help and --version
        code = stop.exit_code
    except click.ClickException as error:
        # All ranks have the same invalid command line, so only one reports it.
        if peek_rank(os.environ) == 0:
            error.show()
        code = error.exit_code
    except RequestError as error:
        if peek_rank(os.environ) == 0:
            print_error(ErrorElection.WON, str(error), None)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = EXIT_INTERRUPTED
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # If the log cannot be written, Python would exit with code 120, although the training succeeded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _keep_output() -> None:
    """With --rank-logs, runs this command line again as a child, and does not return.

    A parent also keeps the output of a rank that is killed. Under torchrun, it is `ddp-hpc exec`.
    """
    output = None if "TORCHELASTIC_RUN_ID" in os.environ else open_output(os.environ, peek_rank(os.environ))
    if output is not None:
        end_like(run_as_child(sys.executable, sys.orig_argv, os.environ, None, None, output))


def _run(config: TrainConfig) -> None:
    """Runs the training after the options have been parsed; on failure, ends the process."""
    parts = Parts()
    parallel = config.parallel
    gc.disable()  # _import_torch enables it again
    with session(
        config.process_group,
        parts,
        watching_of(config),
        devices_per_rank=parallel.devices_per_rank,
        cpu_offload=parallel.cpu_offload,
    ) as (group, heartbeat):
        _import_torch()
        stopped = _train(config, group, heartbeat, parts)
    # torchrun restarts ranks that exit with a code other than 0. Job scripts read the result in the run
    # directory's file `state` instead.
    if stopped and group.world.launcher != "torchrun":
        end_stopped(group.world)


def _import_torch() -> None:
    """Imports the modules that take longest to import, and excludes their objects from garbage collections.

    torch and torch._dynamo create 280,000 objects that are never freed. Garbage collections during the
    imports would examine them hundreds of times, which would take a third of the CPU time of a start.
    """
    import torch._dynamo  # noqa: F401 - torch's optimizers import it

    import ddp_hpc.training.trainer  # noqa: F401

    gc.freeze()
    gc.enable()


def _train(config: TrainConfig, group: Group, heartbeat: Heartbeat, parts: Parts) -> bool:
    """Trains, and returns the reason for an early stop, if any. Collective: every rank must call this."""
    from ddp_hpc.training.optimization.step_graph import check_device
    from ddp_hpc.training.run.lifecycle import manage_run
    from ddp_hpc.training.summary import write_summary
    from ddp_hpc.training.task_setup import set_up
    from ddp_hpc.training.telemetry.metrics_file import check_outputs
    from ddp_hpc.training.telemetry.progress import Progress
    from ddp_hpc.training.trainer import Trainer
    from ddp_hpc.training.tuned_options import choose_tuned

    world = group.world
    progress = Progress(world.rank == 0)
    introduce(group, heartbeat, progress)
    check_device(config.optimization, group)
    outputs = {"--metrics": config.telemetry.metrics, "--summary": config.telemetry.summary}
    group.agree(check_outputs(outputs, config.data.path) if world.rank == 0 else "")
    task, samples = set_up(config, group, progress)
    if config.optimization.tuned:
        tuned = choose_tuned(config, group)
        config = tuned.config
        progress.say(tuned.line)

    with manage_run(config, group, progress, parts) as lifecycle:
        heartbeat.prepare(STARTING)
        with _traced(config.telemetry, group) as trace:
            trainer = Trainer(config, group, task, samples, progress, lifecycle, heartbeat, trace)
            result = trainer.run()
        heartbeat.close()
    samples.close()
    here = f" ({result.steps - result.resumed_from} in this attempt)" if result.resumed_from else ""
    if result.stopped is not None:
        progress.say(result.stopped.line("State saved"))
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
    # Without new steps there is no speed to report: keep the summary of an earlier attempt.
    if (
        config.telemetry.summary is not None
        and world.rank == 0
        and (trained or not config.telemetry.summary.exists())
    ):
        write_summary(config, group, samples, result)
    return result.stopped is not None


def _traced(telemetry: TelemetryConfig, group: Group) -> AbstractContextManager[Trace]:
    from ddp_hpc.training.telemetry.profiler import record_trace

    return record_trace(
        telemetry.trace_dir, group.world.rank, group.world.world_size, group.device, telemetry.trace_window,
        ranks=telemetry.trace_ranks, with_stack=telemetry.trace_stacks, with_flops=telemetry.trace_flops,
    )  # fmt: skip


def _become_torchrun() -> NoReturn:
    """Replaces this process with torchrun, which starts one rank per device of this node."""
    import torch

    from ddp_hpc.training.process_group.devices import device_kind

    kind = device_kind("auto")
    count = 1 if kind == "cpu" else torch.get_device_module(kind).device_count()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # If --discovery is given twice, click uses the last value.
    training = ["-m", "ddp_hpc.train", *sys.argv[1:], "--discovery", "auto"]
    os.execv(sys.executable, [sys.executable, *torchrun, *training])  # noqa: S606 - an argv list


if __name__ == "__main__":
    main()
