"""Snapshots for a user's own training loop, which can resume, save, and stop before the time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_hpc.base.errors import EXIT_DONE, EXIT_REQUEUE, RequestError
from ddp_hpc.base.options import read_directory
from ddp_hpc.base.run_outcomes import REQUESTED, Stop
from ddp_hpc.data.step_shards import Position
from ddp_hpc.library.connected_world import ConnectedWorld, current_world
from ddp_hpc.library.loader import WorldLoader, with_config
from ddp_hpc.library.saved_state import (
    OneOrMore,
    by_name,
    check_objects,
    check_state,
    differing_objects,
    state_of,
)
from ddp_hpc.training.health.heartbeat import RESTING
from ddp_hpc.training.health.rank_report import RankReports
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.run.lifecycle import RunLifecycle, manage_run
from ddp_hpc.training.run.resumable import Losses
from ddp_hpc.training.run.stop_protocol import MOST_STEPS_OF_SCRIPT, ExchangeSchedule
from ddp_hpc.training.snapshots.state_dict_codec import Stateful
from ddp_hpc.training.snapshots.training_state import TrainingState


class Snapshots:
    """The state of a script's training between two steps. Created by `ddp_hpc.snapshots`."""

    start: int
    """The number of completed steps at the start: 0, or that of the newest valid snapshot."""

    def __init__(
        self,
        world: ConnectedWorld,
        lifecycle: RunLifecycle,
        state: Callable[[], TrainingState],
        loader: WorldLoader | None,
    ) -> None:
        self._world, self._lifecycle, self._loader = world, lifecycle, loader
        self._state = state
        self._num_samples = None if loader is None else loader.num_samples
        self._stop: Stop | None = None
        self._is_compared = False

    def resume(self) -> None:
        """Restores the newest valid snapshot, if any. Collective: every rank must call this."""
        snapshot = self._lifecycle.open()
        world = self._world
        mesh = Mesh({"dp": world.world_size}, {"dp": world.rank}, None)
        position, _, _ = self._lifecycle.resume(snapshot, self._state(), self._num_samples, mesh)
        self._lifecycle.begin()
        if self._loader is not None:
            self._loader.position = position
        self._position = self._saved = position
        self.start = position.step
        self._exchanges = ExchangeSchedule(position.step, most_steps=MOST_STEPS_OF_SCRIPT)

    def step(self, step: int) -> bool:
        """Call this method after each step; steps are counted from 1. Saves if a snapshot is due.

        Returns True if all ranks must stop here, because of a signal or because the job's time limit
        is near; the state has then been saved. Ranks agree on this once per second, or after each
        step if steps take longer.

        Collective: every rank must call this.

        Raises:
            RequestError: `step` is not the step that has just been completed.
        """
        self._position = self._position_at(step)
        # Without a directory, nothing is saved, and signals end the script.
        if self._lifecycle.directories is None:
            return False
        if self._stop is not None or not (self._exchanges.is_due(step) or self._lifecycle.saves_at(step)):
            self._world.at(step, "script")
            return self._stop is not None
        step_s = self._exchanges.mean_step_s(step)
        self._world.at(step, "exchange")
        own = torch.tensor(
            self._lifecycle.report(step_s, step_s), dtype=torch.float64, device=self._world.device
        )
        reports = RankReports(self._world.gather(own).cpu())
        is_last = self._loader is not None and not len(self._loader)
        decision = self._lifecycle.decide(reports, self._position, is_last)
        self._exchanges.exchanged(step, reports.slowest_step_s())
        self._stop = decision.stop
        if decision.save:
            self._save()
        self._world.at(step, "script")
        return self._stop is not None

    def stop_on_request(self) -> None:
        """Makes `finish` write the state of a run that another job must resume."""
        self._stop = self._stop or REQUESTED

    def finish(self) -> None:
        """Saves the last step if necessary, and writes the final state to the run directory. Collective."""
        if self._lifecycle.directories is None:
            return
        if self._saved != self._position:
            self._save()
        if 0 < self.start == self._position.step and self._stop is None:
            self._world.progress.say(
                f"note: no step was left to do after step {self.start}; for a new run, use another directory "
                "for the snapshots; to continue this run, increase the number of steps"
            )
        tick = partial(self._world.at, self._position.step, "snapshot")
        self._lifecycle.finish(self._position, self._stop, tick)
        self._world.at(self._position.step, RESTING)
        if self._stop is not None:
            self._world.stopped = self._stop.reason
            self._world.progress.say(self._stop.line("State saved"))

    def _save(self) -> None:
        tick = partial(self._world.at, self._position.step, "snapshot")
        tick()
        state = self._state()
        self._lifecycle.check_parameters(self._position.step, state, tick)
        if not self._is_compared:
            self._is_compared = True
            for name in differing_objects(state):
                self._world.progress.say(
                    f"warning: ddp_hpc.snapshots({name}=): its state differs between ranks; that of rank 0 "
                    "is saved, and restored on all ranks"
                )
        self._lifecycle.save(self._position, Losses(), state, tick)
        self._saved = self._position

    def _position_at(self, step: int) -> Position:
        if self._loader is not None:
            if step != self._loader.position.step:
                raise RequestError(
                    f"snapshots.step({step}): the loader's last batch was step {self._loader.position.step}; "
                    "pass batch.step, and call step() once after each batch"
                )
            return self._loader.position
        if step <= self._position.step:
            raise RequestError(
                f"snapshots.step({step}): step {self._position.step} is already done; start counting at "
                "snapshots.start + 1"
            )
        return Position(step)


@contextmanager
def snapshots(
    folder: str | Path | None = None,
    *,
    model: OneOrMore[nn.Module],
    optimizer: OneOrMore[Optimizer],
    loader: WorldLoader | None = None,
    every_steps: int | None = None,
    every_s: float = 600.0,
    keep: int = 3,
    **objects: Stateful,
) -> Iterator[Snapshots]:
    """Resumes the script's training from the newest valid snapshot, and saves it from then on.

    If there is a snapshot, it restores the models, the optimizers, the random number generators, the
    loader's position and all other `objects`. The last step is saved after the body.
    docs/explanation/snapshots-and-requeue.md describes what is saved and how a run stops in time.

    Collective: every rank must call this.

    Args:
        folder: the snapshot directory; None: `snapshots` in DDP_HPC_RUN_DIR, which job scripts export.
            Without that variable, nothing is saved.
        model: the model returned by `wrap`, or a list or dict of several.
        optimizer: the optimizer of that model, or a list or dict of several.
        loader: the loader returned by `world.loader`, if any; it resumes at the next batch.
        every_steps: save a snapshot every N steps.
        every_s: save a snapshot if the last one is older than this many seconds.
        keep: the number of newest snapshots to keep.
        objects: other objects with state_dict and load_state_dict, under any names, such as
            `scheduler=scheduler, scaler=scaler, ema=ema`. The state of rank 0 is saved.

    Raises:
        RequestError: an object has no state that can be saved, another job uses the directory, or its
            snapshots are from a different model or data.
    """
    world = current_world("ddp_hpc.snapshots()")
    what = 'ddp_hpc.snapshots(""): the name of the directory'
    directory = None if folder is None else read_directory(what, str(folder))
    state, kind = _checked(world, model, optimizer, objects)
    config = with_config(loader, world.config).changed(
        model=f"{kind.__module__}:{kind.__qualname__}",
        snapshot_dir=directory,
        snapshot_every_steps=every_steps,
        snapshot_every_s=every_s,
        keep=keep,
    )
    with manage_run(config, world.group, world.progress, world.parts) as lifecycle:
        run_snapshots = Snapshots(world, lifecycle, state, loader)
        run_snapshots.resume()
        try:
            yield run_snapshots
        except SystemExit as end:
            if end.code == EXIT_REQUEUE:
                run_snapshots.stop_on_request()
            if end.code in (None, EXIT_DONE, EXIT_REQUEUE):
                run_snapshots.finish()
            raise
        run_snapshots.finish()


def _checked(
    world: ConnectedWorld,
    model: OneOrMore[nn.Module],
    optimizer: OneOrMore[Optimizer],
    objects: dict[str, Stateful],
) -> tuple[Callable[[], TrainingState], type[Any]]:
    """Returns a function that returns the state to be saved, and the type of the first model. Collective."""
    with world.group.failing_together():
        models, optimizers = by_name("model", model, nn.Module), by_name("optimizer", optimizer, Optimizer)
        check_objects(objects, signature(snapshots).parameters)
        state = partial(state_of, world, models, optimizers, objects)
        check_state(state())
    first = next(iter(models.values()))
    return state, type(getattr(first, "module", first))  # the bare model, not wrapped in DDP
