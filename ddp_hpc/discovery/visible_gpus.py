"""Counts the visible GPUs, and corrects CUDA_VISIBLE_DEVICES if it names the GPUs of another node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ddp_hpc.base.errors import LaunchError

# NVIDIA's kernel driver has a directory for each GPU of the node, with its UUID.
_DRIVER = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-\S+)", re.MULTILINE)
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ASK_LIMIT_S = 10.0


def correct_visible_gpus(environ: MutableMapping[str, str], driver: Path = _DRIVER) -> str:
    """Removes CUDA_VISIBLE_DEVICES with the UUIDs of another node; returns a line that says so.

    PBS can set the variable to the UUIDs of each node's GPUs, but mpiexec passes the value of the first node
    on to all of them (ASPIRE 2A's guide, version 1.4, page 151). On the other nodes, no GPU would be visible.

    Raises:
        LaunchError: the variable names GPUs of another node, but not as many as this node has, so it is
            unknown which ones belong to the job.
    """
    named = [part.strip() for part in environ.get(_VARIABLE, "").split(",")]
    if not all(part.startswith("GPU-") for part in named) or not (here := _uuids(driver)):
        return ""
    if any(uuid.startswith(part) for part in named for uuid in here):
        return ""
    what = f"{_VARIABLE} names {len(named)} GPUs, none of which belongs to this node"
    if len(named) != len(here):
        raise LaunchError(
            f"{what}, which has {len(here)}; mpiexec has passed on the value of another node. Let each rank "
            "set the value of its own node, as the site's guide describes, or request whole nodes."
        )
    del environ[_VARIABLE]
    return (
        f"{what}: mpiexec has passed on the value of another node. It is not used, so all GPUs are visible."
    )


def gpus_here(environ: Mapping[str, str]) -> int:
    """Returns the number of visible GPUs from CUDA_VISIBLE_DEVICES or nvidia-smi, without importing torch."""
    if (visible := environ.get(_VARIABLE)) is not None:
        # Slurm sets NoDevFiles in a job without GPUs. CUDA ignores the devices after a -1.
        devices = visible.split(",") if visible not in ("", "NoDevFiles") else []
        return devices.index("-1") if "-1" in devices else len(devices)
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, timeout=_ASK_LIMIT_S, check=False, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # Without a driver, nvidia-smi prints its error message to stdout.
    return sum(line.startswith(b"GPU ") for line in done.stdout.splitlines())


def _uuids(driver: Path) -> list[str]:
    files = sorted(driver.glob("*/information"))
    return [uuid for file in files for uuid in _UUID.findall(file.read_text(errors="replace"))]
