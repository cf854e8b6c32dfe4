"""The process of a rank that uses torch and the device, so that it can hang or crash alone.

`python -m ddp_hpc.node_check.worker PIPE PLACE` writes one JSON object per line to the file descriptor PIPE:
the stage that begins, or the problems that were found. PLACE is the place of the rank in the world, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from ddp_hpc.base import process_control
from ddp_hpc.discovery.world import World
from ddp_hpc.doctor.check_result import first_line
from ddp_hpc.node_check.results import Problem

_KILLED_S = 5.0


@dataclass(frozen=True)
class Answer:
    """What the worker has found. `num_devices` is None if it has not looked for devices."""

    problems: tuple[Problem, ...]
    num_devices: int | None = None


class Worker:
    """The worker of this rank, which has started. `on_stage` is called with each device and stage."""

    def __init__(self, world: World, on_stage: Callable[[str, str], None]) -> None:
        reader, writer = os.pipe()
        names = ("rank", "world_size", "local_rank", "local_size", "hostname", "launcher")
        place = json.dumps({name: getattr(world, name) for name in names})
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(writer), place],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[writer],
            text=True,
            preexec_fn=lambda: process_control.die_with_parent(signal.SIGKILL),
        )
        os.close(writer)
        self._lines = os.fdopen(reader)
        self._on_stage, self._stage = on_stage, "starting"

    def answer(self) -> Answer:
        """Waits for the next problems that the worker reports."""
        for line in self._lines:
            fields = json.loads(line)
            if "stage" not in fields:
                problems = tuple(Problem(**each) for each in fields["problems"])
                return Answer(problems, fields.get("num_devices"))
            self._stage = fields["stage"]
            self._on_stage(fields["where"], fields["stage"])
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return Answer((Problem("crash", f"the process that checks the device {how} ({self._stage})"),))

    def request_all_reduce(self, link: dict[str, Any], limit_s: float) -> None:
        """Makes the worker take part in an all-reduce. `link` is that of `device.all_reduce`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"link": link, "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Ends the worker, so that the device is free for the program."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process can be unkillable
            self._process.wait(_KILLED_S)


def main(pipe: int, place: str) -> None:
    """Checks the device, and takes part in the all-reduce if the rank requests it."""
    world = World(**json.loads(place))
    with os.fdopen(pipe, "w", buffering=1) as out:
        _work(world, out)


def _work(world: World, out: IO[str]) -> None:
    def tell(where: str, stage: str) -> None:
        out.write(json.dumps({"where": where, "stage": stage}) + "\n")

    def report(problems: list[Problem], num_devices: int | None = None) -> None:
        fields = {"problems": [vars(each) for each in problems], "num_devices": num_devices}
        out.write(json.dumps(fields) + "\n")

    tell(f"rank {world.rank}", "importing torch")
    try:
        from ddp_hpc.node_check import device
    except (ImportError, OSError) as error:  # a CUDA library that cannot be loaded raises OSError
        report([Problem("torch", f"torch cannot be imported ({first_line(error)})")])
        return
    number, problems = device.check_device(world, tell)
    report(problems, number)
    if line := sys.stdin.readline():
        report(device.all_reduce(world, tell=tell, **json.loads(line)))
        sys.stdin.readline()  # until the rank ends this process: others may need its connections


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
