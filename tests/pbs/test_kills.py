"""Processes of a run are killed many times: no snapshot is lost, and no job is submitted twice.

Hydra's proxy is not killed: mpiexec does not notice its end, and its ranks keep training.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from ddp_hpc.rehearse import jobs
from tests.fakes.site import Site
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render

VICTIMS = ("supervisor", "mpiexec", "rank")
TRAIN = ["python", "-m", "ddp_hpc.train", "--model", "linear", "--num-samples", "128", "--batch-size", "8"]
TRAIN += ["--snapshot-every-steps", "50", "--metrics", "metrics.jsonl"]


@dataclass(frozen=True)
class Kill:
    at_s: float
    kind: str
    newest_step: int
    """The step of the newest snapshot at that time."""


def machine(make_site: MakeSite, epochs: int) -> Site:
    """A PBS machine with the script of a run of two ranks under Hydra."""
    site = make_site(nodes=(socket.gethostname(),))
    site.dotfile(site.pbs_bin, Path(sys.prefix) / "bin")
    options = ["--ranks-per-node", "2", "--walltime", "01:00:00", "--max-attempts", "200"]
    render(site, "generic_pbs", *options, command=[*TRAIN, "--epochs", str(epochs)])
    return site


def run_dir(site: Site) -> Path:
    return site.work / "runs" / "ddp"


def attempts(site: Site) -> list[tuple[int, int, int]]:
    """Returns the number, the job and the time of each attempt."""
    with suppress(FileNotFoundError):
        lines = [line.split() for line in (run_dir(site) / "attempts").read_text().splitlines()]
        return [(int(number), int(job.partition(".")[0]), int(at_s)) for number, job, _, at_s in lines]
    return []


def resumed_after(site: Site, job: int) -> int | None:
    """Returns the step after which the job resumed the run; None if it was killed before that."""
    log = (site.work / f"ddp.o{job}").read_text()
    found = re.search(r"^resuming after step (\d+)", log, re.MULTILINE)
    return int(found[1]) if found else None


def newest_step(site: Site) -> int:
    found = [int(path.name.removeprefix("step_")) for path in (run_dir(site) / "snapshots").glob("step_*")]
    return max(found, default=0)


def last_loss(site: Site) -> tuple[int, float]:
    last = json.loads((site.work / "metrics.jsonl").read_text().splitlines()[-1])
    return last["step"], last["loss"]


def kind_of(argv: list[str]) -> str:
    """Returns the kind of a process with this command line; empty for other processes."""
    if Path(argv[0]).name == "mpiexec":
        return "mpiexec"
    return {"ddp_hpc.job": "supervisor", "ddp_hpc.train": "rank"}.get(
        argv[2] if argv[1:2] == ["-m"] else "", ""
    )


def processes(site: Site, kind: str) -> list[int]:
    """Returns the processes of this kind in the machine's jobs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if kind_of(argv) == kind and str(site.work).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def active_jobs(site: Site) -> list[int]:
    """Returns the jobs that wait or run."""
    return [number for number in jobs.numbers(site.root) if jobs.load(site.root, number)["job_state"] != "F"]


def kill_one(site: Site, chance: random.Random) -> Kill | None:
    """Kills a process of a random kind, if there is one."""
    kind = chance.choice(VICTIMS)
    if not (pids := processes(site, kind)):
        return None
    kill = Kill(time.time(), kind, newest_step(site))
    with suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return kill


@pytest.mark.parametrize("num_kills", [pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(2400)])])
def test_kills_lose_no_snapshot_and_no_job_is_submitted_twice(make_site: MakeSite, num_kills: int) -> None:
    epochs = 200 * num_kills
    whole, site = machine(make_site, epochs), machine(make_site, epochs)
    whole.wait(whole.submit("job.pbs"), timeout_s=600.0)
    seed = random.randrange(10**6)
    print("seed", seed)  # shown if the test fails
    chance = random.Random(seed)
    kills: list[Kill] = []
    num_submitted = 0
    end_s = time.monotonic() + 2000.0
    while not (state := run_dir(site) / "state").exists() or not state.read_text().startswith("done "):
        assert time.monotonic() < end_s, site.logs()
        active = active_jobs(site)
        assert len(active) <= 2, "a job and its successor"
        if not active:  # as the user does after a failure
            site.submit("job.pbs")
            num_submitted += 1
        time.sleep(chance.uniform(0.5, 9.0))
        if len(kills) < num_kills and (kill := kill_one(site, chance)):
            kills.append(kill)
    assert last_loss(site) == last_loss(whole)
    made = attempts(site)
    print(Counter(kill.kind for kill in kills), f"{len(made)} attempts, {num_submitted} submitted by hand")
    assert len(kills) == num_kills
    # A second successor of a job would be an attempt of the same number.
    assert sum(number == 1 for number, _, _ in made) <= num_submitted
    for before, after in pairwise(made):
        assert after[0] in (1, before[0] + 1), made
    for kill in kills:
        steps = [resumed_after(site, job) for _, job, at_s in made if at_s > kill.at_s]
        assert all(step >= kill.newest_step for step in steps if step is not None), (kill, made, steps)
