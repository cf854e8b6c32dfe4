"""Ranks of one world that train with Lightning: without an interruption, interrupted, and resumed.

Usage: lightning_fits.py DIRECTORY. Rank 0 prints one JSON object per comparison.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

# The order of imports in programs that are sorted by name, with the other package of Lightning.
from ddp_hpc.integrations.lightning import StopBeforeDeadline  # isort: skip
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.run import stop_protocol

stop_protocol.EXCHANGE_S = 0.0  # each step exchanges signals, so that the step of the interruption is known
warnings.filterwarnings("ignore")
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
is_signaled = rank == num_ranks - 1


class Sum(pl.LightningModule):
    """Learns the sum of eight numbers; one rank receives SIGTERM before a step, or during a validation."""

    def __init__(self, stop_at: int | None, where: str) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 1), torch.nn.Dropout(0.1)
        self.stop_at, self.where = stop_at, where
        self.register_buffer("average", torch.zeros(1, 8))  # of the weights, updated after each batch
        self.validated: list[int] = []
        self.ended: list[int] = []
        self.batches: list[int] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        if self.where == "step" and self.global_step + 1 == self.stop_at and is_signaled:
            os.kill(os.getpid(), signal.SIGTERM)
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        now = "sanity" if self.trainer.sanity_checking else "validation"
        if index == 0 and now == "validation":
            self.validated.append(self.global_step)
        if index == 0 and self.where == now and self.stop_at is not None and is_signaled:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches.append(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        self.average.lerp_(self.layer.weight.detach(), 0.1)

    def on_train_epoch_end(self) -> None:
        self.ended.append(self.current_epoch)
        self.average.mul_(0.9)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Later(pl.Callback):
    """A callback after the one that stops the run: counts batches, validations and epochs."""

    def __init__(self) -> None:
        self.counts = {"batches": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts["batches"] += 1

    def on_validation_end(self, trainer: pl.Trainer, _: Any) -> None:
        self.counts["validations"] += not trainer.sanity_checking

    def on_train_epoch_end(self, *_: Any) -> None:
        self.counts["epochs"] += 1

    def state_dict(self) -> dict[str, int]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = dict(state)


def make_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def refuse(**options: Any) -> None:
    try:
        trainer = make_trainer(max_steps=2, callbacks=[StopBeforeDeadline(sys.argv[1])], **options)
        trainer.fit(BoringModel())
    except RequestError as error:
        sys.stdout.write(f"refused: {error}\n")
        sys.stdout.flush()


def fit(directory: Path, stop_at: int | None, where: str, samples: int, **options: Any) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(samples, 8))
    sampler = DistributedSampler(data, num_ranks, rank)
    stop, later = StopBeforeDeadline(directory), Later()
    trainer = make_trainer(
        strategy="ddp",
        devices=num_ranks,
        callbacks=[stop, later],
        **options,
    )
    model, code = Sum(stop_at, where), None
    loaders = StatefulDataLoader(data, batch_size=4, sampler=sampler), DataLoader(data, batch_size=samples)
    try:
        trainer.fit(model, *loaders, ckpt_path=stop.newest_checkpoint(), weights_only=False)
    except SystemExit as exit_request:
        code = exit_request.code
    return {
        "code": code,
        "step": trainer.global_step,
        "weights": model.layer.weight.detach().numpy().tobytes().hex(),
        "average": model.average.numpy().tobytes().hex(),
        "validated": model.validated,
        "ended": model.ended,
        "batches": model.batches,
        "later": later.counts,
        "files": sorted(path.name for path in directory.glob("*")),
    }


def compare(name: str, stop_at: int, where: str = "step", samples: int = 80, **options: Any) -> None:
    directory = Path(sys.argv[1]) / name
    results = [
        fit(directory / "whole", None, where, samples, **options),
        fit(directory / "interrupted", stop_at, where, samples, **options),
        fit(directory / "interrupted", None, where, samples, **options),
    ]
    if rank == 0:
        print("\n" + json.dumps({"name": name, "results": results}), flush=True)


with warnings.catch_warnings():
    warnings.simplefilter("always")
    fit(Path(sys.argv[1]) / "short", None, "step", samples=8, max_steps=4)
refuse()
# An epoch has ten batches on two ranks.
compare("in the middle of the second epoch", 14, max_epochs=3)
compare("at the last batch of an epoch", 10, max_epochs=3)
compare("at the last step of max_epochs", 30, max_epochs=3)
compare("at the last step of max_steps", 24, max_steps=24)
compare("during a validation", 10, "validation", max_epochs=3)
compare("during the first validation", 1, "sanity", max_epochs=2)
compare("between accumulated gradients [1] ü", 5, max_epochs=3, accumulate_grad_batches=3)
compare("in an epoch of one batch", 2, samples=8, max_epochs=4)
compare("before a validation within an epoch", 14, max_epochs=3, val_check_interval=2)
compare("at the last batch of an epoch, with max_steps", 10, max_steps=24, val_check_interval=5)
compare("before a validation by steps", 13, max_steps=24, val_check_interval=13, check_val_every_n_epoch=None)
