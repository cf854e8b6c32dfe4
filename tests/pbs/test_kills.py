"""Parts of a job are killed, stopped or blocked many times: no run is lost, and no job is submitted twice.

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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from ddp_hpc.base.units import format_walltime
from ddp_hpc.discovery.listening_ports import sockets_of, tcp_sockets
from ddp_hpc.rehearse import jobs
from tests.fakes.site import PROJECT, Site
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render

pytestmark = pytest.mark.soak

VICTIMS = ("supervisor", "mpiexec", "rank")


def machine(make_site: MakeSite, walltime: str, *options: str, words: tuple[str, ...]) -> Site:
    """A PBS machine with the script of a run of two ranks of ddp_hpc.train under Hydra."""
    site = make_site(nodes=(socket.gethostname(),))
    site.dotfile(site.pbs_bin, Path(sys.prefix) / "bin")
    given = ["--ranks-per-node", "2", "--walltime", walltime, *options]
    render(site, "generic_pbs", *given, command=["python", "-m", "ddp_hpc.train", *words])
    return site


@dataclass(frozen=True)
class Kill:
    at_s: float
    kind: str
    newest_step: int
    """The step of the newest snapshot at that time."""


def run_dir(site: Site) -> Path:
    return site.work / "runs" / "ddp"


def attempts(site: Site) -> list[tuple[int, int, int]]:
    """Returns the number, the job and the time of each attempt."""
    with suppress(FileNotFoundError):
        lines = [line.split() for line in (run_dir(site) / "attempts").read_text().splitlines()]
        return [(int(number), int(job.partition(".")[0]), int(at_s)) for number, job, _, at_s in lines]
    return []


def resumed_after(site: Site, job: int, restart: int) -> int | None:
    """Returns the step after which the job resumed the run in this restart, 0 for its first start; None if it
    was killed before that.
    """
    log = (site.work / f"ddp.o{job}").read_text()
    starts = re.split(r"^ddp-hpc: restart \d+ of ", log, flags=re.MULTILINE)
    found = re.search(r"^resuming after step (\d+)", starts[restart], re.MULTILINE)
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


TRAIN = ("--model", "linear", "--num-samples", "128", "--batch-size", "8", "--snapshot-every-steps", "50")


@pytest.mark.timeout(2400)
def test_kills_lose_no_snapshot_and_no_job_is_submitted_twice(make_site: MakeSite) -> None:
    num_kills = 40
    words = (*TRAIN, "--metrics", "metrics.jsonl", "--epochs", str(200 * num_kills))
    whole, site = (machine(make_site, "01:00:00", "--max-attempts", "200", words=words) for _ in range(2))
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
    restarts = [sum(job == made[index][1] for _, job, _ in made[:index]) for index in range(len(made))]
    for kill in kills:
        steps = [
            resumed_after(site, job, restart)
            for (_, job, at_s), restart in zip(made, restarts, strict=True)
            if at_s > kill.at_s
        ]
        assert all(step >= kill.newest_step for step in steps if step is not None), (kill, made, steps)


# A fault in the last minute before the walltime. The run then completes, or says how to resume it.

NUM_STEPS = 360
WALLTIME_S = 60
# Enough for two cores: the runs sleep most of the time.
NUM_AT_ONCE = 8
# A step takes 0.2 s, so the run needs two jobs.
MODEL = """
import time
from torch import nn


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)


def net():
    return Slow(4, 4)
"""
OPTIONS = ["--model", "slow:net", "--src-shape", "4", "--tgt-shape", "4", "--num-samples", "23040"]
OPTIONS += ["--max-steps", str(NUM_STEPS), "--snapshot-every-steps", "10", "--metrics", "metrics.jsonl"]
FAULTS = (
    *(
        (kind, sent)
        for kind in ("rank", "mpiexec", "supervisor")
        for sent in (signal.SIGKILL, signal.SIGSTOP)
    ),
    ("mpiexec", "connection"),
    ("server", "down"),
)
Fault = tuple[str, object]


@contextmanager
def blocked(pid: int) -> Iterator[None]:
    """Keeps a connection to each port of mpiexec, as a port scanner does, which blocks Hydra."""
    inodes, connections = sockets_of(pid), []
    for fields in tcp_sockets(Path(f"/proc/{pid}/net")):
        if fields[3] == "0A" and fields[9] in inodes:
            port = int(fields[1].rpartition(":")[2], 16)
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            connections[-1].sendall(b"GET")
    assert connections
    yield
    for connection in connections:
        connection.close()


@contextmanager
def fault(site: Site, kind: str, how: object, chance: random.Random) -> Iterator[None]:
    """Lets a part of the machine fail until the end of the block, unless it has ended already."""
    if kind == "server":
        down = site.server_is_down
        down.touch()
        up = threading.Timer(20.0, lambda: down.unlink(missing_ok=True))
        up.start()
        yield
        up.cancel()
        down.unlink(missing_ok=True)
        return
    pids = processes(site, kind)
    if pids and how == "connection":
        with blocked(chance.choice(pids)):
            yield
        return
    if pids and isinstance(how, signal.Signals):
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), how)
    yield


def until_no_job(site: Site) -> None:
    """Waits for the end of all jobs. On a busy machine, a run needs many of them."""
    numbers, end_s = [], 0.0
    while active_jobs(site):
        if numbers != jobs.numbers(site.root):
            numbers, end_s = jobs.numbers(site.root), time.monotonic() + 400.0
        assert time.monotonic() < end_s, site.logs()
        time.sleep(0.5)


def how_to_resume(site: Site, kind: str) -> str:
    """Returns the command that `status` or the log gives to a user; empty if there is none.

    The general advice of `status` is sufficient if nothing was saved, if the supervisor was killed, and if
    the run has failed, because a user then has to look at the cause first.
    """
    job_id = f"{max(jobs.numbers(site.root))}.pbs-srv"
    argv = [sys.executable, "-m", "ddp_hpc", "status", job_id]
    said = site.run(*argv, env={"PYTHONPATH": str(PROJECT)}).stdout + site.logs()
    if (kept := run_dir(site) / "resume").exists():
        return kept.read_text().splitlines()[0]
    found = re.findall(r"(cd \S+ && qsub .*)", said)
    if found:
        return str(found[-1])
    has_snapshots = any((run_dir(site) / "snapshots").glob("step_*"))
    has_failed = (run_dir(site) / "state").read_text().startswith("failed") if has_snapshots else False
    is_advised = "submit" in said or "increase --walltime" in said
    is_sufficient = kind == "supervisor" or not has_snapshots or has_failed
    return "qsub job.pbs" if is_advised and is_sufficient else ""


def one_run(site: Site, number: int, seed: int) -> tuple[Fault, str]:
    """Runs to the end, and returns the fault and how the run came to its end."""
    chance = random.Random(seed + number)
    kind, how = FAULTS[number % len(FAULTS)]
    site.submit("job.pbs")
    time.sleep(chance.uniform(5.0, WALLTIME_S + 5.0))
    with fault(site, kind, how, chance):
        until_no_job(site)
    what = f"run {number}, {kind} {how}"
    state = (run_dir(site) / "state").read_text() if (run_dir(site) / "state").exists() else ""
    if state.startswith("done"):
        return (kind, how), "complete"
    for _ in range(4):
        command = how_to_resume(site, kind)
        assert command, f"{what}: nobody says how to resume\n{site.logs()}"
        done = site.run("bash", "-c", command)
        assert done.returncode == 0, f"{what}: {command}: {done.stderr}"
        until_no_job(site)
        if (run_dir(site) / "state").read_text().startswith("done"):
            return (kind, how), "resumed by hand"
    raise AssertionError(f"{what}: not complete after four resumes\n{site.logs()}")


def slow_machine(make_site: MakeSite) -> Site:
    options = ("--env", "OMP_NUM_THREADS=1")
    site = machine(make_site, format_walltime(WALLTIME_S), *options, words=tuple(OPTIONS))
    (site.work / "slow.py").write_text(MODEL)
    return site


@pytest.mark.timeout(3600)
def test_a_fault_in_the_last_minute_loses_no_run(make_site: MakeSite) -> None:
    num_runs = 40
    whole = slow_machine(make_site)
    whole.wait(whole.submit("job.pbs"), timeout_s=200.0)
    until_no_job(whole)
    seed = int(os.environ.get("DDP_HPC_TEST_SEED", "0")) or random.randrange(10**6)
    print("seed", seed)  # shown if the test fails
    sites = [slow_machine(make_site) for _ in range(num_runs)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        ended = list(pool.map(lambda number: one_run(sites[number], number, seed), range(num_runs)))
    for site in sites:
        assert last_loss(site) == last_loss(whole), site.logs()
        assert (run_dir(site) / "state").read_text().startswith(f"done {NUM_STEPS}")
    print(Counter((kind, str(how), end) for (kind, how), end in ended))
