"""Identifies the nodes of one job, and exchanges their results through files in a shared directory.

The first node writes a question, which the others answer with their results, and removes the directory at the
end. MPI is not used, because MPI itself may not work. Each run has a random ID, so that files of an earlier
run are ignored.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import partial_file
from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.private_directory import is_private
from ddp_hpc.discovery.hostlist import expand_hostlist
from ddp_hpc.discovery.launcher_environment import pbs_hosts
from ddp_hpc.discovery.world import discover
from ddp_hpc.doctor.check_result import STATUSES, Result

_POLL_S = 0.2
# The number of polls without a question after which the exchange has ended, about a second.
_MOST_MISSING = 5
# Additional time that the first node may need for its slowest check.
LINGER_S = 100.0
_MAX_BYTES = 1 << 20  # the maximum size of an answer in bytes
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_STEP = ("SLURM_STEP_ID", "PALS_APID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Place:
    """The position of this process among the nodes of its job; `node_rank` is None if it is unknown."""

    job: str  # IDs of job and step, usable as a file name
    local_rank: int = 0
    local_size: int = 1
    node_rank: int | None = 0
    num_nodes: int = 1
    hosts: tuple[str, ...] = ()  # hostnames by node rank; empty if they are unknown

    def label(self, node: int) -> str:
        """Returns the node's name for messages."""
        return self.hosts[node] if self.hosts else f"node {node}"


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Returns the position of this process in its job; None if it is not a rank or variables conflict."""
    try:
        world = discover(environ, load_mpi=lambda _family, _title: None)
    except LaunchError:  # the check `launch` reports this error
        return None
    if world.launcher == "single":
        return None
    hosts = _hosts(environ)
    node_rank, num_nodes = world.node_rank, world.num_nodes
    if (node_rank is None or num_nodes is None) and hosts:
        names = [host.partition(".")[0] for host in hosts]
        num_nodes = len(hosts)
        node_rank = names.index(world.hostname) if world.hostname in names else None
    if num_nodes is None:
        node_rank, num_nodes = None, 2  # several nodes, but the number is unknown
    if len(hosts) != num_nodes:
        hosts = ()
    ids = [environ[name] for names in (_JOB, _STEP) for name in names if name in environ]
    job = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(ids))[:80] or "job"
    return Place(job, world.local_rank, world.local_size, node_rank, num_nodes, hosts)


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    try:
        return tuple(expand_hostlist(names) if names else pbs_hosts(environ))
    except LaunchError:
        return ()


def exchange_directory(shared: Path, place: Place) -> Path:
    """Returns the directory for the files that the nodes of one job exchange."""
    return shared / f".ddp-hpc-doctor-{place.job}"


def ask(directory: Path, run: str) -> None:
    """Starts the exchange with a new directory that contains the question; called by the first node only.

    Raises:
        OSError: the directory cannot be created.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(
        mode=0o700
    )  # mkdir fails if the directory still exists, because then it belongs to another user
    _write(directory / "question", {"run": run})


def gather(directory: Path, run: str, place: Place, wait_s: float) -> dict[int, list[Result]]:
    """Waits up to `wait_s` for the results of the other nodes, then ends the exchange.

    Called by the first node only.
    """
    results: dict[int, list[Result]] = {}
    end_s = time.monotonic() + wait_s
    while len(results) < place.num_nodes - 1 and time.monotonic() < end_s:
        for node in set(range(1, place.num_nodes)) - set(results):
            own = _results(_read(directory / f"results-{run}-{node}"))
            if own is not None:
                results[node] = own
        time.sleep(_POLL_S)
    shutil.rmtree(directory, ignore_errors=True)
    return results


def answer(directory: Path, node_rank: int, results: list[Result], wait_s: float) -> bool:
    """Sends this node's results to the first node. Returns False if the first node did not ask for them
    within `wait_s`.

    The question can be that of an earlier run that was killed, and then the first node of the present run
    replaces the directory at once. If the directory stays away, the first node has read the results.
    """
    answered, num_missing, end_s = "", 0, time.monotonic() + wait_s
    while time.monotonic() < end_s:
        # If other users can write to the parent directory, another user may have created this directory.
        question = _read(directory / "question") if is_private(directory) else None
        num_missing = 0 if question is not None else num_missing + 1
        if answered and num_missing > _MOST_MISSING:
            return True
        run = str((question or {}).get("run", ""))
        with suppress(OSError):  # the directory may be removed at any time
            if re.fullmatch(r"[0-9a-f]{8,32}", run) and run != answered:
                _write(directory / f"results-{run}-{node_rank}", {"results": [asdict(r) for r in results]})
                answered, end_s = run, time.monotonic() + wait_s + LINGER_S
        time.sleep(_POLL_S)
    return bool(answered)


def _write(path: Path, content: dict[str, Any]) -> None:
    with partial_file(path, "doctor") as partial:
        with partial.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content))
        partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the object in the file; empty if it cannot be read now, None if the file does not exist."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _results(content: dict[str, Any] | None) -> list[Result] | None:
    """Returns the results in an answer, or None if it is invalid."""
    try:
        results = [Result(**row) for row in (content or {})["results"]]
    except (KeyError, TypeError):
        return None
    good = all(isinstance(text, str) for r in results for text in asdict(r).values())
    return results if good and all(r.status in STATUSES for r in results) else None
