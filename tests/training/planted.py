"""The training with a fault planted in one rank: with `PLANT=raise:1`, rank 1 raises in its second step."""

import os
import signal
import sys
import time
from pathlib import Path

# ddp_hpc.train sets this later, but here torch has been imported by then.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from ddp_hpc import train
from ddp_hpc.training import step
from ddp_hpc.training.process_group import group
from ddp_hpc.training.run import end as ending
from ddp_hpc.training.snapshots import snapshot_directory as snapshots

kind, rank, *while_it_fails = os.environ["PLANT"].split(":")
step_as_it_is = step.Stepper.one_step
pick_as_it_is = group.pick_device
verdict_as_it_is = ending.verdict
destroy_as_it_is = group.dist.destroy_process_group


def wait_for(name):
    until_s = time.monotonic() + 240
    while not Path(name).exists():
        assert time.monotonic() < until_s, f"rank 0 has not written {name}"
        time.sleep(0.01)


def one_step(self, position, *rest):
    if position.step == 1 and self.group.world.rank == int(rank):
        if kind == "while_saving":
            wait_for("saving")
        if kind in ("raise", "while_saving"):
            raise ValueError("planted in one rank")
        if kind == "out_of_memory":
            wait_for("saved")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if kind == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("planted in one rank")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            sys.exit(3)
        if kind == "leave":
            os._exit(0)
        if kind == "stick":
            # A signal just before a single long sleep would be handled only after it.
            for _ in range(6000):
                time.sleep(0.1)
        if kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[kind])
    if position.step == 2 and kind == "stop" and self.group.world.rank == int(rank):
        time.sleep(3)  # the ranks report their position to rank 0 every 2 s
        os.kill(os.getpid(), signal.SIGSTOP)
    if position.step == 1 and kind == "stuck_others":
        # Like a kernel that waits for a lost rank: only the failure watch can end these.
        if self.group.world.rank == int(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return step_as_it_is(self, position, *rest)


def pick_device(kind_of_device, world, per_rank):
    if kind == "pick" and world.rank == int(rank):
        raise RuntimeError("planted before the process group")
    return pick_as_it_is(kind_of_device, world, per_rank)


def destroy(*args):
    if kind == "slow_end" and group.dist.get_rank() == int(rank):
        time.sleep(6)
    destroy_as_it_is(*args)


def verdict(*args):
    for name in while_it_fails:
        os.kill(os.getpid(), signal.Signals[name])
    return verdict_as_it_is(*args)


write_as_it_is = snapshots.complete_snapshot


def complete_snapshot(*args):
    Path("saving").touch()
    if kind == "while_saving":
        time.sleep(2)  # the other rank fails
    written = write_as_it_is(*args)
    Path("saved").touch()
    return written


own_part_as_it_is = snapshots.SnapshotWriter._own_part


def own_part(self, at_step):
    if kind == "die_in_save" and at_step == 2 and self.joint.rank == int(rank):
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return own_part_as_it_is(self, at_step)


snapshots.SnapshotWriter._own_part = own_part
snapshots.complete_snapshot = complete_snapshot
step.Stepper.one_step = one_step
ending.verdict = verdict
group.pick_device = pick_device
group.dist.destroy_process_group = destroy
train.main()
