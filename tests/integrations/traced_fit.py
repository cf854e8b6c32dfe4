"""`traced_fit.py lightning|transformers DATA TRACES`: trains on a data file, and records two steps."""

import sys

import torch
from torch.utils.data import DataLoader

import ddp_hpc

_, framework, data, traces = sys.argv
layer = torch.nn.Linear(3, 1)


def loss_of(src: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (layer(src).squeeze(1) - labels).square().mean()


if framework == "lightning":
    import lightning.pytorch as pl

    from ddp_hpc.integrations.lightning import TraceSteps

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return loss_of(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    pl.Trainer(
        max_steps=5,
        callbacks=[TraceSteps(traces)],
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
    ).fit(Module(), DataLoader(ddp_hpc.dataset(data), batch_size=4))
else:
    from transformers import Trainer, TrainingArguments

    from ddp_hpc.integrations.transformers import TraceSteps

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, src: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(src, labels)}

    arguments = TrainingArguments(
        output_dir=f"{traces}-out", max_steps=5, report_to=[], per_device_train_batch_size=4, use_cpu=True
    )
    samples = ddp_hpc.dataset(data, names=("src", "labels"))
    Trainer(Model(), arguments, train_dataset=samples, callbacks=[TraceSteps(traces)]).train()
