"""The nodes of one job: who is which, and how they tell each other through files in a shared folder.

The first node writes a question, the others answer it with their results, then all
answer a second one with their clocks; the first node removes the folder at the end.
No MPI: it may be what is wrong. Each run has a word of its own, so that files of an
earlier one are not believed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_hpc.doctor.result import STATUSES, Result
from ddp_hpc.errors import LaunchError
from ddp_hpc.partial_files import partial_file
from ddp_hpc.world.hostlist import expand_hostlist
from ddp_hpc.world.launch_env import pbs_hosts
from ddp_hpc.world.topology import World, discover

_POLL_S = 0.2
_PONG_POLL_S = 0.02
_PONG_LIMIT_S = 10.0
# What the first node may need beyond the wait itself: its slowest check, and the clocks.
LINGER_S = 100.0
_MAX_BYTES = 1 << 20  # of an answer: what is longer is not ours
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_STEP = ("SLURM_STEP_ID", "PALS_APID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Place:
    """This process among the nodes of its job; `node_rank` is None where no variable tells it."""

    job: str  # job and step, fit for a file name
    local_rank: int = 0
    local_size: int = 1
    node_rank: int | None = 0
    num_nodes: int = 1
    hosts: tuple[str, ...] = ()  # by node rank; empty where no list is to be had

    def label(self, node: int) -> str:
        """The node's name for people."""
        return self.hosts[node] if self.hosts else f"node {node}"


@dataclass
class Answers:
    """What the first node gathered, by node rank."""

    results: dict[int, list[Result]] = field(default_factory=dict)
    # The least and the most by which that node's clock is ahead of the first one's, in seconds.
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where this process stands; None where it is no rank or contradictory variables keep it from telling."""
    try:
        world = discover(environ, load_mpi=lambda _family, _title: None)
    except LaunchError:  # the check `launch` tells it
        return None
    if world.launcher == "single":
        return None
    hosts = _hosts(environ)
    node_rank, num_nodes = world.node_rank, world.num_nodes
    if (node_rank is None or num_nodes is None) and hosts:
        num_nodes, node_rank = len(hosts), _index(world, hosts)
    if num_nodes is None:
        node_rank, num_nodes = None, 2  # several: how many is not told
    if len(hosts) != num_nodes:
        hosts = ()
    words = [environ[name] for names in (_JOB, _STEP) for name in names if name in environ]
    job = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(words))[:80] or "job"
    return Place(job, world.local_rank, world.local_size, node_rank, num_nodes, hosts)


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    try:
        return tuple(expand_hostlist(names) if names else pbs_hosts(environ))
    except LaunchError:
        return ()


def _index(world: World, hosts: tuple[str, ...]) -> int | None:
    names = [host.partition(".")[0] for host in hosts]
    return names.index(world.hostname) if world.hostname in names else None


def meeting_folder(shared: Path, place: Place) -> Path:
    """The folder in which the nodes of one job meet."""
    return shared / f".ddp-hpc-doctor-{place.job}"


def ask(folder: Path, run: str) -> None:
    """Opens the meeting: a fresh folder with the question. First node alone.

    Raises:
        OSError: the folder cannot be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _write(folder / "question", {"run": run})


def gather(folder: Path, run: str, place: Place, wait_s: float) -> Answers:
    """The other nodes' results and clocks, as far as they come in `wait_s`; then the meeting is over.

    First node alone.
    """
    answers, others = Answers(), set(range(1, place.num_nodes))
    end_s = time.monotonic() + wait_s
    while others - set(answers.results) and time.monotonic() < end_s:
        for node in _named(folder, f"results-{run}-", others - set(answers.results)):
            if (results := _results(_read(folder / f"results-{run}-{node}"))) is not None:
                answers.results[node] = results
        time.sleep(_POLL_S)
    asked_s = time.time()
    _write(folder / "question", {"run": run, "clocks": True})
    end_s = time.monotonic() + min(wait_s, _PONG_LIMIT_S)
    while set(answers.results) - set(answers.clocks) and time.monotonic() < end_s:
        for node in _named(folder, f"clock-{run}-", set(answers.results) - set(answers.clocks)):
            told_s = (_read(folder / f"clock-{run}-{node}") or {}).get("at_s")
            if isinstance(told_s, float):
                # It was read between the question and now.
                answers.clocks[node] = told_s - time.time(), told_s - asked_s
        time.sleep(_PONG_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)
    return answers


def answer(folder: Path, node_rank: int, results: list[Result], wait_s: float) -> bool:
    """Answers the first node until it ends the meeting; False where it did not ask within `wait_s`."""
    answered, clock_told, end_s = "", "", time.monotonic() + wait_s
    while time.monotonic() < end_s:
        question = _read(folder / "question")
        if question is None and clock_told:  # not before: the first node removes an older run's folder
            return True
        run = str((question or {}).get("run", ""))
        with suppress(OSError):  # the folder may be removed just now
            if re.fullmatch(r"[0-9a-f]{8,32}", run) and run != answered:
                _write(folder / f"results-{run}-{node_rank}", {"results": [asdict(r) for r in results]})
                answered, end_s = run, time.monotonic() + wait_s + LINGER_S
            elif question and question.get("clocks") and clock_told != run:
                _write(folder / f"clock-{run}-{node_rank}", {"at_s": time.time()})
                clock_told = run
        time.sleep(_POLL_S)
    return bool(answered)


def _named(folder: Path, prefix: str, nodes: set[int]) -> list[int]:
    """The nodes whose file of that name is there: one look at the folder, however many nodes."""
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 - names are what is wanted
    except OSError:
        return []
    return [node for node in sorted(nodes) if f"{prefix}{node}" in names]


def _write(path: Path, content: dict[str, Any]) -> None:
    with partial_file(path, "doctor") as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    """The file's object; empty where it cannot be read now, None where there is no file."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _results(content: dict[str, Any] | None) -> list[Result] | None:
    """The results of an answer; None where it is not one."""
    try:
        results = [Result(**row) for row in (content or {})["results"]]
    except (KeyError, TypeError):
        return None
    good = all(isinstance(text, str) for r in results for text in asdict(r).values())
    return results if good and all(r.status in STATUSES for r in results) else None
