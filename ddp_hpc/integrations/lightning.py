"""A callback for Lightning: saves a checkpoint before the walltime ends, from which another job resumes.

The packages `lightning` and `pytorch_lightning` are supported.
"""

from __future__ import annotations

import copy
import shutil
import sys
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.integrations.separate_ranks import refuse_separate_ranks
from ddp_hpc.library.deadline import JobDeadline, deadline

# Importing both packages would take twice as long.
if (
    TYPE_CHECKING
    or "lightning" in sys.modules
    or ("pytorch_lightning" not in sys.modules and find_spec("lightning"))
):
    from lightning.fabric.utilities import rank_zero_warn
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from lightning_fabric.utilities import rank_zero_warn
    from pytorch_lightning import Callback, LightningModule, Trainer

_SUFFIX = ".ckpt"
_OWN_NAME = "deadline-step="


class StopBeforeDeadline(Callback):
    """Saves a checkpoint before the end of the walltime, and ends the program, which another job resumes.

    It reacts to SIGTERM, SIGUSR1 and SIGUSR2 in the same way, and replaces Lightning's handler of SIGTERM:

        stop = StopBeforeDeadline("checkpoints")
        trainer = Trainer(callbacks=[stop])
        trainer.fit(model, ckpt_path=stop.newest_checkpoint())

    Before the checkpoint is saved, Lightning completes the step: it calls all hooks and validates if that is
    due. The margin must suffice for a step, a validation, and the checkpoint.

    An interrupted epoch is resumed at its next batch if the loader is a StatefulDataLoader of torchdata with
    a DistributedSampler. Otherwise, samples are repeated or omitted, and a warning is printed.

    Args:
        dirpath: the directory of the checkpoints. It can also be that of a ModelCheckpoint.
        margin_s: how long before the end of the walltime the checkpoint is saved, in seconds.
    """

    def __init__(self, dirpath: str | Path, margin_s: float = 120.0) -> None:
        self._dirpath = Path(dirpath)
        self._margin_s = margin_s
        self._deadline: JobDeadline | None = None
        self._last_step = 0
        self._is_sanity_checked = self._is_saving = False
        # If the run must stop: the state of the training loop from which the next job resumes.
        self._position: dict[str, Any] | None = None

    def newest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint; None if there is none, to start from scratch.

        Incomplete files are skipped.
        """
        try:
            complete = [
                path for path in self._dirpath.iterdir() if path.suffix == _SUFFIX and _is_complete(path)
            ]
        except FileNotFoundError:
            return None
        return str(max(complete, key=lambda path: path.stat().st_mtime_ns)) if complete else None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the signal handlers before the Trainer validates for the first time."""
        del trainer, pl_module
        # Lightning installs its handlers before this hook. Its handler of SIGTERM calls a collective on each
        # rank that receives the signal, while other ranks are in a different collective.
        self._deadline = deadline(self._margin_s)
        self._is_sanity_checked = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the signal handlers.

        Raises:
            RequestError: the Trainer trains separately on each rank.
        """
        del pl_module
        refuse_separate_ranks(
            trainer.world_size, "set its arguments devices and num_nodes (docs/how-to/frameworks.md)"
        )
        if not self._is_sanity_checked:
            self._deadline = deadline(self._margin_s)
        self._is_sanity_checked = False
        self._last_step = trainer.global_step
        self._position = None
        _restore_order(trainer)
        if not _resumes_at_next_batch(trainer.train_dataloader):
            rank_zero_warn(
                "StopBeforeDeadline cannot resume an interrupted epoch with the same samples; use "
                "StatefulDataLoader of torchdata with a DistributedSampler (docs/how-to/frameworks.md)"
            )
        if not _can_wait(trainer):
            rank_zero_warn(
                "an epoch of one step cannot be resumed exactly with "
                f"Trainer(max_steps={trainer.max_steps}); use max_epochs"
            )

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Decides whether the program must stop. Collective."""
        # Do not stop after an epoch's last batch, because Lightning would resume with an empty epoch.
        if not (trainer.is_last_batch and _can_wait(trainer)):
            self._decide(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decides after the validation of an epoch whether the program must stop. Collective."""
        del pl_module
        # With max_steps, Lightning would resume with an empty epoch here, too, so stop one step later.
        if trainer.max_steps == -1:
            self._decide(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Saves a checkpoint and ends the program if it must stop after the previous step. Collective."""
        self._save_and_requeue(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves a checkpoint and ends the program if it must stop after the previous epoch. Collective."""
        del pl_module
        self._save_and_requeue(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Replaces the state of the loop, which has already fetched the next batch."""
        del trainer, pl_module
        if self._is_saving:
            checkpoint["loops"]["fit_loop"] = self._position

    def _decide(self, trainer: Trainer) -> None:
        # A checkpoint between two optimizer steps would lose the accumulated gradients.
        if self._deadline is None or self._position is not None or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        # After the last step, the run is complete.
        if self._deadline.should_stop() and not _is_complete_run(trainer):
            # Lightning can resume only from this position. After this hook, it still calls the hooks of the
            # module and of later callbacks, and validates, so the rest of the state is saved when the next
            # step begins.
            self._position = copy.deepcopy(trainer.fit_loop.state_dict())

    def _save_and_requeue(self, trainer: Trainer) -> None:
        if self._position is None:
            return
        assert self._deadline is not None
        path = self._dirpath / f"{_OWN_NAME}{trainer.global_step}{_SUFFIX}"
        self._is_saving = True
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            _remove_others(path)
        self._deadline.requeue(trainer.global_step)


def _remove_others(path: Path) -> None:
    """Removes the checkpoints that earlier jobs saved at their deadlines, to limit the use of the disk."""
    for other in path.parent.glob(f"{_OWN_NAME}*{_SUFFIX}"):
        if other == path:
            continue
        with suppress(OSError):
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def _is_complete_run(trainer: Trainer) -> bool:
    progress = trainer.fit_loop.epoch_progress.current
    completed = progress.completed
    is_done = trainer.fit_loop.done
    # `done` increases `completed`. Restore it, because hooks of the last epoch still read
    # `trainer.current_epoch`.
    progress.completed = completed
    return is_done


def _can_wait(trainer: Trainer) -> bool:
    """Returns whether a run can stop after a batch that is not the last one of an epoch."""
    return trainer.max_steps == -1 or trainer.num_training_batches > trainer.accumulate_grad_batches


def _restore_order(trainer: Trainer) -> None:
    """Sets the epoch of the samplers before the resumed loaders draw the order of their samples.

    Lightning sets it too late, so that a later epoch would be resumed in the order of the first one.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current
    fetcher: Any = trainer.fit_loop._data_fetcher
    is_restored = False
    for loader in fetcher.combined_loader.flattened if progress.processed and fetcher else []:
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if hasattr(sampler, "set_epoch") and hasattr(loader, "load_state_dict"):
            position = loader.state_dict()
            sampler.set_epoch(progress.processed)
            loader.load_state_dict(position)
            is_restored = True
    if is_restored:
        iter(fetcher)


def _resumes_at_next_batch(loader: Any) -> bool:
    """Returns whether the loader has a state, and an order that does not depend on torch's generator."""
    # Lightning wraps samplers other than DistributedSampler. torchdata's RandomSampler draws a new order.
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    is_random = type(sampler).__name__ in ("RandomSampler", "DistributedSamplerWrapper")
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not is_random


def _is_complete(path: Path) -> bool:
    # Sharded checkpoints are directories, to which .metadata is written last.
    return (path / ".metadata").is_file() if path.is_dir() else zipfile.is_zipfile(path)
