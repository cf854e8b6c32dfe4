"""A training loop with DeepSpeed (ZeRO stage 1), resumed after the walltime.

Does not need the `deepspeed` launcher. Usage: deepspeed_loop.py STEPS DIRECTORY
"""

import sys
import time

import deepspeed
import torch
import torch.distributed as dist

import ddp_hpc

num_steps, directory = int(sys.argv[1]), sys.argv[2]
STEP_S = 0.3  # the duration of a step of a larger model

deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
deadline = ddp_hpc.deadline(margin_s=10)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
    config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
)

# The file `latest` in the directory names the newest complete checkpoint; without one, no step was trained.
path, state = engine.load_checkpoint(directory)
first = state["step"] if path else 0

for step in range(first, num_steps):
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    samples = torch.randn(4, 8, generator=generator).to(engine.device)
    loss = (engine(samples) - samples.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"trained step {step}", flush=True)
    time.sleep(STEP_S)
    if step + 1 < num_steps and deadline.should_stop():
        engine.save_checkpoint(directory, client_state={"step": step + 1})
        deadline.requeue(step + 1)

if dist.get_rank() == 0:
    print("weights", model.weight.detach().cpu().numpy().tobytes().hex(), flush=True)
dist.destroy_process_group()
