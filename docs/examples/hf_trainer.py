"""The Hugging Face Trainer, resumed after the walltime.

Usage: hf_trainer.py STEPS DIRECTORY
"""

import sys
import time

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from ddp_hpc.integrations.transformers import StopBeforeDeadline, newest_checkpoint

num_steps, directory = int(sys.argv[1]), sys.argv[2]
STEP_S = 0.3  # the duration of a step of a larger model


class Samples(Dataset[dict[str, torch.Tensor]]):
    """80 samples of eight numbers."""

    samples = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"samples": self.samples[index]}


class Sum(torch.nn.Module):
    """Learns the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss of a batch."""
        time.sleep(STEP_S)
        return {"loss": (self.layer(samples) - samples.sum(1, keepdim=True)).square().mean()}


set_seed(0)
arguments = TrainingArguments(
    output_dir=directory,
    # On CPUs without this argument, each rank would train alone.
    use_cpu=not torch.accelerator.is_available(),
    max_steps=num_steps,
    learning_rate=0.1,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
)
model = Sum()
trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[StopBeforeDeadline(margin_s=10)])
trainer.train(resume_from_checkpoint=newest_checkpoint(directory))
if trainer.is_world_process_zero():
    print("steps", [entry["step"] for entry in trainer.state.log_history if "loss" in entry])
    print("weights", model.layer.weight.detach().cpu().numpy().tobytes().hex(), flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
