"""`ddp_hpc.distributed`: connects the ranks that the launcher started, for a user's script.

torch is imported after the ranks have found each other, unless the script imported it before.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ddp_hpc.base.errors import EXIT_DONE, EXIT_REQUEUE, RequestError
from ddp_hpc.base.option_names import OptionError, naming
from ddp_hpc.base.options import argument_names
from ddp_hpc.base.process_control import STOP_SIGNALS
from ddp_hpc.base.run_outcomes import REQUESTED
from ddp_hpc.discovery.rank_communication import first_text
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.run.end import end_stopped, fail
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.session import introduce, session, watching_of

if TYPE_CHECKING:
    import torch

    from ddp_hpc.library.batch import Batch
    from ddp_hpc.library.loader import WorldLoader
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.parallel.make_strategy import Strategy
    from ddp_hpc.training.process_group.group import Group
    from ddp_hpc.training.telemetry.progress import Progress

T = TypeVar("T")

_current: ConnectedWorld | None = None


class ConnectedWorld:
    """This process and its place among the ranks. Created by `ddp_hpc.distributed`."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    device: torch.device
    """The device of this rank: the GPU that its local rank selects, or the CPU."""

    def __init__(self, config: TrainConfig, group: Group, parts: Parts, progress: Progress) -> None:
        world = group.world
        node = group.comm.members(world.hostname, None)
        self.rank, self.world_size, self.local_rank = world.rank, world.world_size, world.local_rank
        self.node_rank = node.index if world.node_rank is None else world.node_rank
        self.num_nodes = node.num_groups if world.num_nodes is None else world.num_nodes
        self.device = group.device
        # Used by the other modules of ddp_hpc.library; not part of the public API.
        self.config, self.group, self.parts, self.progress = config, group, parts, progress
        self.shared: list[Strategy] = []
        self._heartbeat_step = 0
        self.stopped = ""
        """The reason why the run was stopped early, with its state saved; empty if it was not."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints a line on rank 0, and nothing on the other ranks."""
        if self.is_first:
            print(text, flush=True)  # noqa: T201 - printing is its purpose

    def barrier(self) -> None:
        """Waits until all ranks have called this. Collective: every rank must call this.

        Raises:
            RendezvousError: some ranks did not arrive within `timeout_s`; rank 0's message names them.
        """
        self.group.comm.barrier("world.barrier()")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values on `device` over the ranks, in place. Collective: every rank must call this."""
        return self.group.sum(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Returns every rank's values, of the same shape and on `device`, as one tensor (world_size, ...).

        Collective: every rank must call this.
        """
        return self.group.gather(values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of the ranks' values, such as the loss. Collective: every rank must call this.

        The mean of losses that were multiplied by `batch.weight` is the mean over all samples of the step.
        """
        return self.group.sum(values.detach().clone()) / self.world_size

    def gather_samples(self, values: Any, batch: Batch) -> Any:
        """Returns the values of all samples of a step, from all ranks and in the order of the samples.

        Unlike with `gather`, ranks can have different numbers of samples, and a sample that the loader has
        repeated for a rank without samples is omitted.

        Collective: every rank must call this.

        Args:
            values: a tensor of shape (samples, ...), such as the predictions, or a tuple or dict of tensors.
            batch: the batch of these samples.

        Raises:
            RequestError: a tensor has no axis of samples, or its other axes differ between ranks.
        """
        from ddp_hpc.library.gather_samples import gather_samples

        return gather_samples(self.group, values, batch)

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank. It must be small and JSON-serializable.

        Collective: every rank must call this.
        """
        return self.group.comm.bcast(value)

    def loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        epochs: int | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        workers: int | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        src_key: str = "src",
        tgt_key: str = "tgt",
    ) -> WorldLoader:
        """Returns an iterable of this rank's batches on its device, for one `for` loop over all epochs.

        The order is a function of (seed, epoch): a step uses the same samples for any number of ranks,
        as long as batch_size * world_size is the same. No sample is repeated or omitted.

        Collective: every rank must call this.

        Args:
            data: a Dataset; a DataLoader of it, whose own options are then used; a .h5, .pt or
                .safetensors file; or a pair (inputs, targets) of tensors or arrays (samples, ...).
            batch_size: samples per rank and step; 32 by default.
            shuffle: use a new order in each epoch; True by default.
            seed: random seed of the orders.
            epochs: number of passes over the data; 1 by default, or as many as `max_steps` needs.
            max_steps: number of steps over all epochs.
            start_step: number of steps that have been completed before.
            workers: processes that read ahead, for a Dataset or a compressed file; 0 by default.
            drop_last: omit the smaller last step of an epoch; False by default.
            collate_fn: combines the samples of a Dataset to a batch; by default as in a DataLoader.
            src_key: name of the file's dataset of inputs.
            tgt_key: name of the file's dataset of targets.

        Raises:
            RequestError: the data or an argument is invalid.
        """
        from ddp_hpc.library.loader import open_loader

        own: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "workers": workers}
        own |= {"drop_last": drop_last, "collate_fn": collate_fn}
        epochs = epochs if epochs is not None else 1 if max_steps is None else sys.maxsize
        settings: dict[str, Any] = {"seed": seed, "epochs": epochs, "max_steps": max_steps}
        settings |= {"src_key": src_key, "tgt_key": tgt_key}
        return open_loader(self, data, own, settings, start_step)

    def at(self, step: int, phase: str) -> None:
        """Reports the script's position to the heartbeat. Used only by ddp_hpc.library."""
        # A nested or later loop counts its steps from 1 again, but the reported step must never decrease.
        self._heartbeat_step = max(self._heartbeat_step, step)
        if self.parts.heartbeat is not None:
            self.parts.heartbeat.at(self._heartbeat_step, phase)


@contextmanager
def distributed(
    *,
    backend: str = "auto",
    device: str = "auto",
    discovery: str = "auto",
    threads: int | None = None,
    init_timeout_s: float = 300.0,
    timeout_s: float = 1800.0,
    hang_timeout_s: float = 1800.0,
    cpu_offload: bool = False,
) -> Iterator[ConnectedWorld]:
    """Connects the ranks that mpiexec, srun or torchrun started. Without a launcher, there is one rank.

    An error in the body of one rank ends all ranks, with the error of that rank only and its exit code:
    2 for a RequestError, 130 for Ctrl-C, otherwise 1. With a single process, errors are raised as usual,
    except for errors of this package, which are printed on one line and raise SystemExit. If snapshots
    stopped the work early, or the body raises SystemExit(75), the process ends with exit code 75 after the
    body.

    Collective: every rank must call this, in its main thread.

    Args:
        backend: auto (NCCL on GPUs, gloo on CPUs), nccl, gloo, mpi or xccl.
        device: auto, cuda, cpu or xpu.
        discovery: source of rank and world size: auto, torchrun, slurm, pals, ...
        threads: CPU threads per rank; None: the number of cores that the rank may use.
        init_timeout_s: time limit for all ranks to find each other.
        timeout_s: time limit for a rank to wait for the others in one collective call.
        hang_timeout_s: time limit for a step with `world.loader` or snapshots; names the rank that hangs.
        cpu_offload: on GPUs, also connect the ranks with gloo; `wrap(..., cpu_offload=True)` requires this.
    """
    global _current
    _check_not_nested()
    parts = Parts(in_script=True)
    exit_without_error: SystemExit | None = None
    with _restored_signal_handlers(), naming(argument_names(TrainConfig)):
        config = _config(
            parts,
            backend=backend,
            device=device,
            discovery=discovery,
            threads=threads,
            init_timeout=init_timeout_s,
            timeout=timeout_s,
            hang_timeout=hang_timeout_s,
        )
        try:
            with session(config.process_group, parts, watching_of(config), cpu_offload=cpu_offload) as both:
                world = _current = _make_world(config, *both, parts)
                try:
                    yield world
                except SystemExit as end:
                    exit_without_error = _end_without_error(end, world)
                _leave(world)
        finally:
            _current = None
        if world.stopped:
            _end_stopped(world)
    if exit_without_error is not None:
        raise exit_without_error


def _check_not_nested() -> None:
    if _current is not None:
        raise RequestError("ddp_hpc.distributed() is already active; use the active world")
    if threading.current_thread() is not threading.main_thread():
        raise RequestError("ddp_hpc.distributed() handles signals; call it in the process's main thread")


def _end_without_error(end: SystemExit, world: ConnectedWorld) -> SystemExit:
    """Returns the SystemExit of a script that has succeeded or requests another job; raises any other
    exception.
    """
    if end.code and end.code != EXIT_REQUEUE:
        raise end
    if end.code == EXIT_REQUEUE and not world.stopped:
        world.stopped = REQUESTED.reason
    return end


def _leave(world: ConnectedWorld) -> None:
    """Waits for all ranks and ends the heartbeat. Collective: every rank must call this."""
    world.group.comm.barrier("the end of ddp_hpc.distributed()")
    # If one rank has requested another job, all ranks stop: otherwise, the launcher would kill the ranks that
    # are still running.
    world.stopped = world.group.comm.combine(world.stopped, first_text)
    if world.parts.heartbeat is not None:
        world.parts.heartbeat.close()


def _end_stopped(world: ConnectedWorld) -> NoReturn:
    """Ends a process whose run stopped early, with its state saved. Collective."""
    # torchrun restarts ranks that exit with a code other than 0. Job scripts read the result in the run
    # directory's file `state` instead.
    if world.group.world.launcher == "torchrun":
        raise SystemExit(EXIT_DONE)
    if world.world_size == 1:
        raise SystemExit(EXIT_REQUEUE)
    end_stopped(world.group.world)


def active_world() -> ConnectedWorld | None:
    """Returns the world of the active `with ddp_hpc.distributed()`, or None."""
    return _current


def current_world(what: str) -> ConnectedWorld:
    """Returns the world of the active `with ddp_hpc.distributed()`.

    Raises:
        RequestError: no `with ddp_hpc.distributed()` is active.
    """
    if _current is None:
        raise RequestError(
            f"{what} was called outside of `with ddp_hpc.distributed()`; call it inside that block"
        )
    return _current


def _config(parts: Parts, **options: Any) -> TrainConfig:
    try:
        if options["discovery"] == "device_count":
            raise OptionError("discovery", "device_count", "would start ddp_hpc.train", "Use torchrun")
        return TrainConfig.of(**options)
    except RequestError as error:
        fail(error, parts, 0.0)


def _make_world(config: TrainConfig, group: Group, heartbeat: Heartbeat, parts: Parts) -> ConnectedWorld:
    """Returns the world; rank 0 prints a summary. From now on, the script may take any time between loops."""
    from ddp_hpc.training.telemetry.progress import Progress

    # Messages are not printed to stdout, because only the script may write there.
    progress = Progress(group.world.rank == 0, sys.stderr)
    introduce(group, heartbeat, progress)
    heartbeat.rest()
    return ConnectedWorld(config, group, parts, progress)


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers after the `with` block, because the script continues."""
    before = {sig: signal.getsignal(sig) for sig in (*STOP_SIGNALS, signal.SIGCHLD)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            if handler is not None:  # a handler set by C code cannot be restored from Python
                signal.signal(sig, handler)
