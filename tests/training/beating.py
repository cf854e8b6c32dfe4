"""A rank with a heartbeat and without torch.

`beating.py RANK SIZE DIRECTORY FAULT:RANK|all[:STEP] [LIMIT=S ...]`.

Each step ends with a wait for all ranks, like a collective. The fault occurs in step 3 by default.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ddp_hpc.discovery.world import World
from ddp_hpc.training.health.heartbeat import start_heartbeat

LOST = 7
STEPS = 5


class FileComm:
    """A `Comm` over files."""

    def __init__(self, rank, size, folder):
        self.rank, self.size, self._folder, self._calls = rank, size, folder, 0

    def bcast(self, value):
        return self.allgather(value)[0]

    def combine(self, value, rule):
        return rule(self.allgather(value))

    def barrier(self, what):
        self.allgather(what)

    def allgather(self, value):
        self._calls += 1
        mine = self._folder / f"{self._calls}-{self.rank}"
        mine.with_suffix(".part").write_text(json.dumps(value))
        mine.with_suffix(".part").rename(mine)
        return [self._read(self._folder / f"{self._calls}-{rank}") for rank in range(self.size)]

    def _read(self, path):
        while not path.exists():
            time.sleep(0.005)
        return json.loads(path.read_text())


def read_from_a_dead_server():
    time.sleep(60)


def wait_where_all_wait():
    time.sleep(60)


def fail(kind, heartbeat, step):
    if kind == "sleep":
        read_from_a_dead_server()
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "lock":
        ctypes.PyDLL(None).sleep(60)  # PyDLL does not release the GIL
    if kind == "cut":
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        read_from_a_dead_server()
    if kind == "moving":
        for _ in range(16):
            time.sleep(0.1)
            heartbeat.at(step, "data")
    if kind == "pause":
        # Like a job that is suspended and resumed.
        subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    kind, faulty, *at_step = sys.argv[4].split(":")
    fault_step = int(at_step[0]) if at_step else 3
    limits = {"hang_s": 60.0, "silent_s": 60.0, "gone_s": 60.0, "first_s": 60.0}
    limits |= {name: float(value) for name, _, value in (word.partition("=") for word in sys.argv[5:])}
    world = World(
        rank=rank, world_size=size, local_rank=0, local_size=1, hostname=f"n{rank}", launcher="hand"
    )

    def on_lost(loss):
        print(loss.text, flush=True)
        os._exit(LOST)

    comm = FileComm(rank, size, folder)
    heartbeat = start_heartbeat(
        world,
        comm,
        "127.0.0.1",
        "127.0.0.1",
        stacks=folder / "stacks",
        on_lost=on_lost,
        **limits,
    )
    assert heartbeat.note == ""
    for step in range(STEPS):
        heartbeat.at(step, "data")
        if step == fault_step and faulty in (str(rank), "all"):
            fail(kind, heartbeat, step)
        heartbeat.at(step, "backward")
        if step == fault_step and kind == "wait":
            wait_where_all_wait()
        if step == fault_step and kind == "who" and str(rank) == faulty:
            os._exit(1)
        if step == fault_step and kind == "who":
            print(heartbeat.gone_ranks(5.0), flush=True)
            break
        comm.barrier("step")
    heartbeat.close()


if __name__ == "__main__":
    main()
