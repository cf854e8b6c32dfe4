"""Output of `ddp-hpc env`: rank, world size and node of this process, and the source of each value."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.text_table import aligned
from ddp_hpc.discovery.cpu_affinity import own_cores
from ddp_hpc.discovery.launcher_environment import VALUE_NAMES
from ddp_hpc.discovery.network_interfaces import outward_interfaces
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.rank_placement import cpu_list
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname

_LIMIT_S = 60.0
_SETTINGS = (
    "DDP_HPC_PROFILE",
    "DDP_HPC_FABRIC_SUFFIX",
    "DDP_HPC_FABRIC_INTERFACE",
    "DDP_HPC_DEADLINE",
    "DDP_HPC_KILL_DELAY_S",
    "DDP_HPC_RUN_DIR",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
# The variables with which schedulers and launchers select devices: NVIDIA, AMD (two) and Intel.
_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def run(
    discovery: str = "auto", as_json: bool = False, num_devices: Callable[[], int | None] | None = None
) -> None:
    """Prints rank, world size and node of this process to stdout, as a table or one line of JSON.

    With `num_devices`, which returns the number of devices that the process can use, or None if it is
    unknown, the report also contains the devices.

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
    devices = _devices(num_devices()) if num_devices else {}
    if as_json:
        text = json.dumps(as_dict(world) | ({"devices": devices} if num_devices else {}))
    else:
        prefix = world.prefix if world.world_size > 1 else ""
        lines = [f"{prefix}device {name}: {value}" for name, value in devices.items()]
        text = "\n".join([*table(world), *lines])
    # Each rank writes its text in one call, so that lines of different ranks do not mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def as_dict(world: World) -> dict[str, object]:
    """Returns the world as plain data.

    The keys are `values`, `sources`, `launcher`, `hostname`, `cores`, `cpus` (a list such as `0-7`),
    `interfaces`, `settings` and `notes`.
    """
    return {
        "launcher": world.launcher,
        "hostname": world.hostname,
        "values": {name: getattr(world, name) for name in VALUE_NAMES},
        "sources": {name: world.sources.get(name, "unknown") for name in VALUE_NAMES},
        "cores": len(own_cores()),
        "cpus": cpu_list(own_cores()),
        "interfaces": list(outward_interfaces()),
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
    rows.append(("cores", f"{len(own_cores())} ({cpu_list(own_cores())})", "sched_getaffinity"))
    rows.append(("interfaces", ", ".join(outward_interfaces()) or "?", "interfaces with an IPv4 address"))
    rows += [(name, os.environ[name], "environment") for name in _SETTINGS if name in os.environ]
    prefix = world.prefix if world.world_size > 1 else ""
    lines = [*aligned(rows, num_left=3), *(f"note: {note}" for note in world.notes)]
    return [prefix + line for line in lines]


def _devices(number: int | None) -> dict[str, object]:
    variables = {name: os.environ[name] for name in _DEVICE_VARIABLES if name in os.environ}
    return {"number": number, **variables}
