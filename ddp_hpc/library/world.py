"""The ranks that the launcher started, connected, for the body of a `with` in someone's own script.

torch is imported when the ranks have found each other, unless the script has done it before.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_hpc.errors import EXIT_AGAIN, EXIT_DONE, RequestError
from ddp_hpc.training.config import BACKENDS, DEVICES, TrainConfig
from ddp_hpc.training.ending import Parts, end_stopped, fail
from ddp_hpc.training.session import introduce, session, stacks_of_run, start_watching
from ddp_hpc.training.stopping import SIGNALS
from ddp_hpc.world.topology import DISCOVERIES

if TYPE_CHECKING:
    import torch

    from ddp_hpc.library.loader import Data, WorldLoader
    from ddp_hpc.training.group import Group
    from ddp_hpc.training.progress import Progress
    from ddp_hpc.training.strategies import Strategy

T = TypeVar("T")

# The last one turns the process into a torchrun of `ddp_hpc.train`.
_DISCOVERIES = tuple(name for name in DISCOVERIES if name != "device_count")
_current: ConnectedWorld | None = None


class ConnectedWorld:
    """This process among the ranks. Made by `ddp_hpc.distributed`."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    device: torch.device
    """Of this rank: GPU local_rank, else the CPU."""

    def __init__(self, config: TrainConfig, group: Group, parts: Parts, progress: Progress) -> None:
        world = group.world
        hosts = list(dict.fromkeys(group.comm.allgather(world.hostname)))
        self.rank, self.world_size, self.local_rank = world.rank, world.world_size, world.local_rank
        self.node_rank = hosts.index(world.hostname) if world.node_rank is None else world.node_rank
        self.num_nodes = len(hosts) if world.num_nodes is None else world.num_nodes
        self.device = group.device
        # For the other modules of the library.
        self.config, self.group, self.parts, self.progress = config, group, parts, progress
        self.shared: list[Strategy] = []
        self._heart_step = 0
        self.stopped = ""
        """Why the script is to end before its work is done, its state saved."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints a line, on rank 0 alone."""
        if self.is_first:
            print(text, flush=True)  # noqa: T201 - what it is for

    def barrier(self) -> None:
        """Returns once all ranks have come. Collective: every rank must call this.

        Raises:
            RendezvousError: some did not come within `timeout_s`; on rank 0 the words name them.
        """
        self.group.comm.barrier("world.barrier()")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks, in place, on `device`. Collective: every rank must call this."""
        return self.group.sum(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's values, alike in shape and on `device`: (world_size, ...).

        Collective: every rank must call this.
        """
        return self.group.gather(values)

    def broadcast(self, value: T) -> T:
        """Rank 0's value: a small one that JSON can tell (numbers, text, lists, dicts).

        Collective: every rank must call this.
        """
        return self.group.comm.bcast(value)

    def loader(
        self,
        data: Data,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int = 1,
        start_step: int = 0,
        workers: int = 0,
        src_key: str = "src",
        tgt_key: str = "tgt",
    ) -> WorldLoader:
        """This rank's batches on its device, for one `for` over all epochs.

        The order is a function of (seed, epoch): a step sees the same samples whatever the number of
        ranks, as long as batch_size * world_size is the same. No sample is repeated or left out.

        Collective: every rank must call this.

        Args:
            data: a .h5, .pt or .safetensors file, or a pair of tensors or arrays (samples, ...).
            batch_size: samples a rank.
            shuffle: a new order each epoch.
            seed: of the orders.
            epochs: passes over the data.
            start_step: so many steps are done already.
            workers: processes a rank that read, for compressed files; 0: a thread.
            src_key: the file's dataset of inputs.
            tgt_key: the file's dataset of targets.

        Raises:
            RequestError: the data is not what it has to be, or a number makes no sense.
        """
        from ddp_hpc.library.loader import open_loader

        return open_loader(
            self,
            data,
            TrainConfig(
                data=data if isinstance(data, Path) else Path(data) if isinstance(data, str) else None,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
                epochs=epochs,
                workers=workers,
                src_key=src_key,
                tgt_key=tgt_key,
                timeout_s=self.config.timeout_s,
            ),
            start_step,
        )

    def at(self, step: int, phase: str) -> None:
        """Tells the heartbeat where the script is. For the other modules of the library."""
        # A loop within a step, or after another one, counts from 1 again: who is behind is not to be
        # mistaken for who is ahead.
        self._heart_step = max(self._heart_step, step)
        if self.parts.heart is not None:
            self.parts.heart.at(self._heart_step, phase)


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
) -> Iterator[ConnectedWorld]:
    """The ranks that mpiexec, srun or torchrun started, connected; or one process alone.

    An error in the body of one rank ends all ranks, with that rank's words alone and its exit code:
    2 for a RequestError, 130 for Ctrl-C, else 1. A world of one is a Python program like any other: its
    errors are raised, but for this package's, which become one line and SystemExit. Where snapshots
    stopped the work before its end, the process ends with 75 after the body.

    Collective: every rank must call this, in its main thread.

    Args:
        backend: auto (NCCL on GPUs, gloo on CPUs), nccl, gloo, mpi or xccl.
        device: auto, cuda, cpu or xpu.
        discovery: who says which rank this is: auto, torchrun, slurm, pals, ...
        threads: CPU threads a rank; None: the cores it may use.
        init_timeout_s: for all ranks to find each other.
        timeout_s: how long a rank waits for the others in one collective call.
        hang_timeout_s: how long a step of a `world.loader` or of snapshots may take before the job is
            ended, with the rank that hangs by name.
    """
    global _current
    if _current is not None:
        raise RequestError("ddp_hpc.distributed() is open already; a process has one world at a time")
    if threading.current_thread() is not threading.main_thread():
        raise RequestError("ddp_hpc.distributed() handles signals: call it in the process's main thread")
    parts = Parts(in_script=True)
    peaceful_exit: SystemExit | None = None
    with _signals_as_before():
        config = _config(
            parts,
            backend=backend,
            device=device,
            discovery=discovery,
            threads=threads,
            init_timeout_s=init_timeout_s,
            timeout_s=timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        try:
            with session(config, parts) as group:
                world = _current = _connect(config, group, parts)
                try:
                    yield world
                except SystemExit as end:
                    if end.code:
                        raise
                    peaceful_exit = end
                group.comm.barrier("the end of ddp_hpc.distributed()")
                if parts.heart is not None:
                    parts.heart.close()
        finally:
            _current = None
        if world.stopped:
            # torchrun would start again what ends with another code than 0; the run folder's `state` tells.
            if group.world.launcher == "torchrun":
                raise SystemExit(EXIT_DONE)
            if world.world_size == 1:
                raise SystemExit(EXIT_AGAIN)
            end_stopped(group.world)
    if peaceful_exit is not None:
        raise peaceful_exit


def current_world(what: str) -> ConnectedWorld:
    """The world of the `with` that is open.

    Raises:
        RequestError: there is none.
    """
    if _current is None:
        raise RequestError(f"{what} was called outside of ddp_hpc.distributed(); call it inside its `with`")
    return _current


def _config(parts: Parts, **options: Any) -> TrainConfig:
    try:
        for name, known in (("backend", BACKENDS), ("device", DEVICES), ("discovery", _DISCOVERIES)):
            if options[name] not in known:
                raise RequestError(f"{name}={options[name]!r}: unknown; one of {', '.join(known)}")
        return TrainConfig(**options)
    except RequestError as error:
        fail(error, parts, 0.0)


def _connect(config: TrainConfig, group: Group, parts: Parts) -> ConnectedWorld:
    """The world, watched, and said on rank 0. Collective: every rank must call this."""
    from ddp_hpc.training.progress import Progress

    # stdout is the script's own.
    progress = Progress(group.world.rank == 0, sys.stderr)
    introduce(group, progress)
    heart = start_watching(config, group, parts, stacks_of_run())
    heart.rest()
    if heart.note:
        progress.say(f"note: {heart.note}")
    return ConnectedWorld(config, group, parts, progress)


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """A script goes on after the `with`: its handlers come back."""
    before = {sig: signal.getsignal(sig) for sig in (*SIGNALS, signal.SIGCHLD)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            if handler is not None:  # one that C code has set cannot be set from here
                signal.signal(sig, handler)
