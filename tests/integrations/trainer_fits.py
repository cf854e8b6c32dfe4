"""Ranks of one world that train with the Hugging Face Trainer: uninterrupted, interrupted, and resumed.

Usage: trainer_fits.py DIRECTORY. Rank 0 prints one JSON object per comparison.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from ddp_hpc.base.errors import RequestError
from ddp_hpc.integrations.transformers import StopBeforeDeadline, newest_checkpoint
from ddp_hpc.training.run import stop_protocol

stop_protocol.EXCHANGE_S = 0.0  # each step exchanges signals, so that the step of the interruption is known
transformers.logging.set_verbosity_error()
is_signaled = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


class Samples(Dataset[dict[str, torch.Tensor]]):
    samples = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"samples": self.samples[index], "labels": torch.zeros(1)}


class Sum(torch.nn.Module):
    """Learns the sum of eight numbers, with dropout, so that a resumed run needs the generators' states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 1), torch.nn.Dropout(0.1)

    def forward(self, samples: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.layer(self.dropout(samples))
        return {"loss": (result - samples.sum(1, keepdim=True)).square().mean(), "logits": result}


class Signal(TrainerCallback):
    """Sends SIGTERM to one rank before a step, or during an evaluation."""

    def __init__(self, stop_at: int | None, where: str) -> None:
        self.stop_at, self.where, self.evaluated = stop_at, where, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if is_signaled and self.where == "step" and state.global_step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if is_signaled and self.where == "evaluation" and self.stop_at is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.evaluated.append(state.global_step)
        metrics["eval_loss"] = float(len(self.evaluated))  # only the first one is the best


def fit(directory: Path, stop_at: int | None, where: str, **options: Any) -> dict[str, Any]:
    set_seed(0)
    settings = {
        "use_cpu": True,
        "learning_rate": 0.1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 20,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    model, sender, code = Sum(), Signal(stop_at, where), None
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(directory), **(settings | options)),
        train_dataset=Samples(),
        eval_dataset=Samples(),
        callbacks=[StopBeforeDeadline(), sender],
    )
    checkpoint = newest_checkpoint(directory)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except SystemExit as exit_request:
        code = exit_request.code
    return {
        "code": code,
        "step": trainer.state.global_step,
        "resumed": checkpoint and Path(checkpoint).name,
        "weights": model.layer.weight.detach().numpy().tobytes().hex(),
        "evaluated": sender.evaluated,
        "is_signal_default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }


def compare(name: str, stop_at: int, where: str = "step", **options: Any) -> None:
    directory = Path(sys.argv[1]) / name
    results = [
        fit(directory / "whole", None, where, **options),
        fit(directory / "interrupted", stop_at, where, **options),
        fit(directory / "interrupted", None, where, **options),
    ]
    if os.environ["RANK"] == "0":
        print("\n" + json.dumps({"name": name, "results": results}), flush=True)


def refuse(**options: Any) -> None:
    try:
        fit(Path(sys.argv[1]) / "refused", None, "step", max_steps=2, **options)
    except RequestError as error:
        sys.stdout.write(f"refused: {error}\n")
        sys.stdout.flush()


refuse(use_cpu=False)
refuse(save_only_model=True)
best = {"save_strategy": "epoch", "save_total_limit": 1, "load_best_model_at_end": True}
# An epoch has ten batches on two ranks.
compare("in the middle of the second epoch", 14, num_train_epochs=3)
compare("at the last batch of an epoch", 10, num_train_epochs=3)
compare("at the last step of num_train_epochs", 30, num_train_epochs=3)
compare("at the last step of max_steps", 24, max_steps=24)
compare("during an evaluation", 11, "evaluation", num_train_epochs=3, eval_strategy="epoch")
compare("between accumulated gradients [1] ü", 5, num_train_epochs=3, gradient_accumulation_steps=3)
by_steps = {"eval_strategy": "steps", "eval_steps": 7, "num_train_epochs": 3}
compare("at a step with an evaluation", 14, **by_steps)
compare("at a step with an evaluation and a checkpoint", 14, **by_steps, save_strategy="steps", save_steps=7)
compare("at the end of an epoch with an evaluation", 10, num_train_epochs=3, eval_strategy="epoch")
only_best = {"metric_for_best_model": "loss", "save_strategy": "best", "load_best_model_at_end": False}
compare("at a step with an evaluation that is not the best", 14, **by_steps, **only_best)
compare(
    "at the end of an epoch that is not the best", 20, num_train_epochs=3, eval_strategy="epoch", **only_best
)
compare("after the best checkpoint", 24, num_train_epochs=3, eval_strategy="epoch", **best)
