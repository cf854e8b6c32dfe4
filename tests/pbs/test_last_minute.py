"""A random part of a job fails in the last minute before its walltime.

The run then completes, or says how to resume it. Parts are killed, stopped or blocked: a rank, mpiexec, the
supervisor, or PBS's server for 20 s.
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
from pathlib import Path

import pytest

from ddp_hpc.base.units import format_walltime
from ddp_hpc.discovery.listening_ports import sockets_of, tcp_sockets
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.pbs import server
from tests.fakes.site import PROJECT, Site, program
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render
from tests.pbs.test_kills import active_jobs, processes
from tests.waiting import wait_until

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


def machine(make_site: MakeSite) -> Site:
    site = make_site(nodes=(socket.gethostname(),), obituary_s=1.0)
    site.dotfile(site.pbs_bin, Path(sys.prefix) / "bin")
    (site.work / "slow.py").write_text(MODEL)
    options = ["--ranks-per-node", "2", "--walltime", format_walltime(WALLTIME_S)]
    options += ["--env", "OMP_NUM_THREADS=1"]
    render(site, "generic_pbs", *options, command=["python", "-m", "ddp_hpc.train", *OPTIONS])
    return site


def last_loss(site: Site) -> tuple[int, float]:
    last = json.loads((site.work / "metrics.jsonl").read_text().splitlines()[-1])
    return last["step"], last["loss"]


def run_dir(site: Site) -> Path:
    (found,) = (site.work / "runs").iterdir()
    return found


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
        down = site.root / server.DOWN
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
    end_s = time.monotonic() + 400.0
    while active_jobs(site):
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


# Stops in its first attempt once the test has blocked mpiexec, and completes in its second.
WAITS = """#!/bin/bash
cd "$DDP_HPC_RUN_DIR"
say() { echo "$*" >.state; mv .state state; }
if [[ -e state ]]; then say done 20; exit 0; fi
touch up
until [[ -e blocked ]]; do sleep 0.05; done
say requeue 10 no time left
exit 75
"""


def test_a_connection_of_a_stranger_to_the_port_of_mpiexec_does_not_end_the_chain(
    make_site: MakeSite,
) -> None:
    """The real Hydra then notices neither the end of its ranks nor SIGTERM."""
    site = make_site(nodes=(socket.gethostname(),))
    site.dotfile(site.pbs_bin, Path(sys.prefix) / "bin")
    command = str(program(site.root / "waits.sh", WAITS))
    render(site, "generic_pbs", "--walltime", "00:00:12", command=[command])
    job_id = site.submit("job.pbs")
    wait_until(lambda: (site.work / "runs/ddp/up").exists())
    with blocked(*processes(site, "mpiexec")):
        (site.work / "runs/ddp/blocked").touch()
        log = site.log(site.wait(job_id))
    assert "ddp-hpc: killing mpiexec, which does not end\n" in log
    assert "; attempt 2 resumes the run in job 13.pbs-srv\n" in log
    assert site.wait("13.pbs-srv")["Exit_status"] == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_runs", [40])
def test_a_fault_in_the_last_minute_loses_no_run(make_site: MakeSite, num_runs: int) -> None:
    whole = machine(make_site)
    whole.wait(whole.submit("job.pbs"), timeout_s=200.0)
    until_no_job(whole)
    seed = int(os.environ.get("DDP_HPC_TEST_SEED", "0")) or random.randrange(10**6)
    print("seed", seed)  # shown if the test fails
    sites = [machine(make_site) for _ in range(num_runs)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        ended = list(pool.map(lambda number: one_run(sites[number], number, seed), range(num_runs)))
    for site in sites:
        assert last_loss(site) == last_loss(whole), site.logs()
        assert (run_dir(site) / "state").read_text().startswith(f"done {NUM_STEPS}")
    print(Counter((kind, str(how), end) for (kind, how), end in ended))
