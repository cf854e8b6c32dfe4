"""A DDP training that knows nothing of ddp-hpc: it saves checkpoints, and continues from the newest one.

`plain_training.py NUM_STEPS SAVE_EVERY [FAILURE STEP]`: rank 1 fails in a step, with `kill` (SIGKILL) and
`raise` only once, with `raise-always` in each start. With `loop`, it begins an endless loop, with `skip` it
enters another collective than the others, and with `stop` its process is stopped (SIGSTOP), each only once.
Rank 0 appends to RECORDS: each step, and at the end a checksum of the weights. SAVE_EVERY 0 saves nothing.
"""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

began_s = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

FAILED = Path("failed")
# Not the output: that of ranks whose srun was killed is lost.
RECORDS = Path("records.jsonl")
CHECKPOINT = Path("checkpoint.pt")


def fail(how, step):
    if how != "raise-always" and FAILED.exists():
        return
    FAILED.write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "loop":
        time.sleep(0.1)  # the line of `loop`
    if how == "skip":
        dist.barrier()  # the line of `skip`
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # the line of `stop`
    raise ValueError(f"planted in step {step}")


def save(step, model, optimizer):
    partial = CHECKPOINT.with_suffix(".new")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    partial.rename(CHECKPOINT)
    if progress := os.environ.get("DDP_HPC_PROGRESS_FILE"):
        Path(progress).write_text(str(step))


def record(**values):
    if dist.get_rank() == 0:
        with RECORDS.open("a") as file:
            file.write(json.dumps(values) + "\n")


def train(num_steps, save_every, how="", fails_in=0):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    first = 1
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, num_steps + 1):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if rank == 1 and step == fails_in:
            fail(how, step)
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = ddp(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()  # the line of the other ranks
        optimizer.step()
        record(step=step, at_s=time.time(), began_s=began_s)
        if rank == 0 and save_every and step % save_every == 0:
            save(step, model, optimizer)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    record(checksum=hashlib.sha256(weights).hexdigest())
    del ddp
    dist.destroy_process_group()


code = 0
try:
    train(*map(int, sys.argv[1:3]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
os._exit(code)  # the reason is in tests/mpi/trains.py
