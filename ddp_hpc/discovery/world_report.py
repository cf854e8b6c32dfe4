"""Output of `ddp-hpc env`: rank, world size and node of this process, and the source of each value."""

from __future__ import annotations

import json
import os
import sys

from ddp_hpc.discovery.launcher_environment import VALUE_NAMES
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.errors import LaunchError
from ddp_hpc.text_table import aligned

_LIMIT_S = 60.0
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


def run(discovery: str = "auto", as_json: bool = False) -> None:
    """Prints rank, world size and node of this process to stdout, as a table or one line of JSON.

    Collective if MPI is used: every rank must call this.

    If `discover` raises an error, it is printed as one line, and the process exits with code 2.
    """
    try:
        with time_limit(_LIMIT_S, "") as watchdog:
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
        "values": {name: getattr(world, name) for name in VALUE_NAMES},
        "sources": {name: world.sources.get(name, "unknown") for name in VALUE_NAMES},
        "cores": len(os.sched_getaffinity(0)),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "notes": list(world.notes),
    }


def table(world: World) -> list[str]:
    """Returns the world as lines of a table; with several ranks each line has the rank's prefix."""
    rows = [
        ("launcher", world.launcher, "see docs/explanation/rank-discovery.md for the order of preference")
    ]
    for name in VALUE_NAMES:
        value = getattr(world, name)
        rows.append((name, "?" if value is None else str(value), world.sources.get(name, "unknown")))
    rows.append(("hostname", world.hostname, "the system's host name"))
    rows.append(("cores", str(len(os.sched_getaffinity(0))), "sched_getaffinity"))
    rows += [(name, os.environ[name], "environment") for name in _SETTINGS if name in os.environ]
    prefix = world.prefix if world.world_size > 1 else ""
    lines = [*aligned(rows, num_left=3), *(f"note: {note}" for note in world.notes)]
    return [prefix + line for line in lines]
