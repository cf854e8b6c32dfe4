"""Output of `ddp-hpc env`: the discovered world, and the source of each value."""

from __future__ import annotations

import json
import os
import sys

from ddp_hpc.discovery.once_per_node import print_once_per_node
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.errors import LaunchError

_VALUES = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes")
_SETTINGS = (
    "DDP_HPC_PROFILE",
    "DDP_HPC_FABRIC_SUFFIX",
    "DDP_HPC_FABRIC_INTERFACE",
    "DDP_HPC_DEADLINE",
    "DDP_HPC_KILL_DELAY_S",
    "DDP_HPC_RUN_DIR",
    "DDP_HPC_LUSTRE_STRIPE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def run(discovery: str = "auto", as_json: bool = False, timeout_s: float = 60.0) -> None:
    """Prints this process's world to stdout: a table, or one line of JSON.

    Collective if MPI is used: every rank must call this.

    Ends the process with one line and exit code 2 if the world cannot be determined (see `discover`).
    """
    try:
        with time_limit(timeout_s, "") as watchdog:
            watchdog.stage("in MPI_Init for the other ranks")
            world = discover(dict(os.environ), discovery)
    except LaunchError as error:
        # Usually all ranks have the same error, so it is printed once per node.
        print_once_per_node(f"[{short_hostname()}] error: {error}", os.environ)
        sys.exit(error.exit_code)
    text = json.dumps(as_dict(world)) if as_json else "\n".join(table(world))
    # Each rank writes its text in one call, so that lines of different ranks do not mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def as_dict(world: World) -> dict[str, object]:
    """Returns the world as plain data.

    The keys are `values`, `sources`, `launcher`, `hostname`, `cores`, `settings` and `notes`.
    """
    return {
        "launcher": world.launcher,
        "hostname": world.hostname,
        "values": {name: getattr(world, name) for name in _VALUES},
        "sources": {name: world.sources.get(name, "unknown") for name in _VALUES},
        "cores": len(os.sched_getaffinity(0)),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "notes": list(world.notes),
    }


def table(world: World) -> list[str]:
    """Returns the world as lines of a table; with several ranks each line has the rank's prefix."""
    rows = [
        ("launcher", world.launcher, "see docs/explanation/rank-discovery.md for the order of preference")
    ]
    rows += [(name, _text(getattr(world, name)), world.sources.get(name, "unknown")) for name in _VALUES]
    rows.append(("hostname", world.hostname, "the system's host name"))
    rows.append(("cores", str(len(os.sched_getaffinity(0))), "sched_getaffinity"))
    rows += [(name, os.environ[name], "environment") for name in _SETTINGS if name in os.environ]
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{left}}  {value:{middle}}  {source}" for name, value, source in rows]
    lines += [f"note: {note}" for note in world.notes]
    prefix = world.prefix if world.world_size > 1 else ""
    return [prefix + line for line in lines]


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
