"""A callback that lets the Hugging Face Trainer save a checkpoint and stop before the walltime ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ddp_hpc.base.errors import RequestError
from ddp_hpc.integrations.separate_ranks import refuse_separate_ranks
from ddp_hpc.library.deadline import JobDeadline, deadline


class StopBeforeDeadline(TrainerCallback):
    """Saves a checkpoint before the end of the walltime, and ends the program, which another job resumes.

    It reacts to SIGTERM, SIGUSR1 and SIGUSR2 in the same way:

        trainer = Trainer(model, args, callbacks=[StopBeforeDeadline()])
        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    Before the checkpoint is saved, the Trainer completes the step, with an evaluation if it is due. The
    margin must suffice for a step, an evaluation, and the checkpoint.

    Args:
        margin_s: how long before the end of the walltime the run stops, in seconds.
    """

    def __init__(self, margin_s: float = 120.0) -> None:
        self._margin_s = margin_s
        self._deadline: JobDeadline | None = None
        self._is_stopping = False
        self._has_waited = False
        self._saved_step = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Installs the signal handlers.

        Raises:
            RequestError: the checkpoints would contain no state of the optimizer, or the Trainer trains
                separately on each rank.
        """
        del state, control
        if args.save_only_model:
            raise RequestError(
                "TrainingArguments(save_only_model=True): such checkpoints cannot be resumed; use "
                "save_only_model=False with StopBeforeDeadline"
            )
        refuse_separate_ranks(
            args.world_size,
            "set TrainingArguments(use_cpu=True) on CPUs, or check that torch finds the GPUs",
        )
        self._deadline = deadline(self._margin_s)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Requests a stop if the end of the walltime is near. Collective."""
        # After the last step, the run is complete.
        if self._deadline is None or state.global_step >= state.max_steps:
            return
        if not self._deadline.should_stop():
            return
        if args.save_strategy == SaveStrategy.BEST and _ends_epoch(state):
            # After the evaluation of an epoch, the Trainer would save only the best checkpoint. Therefore,
            # stop one step later, unless that step ends an epoch, too.
            if not self._has_waited:
                self._has_waited = True
                return
            control.should_save = True
        # The Trainer first completes the step, with an evaluation and a checkpoint if they are due.
        self._is_stopping = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keeps the checkpoint of a training that was stopped."""
        del args, control
        self._saved_step = state.global_step
        if self._is_stopping:
            # With save_total_limit=1, the Trainer would now delete this checkpoint in favor of the best one.
            # The saved state still contains the path of the best one.
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Requests the checkpoint of a training that was stopped, after the evaluation of its last step."""
        del args
        if not self._is_stopping:
            return
        if _ends_epoch(state):
            control.should_save = True
            return
        # Because the run stops, the Trainer calls this hook in the middle of an epoch: skip its evaluation.
        control.should_evaluate = False
        control.should_save = self._saved_step != state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ends the program if the training was stopped early. Collective."""
        del args, control
        if self._deadline is None:
            return
        if self._is_stopping:
            self._deadline.requeue(state.global_step)
        # No step follows, so a signal may end the program again.
        self._deadline.restore_signals()


def _ends_epoch(state: TrainerState) -> bool:
    return float(state.epoch or 0.0).is_integer()


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Returns the directory of the last complete checkpoint; None if there is none, to start from scratch.

    A checkpoint is complete if its `trainer_state.json`, which the Trainer writes last, can be read.
    """
    steps = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if number.isascii() and number.isdecimal() and _is_complete(path):
            steps[int(number)] = path
    return str(steps[max(steps)]) if steps else None


def _is_complete(path: Path) -> bool:
    # The Trainer's option enable_jit_checkpoint creates this file while it saves.
    if (path / "checkpoint-is-incomplete.txt").exists():
        return False
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
