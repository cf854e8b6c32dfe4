"""Snapshots for someone's own loop: where it goes on, when it saves, and when it has to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ddp_hpc.data.batches import Position
from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import RequestError
from ddp_hpc.library.loader import WorldLoader, with_config
from ddp_hpc.library.sharing import state_of
from ddp_hpc.library.world import ConnectedWorld, current_world
from ddp_hpc.training.heartbeat import RESTING
from ddp_hpc.training.state import TrainingState
from ddp_hpc.training.stopping import next_talk
from ddp_hpc.training.strategies.mesh import Mesh
from ddp_hpc.training.survival import Losses, Survival, survive


class Snapshots:
    """The state of a script's training between two steps. Made by `ddp_hpc.snapshots`."""

    start: int
    """The steps that were done when it was opened: 0, or those of the newest good snapshot."""

    def __init__(
        self,
        world: ConnectedWorld,
        survival: Survival,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: WorldLoader | None,
    ) -> None:
        self._world, self._survival, self._loader = world, survival, loader
        self._model, self._optimizer = model, optimizer
        self._samples = _NO_SAMPLES if loader is None else loader.samples
        self._stop = ""
        self._talk_at, self._talked_step, self._talked_s = 0, 0, 0.0

    def resume(self) -> None:
        """Goes back to the newest good snapshot, if any. Collective: every rank must call this."""
        snapshot = self._survival.open()
        world = self._world
        samples_are_dealt = Mesh({"dp": world.world_size}, {"dp": world.rank}, None)
        position, _, _ = self._survival.resume(snapshot, self._state(), self._samples, samples_are_dealt)
        if self._loader is not None:
            self._loader.position = position
        self._position = self._saved = position
        self.start = self._talked_step = self._talk_at = position.step
        self._talked_s = time.monotonic()

    def step(self, step: int) -> bool:
        """After each step, counted from 1: saves if that is due. True: all ranks are to stop here.

        They are where a signal came or the allocation's end is near; the state is saved then. Ranks
        talk about it once a second, or after every step that takes longer.

        Collective: every rank must call this.

        Raises:
            RequestError: `step` is not the step that is done now.
        """
        self._position = self._position_at(step)
        if self._survival.stacks is None:  # no folder: nothing is saved, and signals end the script
            return False
        if self._stop or not (step >= self._talk_at or self._survival.saves_at(step)):
            self._world.at(step, "script")
            return bool(self._stop)
        now_s = time.monotonic()
        step_s = (now_s - self._talked_s) / max(1, step - self._talked_step)
        self._world.at(step, "settle")
        own = torch.tensor(self._survival.signs(step_s), dtype=torch.float64, device=self._world.device)
        signs = self._world.gather(own).tolist()
        is_last = self._loader is not None and not len(self._loader)
        decision = self._survival.decide(signs, self._position, is_last)
        slowest_s = max(sign[-1] for sign in signs)
        self._talk_at = next_talk(step, slowest_s)
        self._talked_step, self._talked_s, self._stop = step, now_s, decision.stop
        if decision.save:
            self._save()
        self._world.at(step, "script")
        return bool(self._stop)

    def finish(self) -> None:
        """Saves what is not saved yet, and says in the run folder how it ended. Collective."""
        if self._survival.stacks is None:
            return
        if self._saved != self._position:
            self._save()
        tick = partial(self._world.at, self._position.step, "snapshot")
        self._survival.finish(self._position, self._stop, tick)
        self._world.at(self._position.step, RESTING)
        if self._stop:
            self._world.stopped = self._stop
            self._world.progress.say(f"stopping, the state is saved, run it again to go on: {self._stop}")

    def _save(self) -> None:
        tick = partial(self._world.at, self._position.step, "snapshot")
        tick()
        self._survival.save(self._position, Losses(), self._state(), self._samples, tick)
        self._saved = self._position

    def _state(self) -> TrainingState:
        return state_of(self._world, self._model, self._optimizer)

    def _position_at(self, step: int) -> Position:
        if self._loader is not None:
            if step != self._loader.position.step:
                raise RequestError(
                    f"snapshots.step({step}): the loader's last batch was step {self._loader.position.step}; "
                    "give batch.step, once after each batch"
                )
            return self._loader.position
        if step <= self._position.step:
            raise RequestError(
                f"snapshots.step({step}): step {self._position.step} is done already; count on from "
                "snapshots.start"
            )
        return Position(step)


@contextmanager
def snapshots(
    folder: str | Path | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: WorldLoader | None = None,
    every_steps: int | None = None,
    every_s: float = 600.0,
    keep: int = 3,
) -> Iterator[Snapshots]:
    """The script's training, gone on with from the newest good snapshot, and saved from then on.

    On entering, model, optimizer, random numbers and the loader's place are those of the snapshot,
    if there is one. After the body, or where it is left by a stop, the last step is saved.
    docs/survival.md tells what is saved and how a run stops in time.

    Collective: every rank must call this.

    Args:
        folder: of the snapshots; None: `snapshots` in DDP_HPC_RUN_DIR, which job scripts export, and
            without that nothing is saved.
        model: what `wrap` gave.
        optimizer: of that model.
        loader: the script's loader, if it has one of `world.loader`: it goes on at the next batch.
        every_steps: saves after every so many steps.
        every_s: saves when the last snapshot is so many seconds old.
        keep: so many of the newest are kept.

    Raises:
        RequestError: the folder is another job's, or holds another model's or another data's snapshots.
    """
    world = current_world("ddp_hpc.snapshots()")
    if folder == "":  # which would be the current folder
        raise RequestError('ddp_hpc.snapshots(""): names no folder: its variable is empty or not set')
    kind = type(getattr(model, "module", model))  # without DDP
    config = replace(
        with_config(loader, world.config),
        model=f"{kind.__module__}:{kind.__qualname__}",
        snapshot_dir=None if folder is None else Path(folder),
        snapshot_every_steps=every_steps,
        snapshot_every_s=every_s,
        keep=keep,
    )
    parts = world.parts
    with survive(
        config, world.group, world.progress, last_words=parts.last_words, is_lost=parts.is_lost
    ) as survival:
        parts.survival = survival
        found = Snapshots(world, survival, model, optimizer, loader)
        found.resume()
        try:
            yield found
        except SystemExit as end:
            if end.code:
                raise
            found.finish()
            raise
        found.finish()


# A loop over data of its own: its order is no business of ours.
_NO_SAMPLES: Samples = samples_of_arrays([0], [0])
