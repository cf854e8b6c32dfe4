"""What carries a run over its walltime: where it goes on, when it saves and stops, what the run folder says.

All ranks take part; rank 0 reads, writes and looks at the clock. Without a snapshot
folder there is nothing to go on from: signals then end the run as they end any program.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddp_hpc.data.batches import Position
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import EXIT_FAILED, DataError, DdpHpcError, RequestError
from ddp_hpc.run_folder import RunState, read_state, write_state
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import Group
from ddp_hpc.training.metrics import versions
from ddp_hpc.training.progress import Progress
from ddp_hpc.training.random_state import seed_generators
from ddp_hpc.training.snapshot import Snapshot
from ddp_hpc.training.snapshots import SnapshotFolder
from ddp_hpc.training.state import TrainingState
from ddp_hpc.training.stopping import Stopping
from ddp_hpc.training.strategies.mesh import Mesh
from ddp_hpc.world.deadline import Deadline, find_deadline, kill_delay_s

# Of a busy parallel file system; counts until the first save was measured.
_SLOW_DISK_BYTES_PER_S = 200e6
_HUNG_DISK_S = 2.0
# Options that may change between attempts, and change the losses. Those that change the order are refused.
_SHAPING = ("data", "src_key", "tgt_key", "dropout", "lr", "lr_scaling", "warmup_steps", "clip_norm")
# Likewise, but snapshots of earlier versions do not have them.
_SHAPING_TOO = (
    "model_options",
    "lr_schedule",
    "optimizer",
    "weight_decay",
    "amp",
    "matmul_precision",
    "compress_gradients",
)


@dataclass(frozen=True)
class Places:
    """Where a run keeps what it needs to go on."""

    run: Path
    """The run folder, with the file `state`."""
    snapshots: Path


def places_of(config: TrainConfig, environ: dict[str, str]) -> Places | None:
    """`--snapshot-dir`, else `snapshots` in `DDP_HPC_RUN_DIR`; None with neither, or with --no-snapshots."""
    run = environ.get("DDP_HPC_RUN_DIR", "")
    if not config.snapshots or (config.snapshot_dir is None and not run):
        return None
    snapshots = config.snapshot_dir or Path(run) / "snapshots"
    return Places(Path(run) if run else snapshots, snapshots)


@dataclass(frozen=True)
class Losses:
    """The run's first and last loss, over all its attempts."""

    first: float = float("nan")
    last: float = float("nan")


@dataclass(frozen=True)
class Decision:
    """What all ranks do after this step."""

    save: bool
    stop: str
    """Why to stop here; empty: go on."""


class Survival:
    """This rank's part. Made by `survive`."""

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        progress: Progress,
        places: Places | None,
        stopping: Stopping | None,
    ) -> None:
        self._config = config
        self._group = group
        self._progress = progress
        self._places = places
        self._stopping = stopping
        self._folder: SnapshotFolder | None = None  # on rank 0, where there is one
        self._last_save_s = time.monotonic()
        self._talks = 0
        self._opened = False
        self._over = False  # by an error
        self._writing_state = threading.Lock()  # of the thread that saves; `failed` has the last word
        self._start_step: int | None = None  # until it is known
        self._lr_ranks = self._data_size = 1  # until then
        self._layout = ""

    @property
    def stacks(self) -> Path | None:
        """The folder for stacks of ranks that hang."""
        return None if self._places is None else self._places.run / "stacks"

    def open(self) -> Snapshot | None:
        """Locks the folder; rank 0 gets the newest good snapshot. Collective: every rank must call this.

        Raises:
            DataError: the folder is another job's, or nothing in it is good.
        """
        if self._places is None:
            return None
        problem, snapshot = "", None
        if self._group.world.rank == 0:
            try:
                self._folder = SnapshotFolder(
                    self._places.snapshots, self._config.keep, self._progress.say, self._on_saved
                )
                snapshot = self._folder.newest_good()
            except RequestError as error:
                problem = str(error)
        self._group.agree(problem, RequestError.exit_code)
        self._opened = True
        return snapshot

    def resume(
        self, snapshot: Snapshot | None, state: TrainingState, samples: Samples, mesh: Mesh
    ) -> tuple[Position, Losses, int]:
        """Where to go on, with everything as it was there, and for how many ranks the rate is scaled.

        With the same global batch that stays what it was: the losses do not change with the ranks.
        `mesh`: to which ranks, or groups of ranks, the samples of a step are dealt.
        Collective: every rank must call this.

        Raises:
            DataError: the snapshot is of another model, other data or another order.
        """
        group, problem = self._group, ""
        data_size = self._data_size = mesh.data_size
        self._layout = mesh.layout
        if snapshot is not None:
            try:
                state.check(snapshot.model, str(snapshot.path))
                self._check_run(snapshot, samples)
                self._check_optimizer(snapshot, state)
            except DataError as error:
                problem = str(error)
            except (KeyError, TypeError) as error:
                problem = f"{snapshot.path}: was not written by ddp-hpc: {error} is missing or wrong"
        group.agree(problem, RequestError.exit_code)
        about = group.comm.bcast(None if snapshot is None else snapshot.about)
        if about is None:
            position, losses, self._lr_ranks = Position(), Losses(), data_size
        else:
            position, losses = Position(**about["position"]), Losses(**about["losses"])
            same_batch = about["global_batch"] == self._global_batch()
            self._lr_ranks = about["lr_ranks"] if same_batch else data_size
            model_tensors = None if snapshot is None else snapshot.model
            training = None if snapshot is None else snapshot.training
            # Another layout's numbers would give ranks that share samples different dropout masks.
            same_layout = about.get("layout", f"pp=1,data={about['world_size']},tp=1") == self._layout
            exact = state.restore(model_tensors, training) and same_layout
            if not exact:
                # Deterministic, and of this place: not the numbers that earlier steps had.
                seed = self._config.rank_seed(mesh.data_rank) * 1_000_003 + position.step
                seed_generators(seed % 2**63)
            self._say_resumed(about, position, exact)
        if self._stopping is not None:
            # Adam holds two more of each parameter.
            num_bytes = 3 * sum(prod(shape) * dtype.itemsize for shape, dtype in state.whole.values())
            self._stopping.expect_save(num_bytes / _SLOW_DISK_BYTES_PER_S)
        self._start_step = position.step
        self._write_state("running", position.step, f"since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._last_save_s = time.monotonic()
        return position, losses, self._lr_ranks

    def signs(self, step_s: float) -> list[float]:
        """What this rank tells the others: its wish to stop, whether to save, how long a step takes.

        Raises:
            DdpHpcError: another job has taken the folder over.
        """
        if self._stopping is None:
            return [0.0, 0.0, step_s]
        if self._folder is not None and self._folder.lost:
            raise DdpHpcError(
                f"{self._folder.path}: another job has taken it over, as this one was silent for long "
                "(or its file .lock was removed); the run is that job's"
            )
        self._talks += 1
        if self._talks > 1:  # the first step allocates, connects and compiles
            self._stopping.measured(step_s=step_s)
        due = (
            self._folder is not None and time.monotonic() - self._last_save_s > self._config.snapshot_every_s
        )
        return [float(self._stopping.wish()), float(due), step_s]

    def evaluated(self, evaluation_s: float) -> None:
        """Tells how long nobody could ask to stop, as in a step."""
        if self._stopping is not None:
            self._stopping.measured(step_s=evaluation_s)

    def saves_at(self, step: int) -> bool:
        """Whether `--snapshot-every-steps` wants a snapshot after this step."""
        every = self._config.snapshot_every_steps
        return self._places is not None and every is not None and step % every == 0

    def decide(self, signs: list[list[float]], position: Position, last: bool) -> Decision:
        """The same on every rank, of all ranks' signs by rank."""
        if self._stopping is None:
            return Decision(save=False, stop="")
        wish, rank = next(((int(one[0]), rank) for rank, one in enumerate(signs) if one[0]), (0, 0))
        due = bool(signs[0][1]) or self.saves_at(position.step)
        stop = self._stopping.explain(wish, rank) if wish and not last else ""
        return Decision(save=due or last or bool(stop), stop=stop)

    def save(
        self,
        position: Position,
        losses: Losses,
        state: TrainingState,
        samples: Samples,
        tick: Callable[[], None],
    ) -> None:
        """Copies the state; a thread writes it. Collective: every rank must call this.

        `tick` is called every few seconds while the save before this one is waited for.
        """
        model, training = state.model_tensors(), state.training_tensors()
        self._last_save_s = time.monotonic()
        if self._folder is not None:
            about = {
                "position": asdict(position),
                "losses": asdict(losses),
                "model": self._config.model,
                "world_size": self._group.world.world_size,
                "layout": self._layout,
                "optimizer": type(state.optimizer).__name__,
                "global_batch": self._global_batch(),
                "lr_ranks": self._lr_ranks,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "config": _as_json(self._config),
                "versions": versions(),
                **self._order(samples),
            }
            self._folder.save(position.step, about, model, training, tick)

    def finish(self, position: Position, stop: str, tick: Callable[[], None]) -> None:
        """Waits for the last save and says in the run folder how the run ended. Collective.

        `tick` is called every few seconds where that takes long.

        Raises:
            DdpHpcError: the last state could not be saved.
        """
        if self._places is None:
            return
        problem = ""
        if self._folder is not None:
            saved = self._folder.wait(tick)
            if saved.step != position.step:
                problem = (
                    f"step {position.step} could not be saved in {self._places.snapshots}; "
                    f"the newest snapshot is of step {saved.step}; make room, then run it again"
                )
            else:
                self._write_state("again" if stop else "done", position.step, stop or "all steps are trained")
        self._group.agree(problem, EXIT_FAILED)

    def failed(self, reason: str, *, again: bool) -> None:
        """Says in the run folder that it failed; any rank may be the one to say it.

        `again`: a machine was at fault. Then the run is to go on, if this attempt saved anything.
        """
        self._over = True
        if self._places is None or not self._opened:
            return
        if self._folder is not None and self._folder.lost:
            return  # it is another job's state
        # A disk may hang, and this process must not hang with it: after that time without the lock.
        locked = self._writing_state.acquire(timeout=_HUNG_DISK_S)
        with suppress(DdpHpcError):  # there is a better error already
            self._write_failed(self._places.run, reason, again)
        if locked:
            self._writing_state.release()

    def close(self) -> None:
        """Lets others have the folder, once what is being written is complete."""
        if self._folder is not None:
            self._folder.close()

    def abandon(self) -> None:
        """Lets others have the folder at once: this process is about to end by an error."""
        self._over = True
        if self._folder is not None:
            self._folder.release()

    def _write_failed(self, run: Path, reason: str, again: bool) -> None:
        found = read_state(run)
        begun = self._start_step is not None
        if found is not None and (found.state == "done" or (begun and found.state != "running")):
            return  # what fails after the run's end, or after another rank's word, changes neither
        step = found.step if found is not None else 0
        goes_on = again and self._start_step is not None and step > self._start_step
        write_state(run, RunState("again" if goes_on else "failed", step, reason))

    def _on_saved(self, step: int) -> None:
        assert self._folder is not None
        if self._stopping is not None:
            self._stopping.measured(save_s=self._folder.saved.seconds)
        with self._writing_state:
            if self._over or (self._stopping is not None and self._stopping.is_lost()):
                return  # a rank has failed meanwhile, and its word stands
            self._write_state("running", step, "saved a snapshot")

    def _write_state(self, state: str, step: int, reason: str) -> None:
        if self._places is None or self._group.world.rank != 0:
            return
        try:
            write_state(self._places.run, RunState(state, step, reason))
        except DdpHpcError as error:
            self._progress.say(f"WARNING: {error}; job scripts and their chain will not know of step {step}")

    def _check_run(self, snapshot: Snapshot, samples: Samples) -> None:
        for name in _SHAPING:
            snapshot.about["config"][name]
        for name, kind in (("position", Position), ("losses", Losses)):
            kind(**snapshot.about[name])
        for name in ("world_size", "global_batch", "lr_ranks"):
            int(snapshot.about[name])
        for name, value in self._order(samples).items():
            if (theirs := snapshot.about.get(name)) != value:
                raise DataError(
                    f"{snapshot.path}: was made with {name.replace('_', ' ')} {theirs} and not {value}: "
                    "its order of samples would be another; give the same data and options, or name another "
                    "--snapshot-dir"
                )

    def _check_optimizer(self, snapshot: Snapshot, state: TrainingState) -> None:
        theirs, ours = snapshot.about.get("optimizer"), type(state.optimizer).__name__
        if theirs not in (None, ours) and {theirs, ours} != {"Adam", "AdamW"}:  # those keep the same tensors
            raise DataError(
                f"{snapshot.path}: was made with the optimizer {theirs} and not {ours}, which has another "
                "state; give the same one (--optimizer), or name another --snapshot-dir"
            )

    def _order(self, samples: Samples) -> dict[str, Any]:
        """What determines which sample comes when."""
        return {
            "num_samples": samples.num_samples,
            "seed": self._config.seed,
            "shuffle": self._config.shuffle,
        }

    def _global_batch(self) -> int:
        return self._config.batch_size * self._data_size * self._config.accumulate

    def _say_resumed(self, about: dict[str, Any], position: Position, exact: bool) -> None:
        world_size = self._group.world.world_size
        self._progress.say(
            f"going on after step {position.step} (epoch {position.epoch + 1}, "
            f"{position.begin:,} of its samples used)"
        )
        if about["world_size"] != world_size:
            self._progress.say(f"note: it ran on {about['world_size']} ranks, now on {world_size}")
        elif not exact:
            self._progress.say(
                "note: shared by ranks in another way, or on another kind of device: random numbers are "
                "others from here on"
            )
        if about["global_batch"] != self._global_batch():
            self._progress.say(
                f"note: a step had {about['global_batch']} samples and has {self._global_batch()} now; "
                "steps are counted on, and no sample of the epoch is used twice"
            )
        now = _as_json(self._config)
        before = {**now, **about["config"]}
        names = (*_SHAPING, *_SHAPING_TOO)
        others = [f"{name} {now[name]} (was {before[name]})" for name in names if now[name] != before[name]]
        if others:
            self._progress.say(f"note: other options than before: {', '.join(others)}")


def _as_json(config: TrainConfig) -> dict[str, Any]:
    values = asdict(config).items()
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in values}


@contextmanager
def survive(
    config: TrainConfig,
    group: Group,
    progress: Progress,
    *,
    last_words: Callable[[str], None],
    is_lost: Callable[[], bool],
) -> Iterator[Survival]:
    """The run's survival, with its signal handlers. Collective: every rank must call this.

    `last_words` and `is_lost` are those of `Stopping`.

    Raises:
        RequestError: a variable of the deadline is no time, or one that has passed.
    """
    environ = dict(os.environ)
    places = places_of(config, environ)
    found = group.comm.bcast(None if places is None else [str(places.run), str(places.snapshots)])
    places = None if found is None else Places(*map(Path, found))
    deadline, delay_s = _deadline(group, environ, saves=places is not None)
    if places is None:
        if deadline is not None and config.snapshots:
            left_min = (deadline.at_s - time.time()) / 60
            progress.say(f"note: the job ends in {left_min:.0f} min and nothing is saved; see --snapshot-dir")
        yield Survival(config, group, progress, None, None)
        return
    stacks = places.run / "stacks" / f"rank{group.world.rank:05d}-at-the-end.txt"
    watching = Stopping(
        deadline,
        delay_s,
        judges_clock=group.world.rank == 0,
        stacks=stacks,
        last_words=last_words,
        is_lost=is_lost,
    )
    with watching as stopping:
        survival = Survival(config, group, progress, places, stopping)
        try:
            yield survival
        except BaseException:
            survival.abandon()
            raise
        survival.close()


def _deadline(group: Group, environ: dict[str, str], *, saves: bool) -> tuple[Deadline | None, float | None]:
    """What rank 0 finds out, on every rank. Collective: every rank must call this."""
    problem = ""
    found: tuple[list[Any] | None, float | None] = None, None
    if group.world.rank == 0:
        try:
            deadline = find_deadline(environ)
            found = ([deadline.at_s, deadline.source] if deadline else None), kill_delay_s(environ)
            if saves and deadline and (late_s := time.time() - deadline.at_s - (found[1] or 0.0)) > 0:
                problem = (
                    f"{deadline.source} says that the allocation ended {late_s:.0f} s ago; "
                    "unset what is left of an earlier job, or give DDP_HPC_DEADLINE its true end"
                )
        except RequestError as error:
            problem = str(error)
    group.agree(problem, RequestError.exit_code)
    ends, delay_s = group.comm.bcast(found)
    return (Deadline(*ends) if ends else None), delay_s
