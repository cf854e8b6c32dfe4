"""Programs whose ranks hang, as users have reported it, and what the sentence about the hang must say.

Each program is a text of its own, written after the report at `source`. The comment `# elsewhere` marks the
line at which the ranks `elsewhere` are, and `# waits` the one at which the others wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

BEGIN = """\
import os, sys, threading, time
from pathlib import Path
begins = threading.Event()
def say():  # on a busy machine, the ranks need more time for the import than the limit of the tests
    while not begins.wait(1): print("starting", flush=True)
threading.Thread(target=say, daemon=True).start()
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
begins.set()
rank, world_size = dist.get_rank(), dist.get_world_size()
print("rank", rank, "begins", flush=True)
"""


@dataclass(frozen=True)
class Hang:
    """A program of 3 ranks that hangs. `does` is what the ranks that are elsewhere do."""

    name: str
    source: str
    code: str
    elsewhere: tuple[int, ...] = (1,)
    does: str = "is in"
    waits: str = "wait in"

    @property
    def program(self) -> str:
        return BEGIN + self.code

    def line(self, mark: str) -> int:
        """Returns the number of the line with this mark."""
        return next(n for n, line in enumerate(self.program.splitlines(), 1) if line.endswith(f"# {mark}"))


HANGS = [
    Hang(
        "a rank leaves the training loop for an endless one",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/5865",
        """
def prune(model):
    while True: pass  # elsewhere

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(9):
    if rank == 1 and step == 3:
        prune(model)
    model(torch.ones(2, 4)).sum().backward()  # waits
""",
        does="computes in",
    ),
    Hang(
        "a rank skips a collective",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19106",
        """
def log(loss):
    if rank != 2:
        dist.all_reduce(loss)  # waits

for step in range(9):
    log(torch.ones(1)) if step == 5 else dist.all_reduce(torch.ones(1))
    dist.barrier()  # elsewhere
""",
        elsewhere=(2,),
        does="waits in",
    ),
    Hang(
        "only rank 0 enters the barrier of a save",
        "https://github.com/alan-turing-institute/autocast/pull/386",
        """
def save_checkpoint():
    Path("checkpoint.pt").write_text("")
    dist.barrier()  # elsewhere

if rank == 0:
    save_checkpoint()
dist.all_reduce(torch.ones(1))  # waits
""",
        elsewhere=(0,),
        does="waits in",
    ),
    Hang(
        "a rank has fewer batches than the others",
        "https://github.com/pytorch/pytorch/issues/33148",
        """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for batch in range(7 if rank == 2 else 8):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()  # waits
losses = [torch.zeros(1) for _ in range(world_size)]
dist.all_gather(losses, loss.detach().reshape(1))  # elsewhere
""",
        elsewhere=(2,),
        does="waits in",
    ),
    Hang(
        "a worker of a DataLoader waits for a lock that was held when it was forked",
        "https://github.com/pytorch/pytorch/issues/1355",
        """
lock = threading.Lock()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with lock:
            return torch.ones(4)

if rank == 1:
    lock.acquire()
for batch in torch.utils.data.DataLoader(Data(), num_workers=2):  # elsewhere
    dist.all_reduce(batch)  # waits
""",
    ),
    Hang(
        "early stopping on one rank",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/379",
        """
def train():
    for epoch in range(9):
        dist.all_reduce(torch.ones(1))  # waits
        if rank == 1 and epoch == 4:
            return

train()
dist.barrier()  # elsewhere
""",
        does="waits in",
    ),
    Hang(
        "ranks disagree on whether a checkpoint exists",
        "https://github.com/KempnerInstitute/KempnerForge/issues/49",
        """
def load():
    state = [{"step": 3}]
    dist.broadcast_object_list(state, src=0)  # waits
    return state[0]

exists = rank != 1  # the attributes of the directory are cached on its node
state = load() if exists else {}
dist.all_reduce(torch.ones(1))  # elsewhere
""",
        does="waits in",
    ),
    Hang(
        "only the members create a group",
        "https://github.com/pytorch/pytorch/issues/134314",
        """
if rank == 0:
    dist.new_group([0, 1])  # elsewhere
dist.all_reduce(torch.ones(1))  # waits
""",
        elsewhere=(0,),
        does="waits in",
    ),
    Hang(
        "a lock file that a killed run has left",
        "https://github.com/pytorch/pytorch/issues/189245",
        """
def build():
    lock = Path("lock")
    lock.touch()
    while lock.exists():
        time.sleep(0.2)  # elsewhere

if rank == 0:
    build()
dist.barrier()  # waits
""",
        elsewhere=(0,),
    ),
    Hang(
        "a rank waits for a debugger",
        "https://github.com/pytorch/torchtitan/issues/652",
        """
import socket
if rank == 0:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()  # elsewhere
dist.barrier()  # waits
""",
        elsewhere=(0,),
    ),
    Hang(
        "a rank cannot read its data",
        "https://github.com/dylanyunlon/Neuron_SP/issues/73",
        """
def read(path):
    return path.read_bytes()  # elsewhere

os.mkfifo(f"data-{rank}")
if rank == 1:
    read(Path(f"data-{rank}"))
dist.barrier()  # waits
""",
    ),
    Hang(
        "two ranks receive, and none sends",
        "https://github.com/pytorch/pytorch/issues/132003",
        """
if rank == 0:
    dist.recv(torch.ones(1), src=2)  # elsewhere
dist.all_reduce(torch.ones(1))  # waits
""",
        elsewhere=(0,),
        does="waits in",
    ),
    Hang(
        "the main thread waits for a thread that is blocked",
        "https://github.com/wandb/wandb/issues/3223",
        """
import queue
records = queue.Queue(maxsize=1)

def upload():
    threading.Event().wait()

if rank == 0:
    threading.Thread(target=upload, daemon=True).start()
    for step in range(3):
        records.put(step)  # elsewhere
dist.barrier()  # waits
""",
        elsewhere=(0,),
    ),
]
