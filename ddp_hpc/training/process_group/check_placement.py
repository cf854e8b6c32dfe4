"""Checks the placement of the ranks at the start of a job, and ends the job if it is unusable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.base.units import counted
from ddp_hpc.discovery.cpu_affinity import own_cores
from ddp_hpc.discovery.placement_problems import PlacementFinding, check, summary, table
from ddp_hpc.discovery.rank_communication import mpi_library
from ddp_hpc.discovery.rank_placement import RankPlace, own_place
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.training.process_group.devices import device_place
from ddp_hpc.training.process_group.versions import versions

_WRITER = "placement"


def check_placement(
    comm: StoreComm | None, world: World, device: torch.device, backend: str
) -> tuple[str, ...]:
    """Returns to rank 0 a summary of the placement and one line per warning; to other ranks, an empty tuple.

    If there is a run directory, rank 0 writes the placement of each rank and the findings to
    `placement.txt` (a table) and `placement.json` in it. `comm` is None for a single rank.

    Collective: every rank must call this.

    Raises:
        RequestError: on rank 0, if two ranks would share a device under NCCL or XCCL, which do not allow
            this. In this case, the other ranks raise ReportedElsewhereError.
    """
    mine = own_place(world, device_place(device), own_cores(), _versions(world), os.environ)
    places = [RankPlace(**row) for row in comm.gather("the placement", asdict(mine))] if comm else [mine]
    findings = check(places, backend) if world.rank == 0 else []
    where = _write(places, findings, os.environ.get("DDP_HPC_RUN_DIR", "")) if world.rank == 0 else ""
    fatal = next((finding.text for finding in findings if finding.ends_job), "")
    if comm and (fatal := comm.bcast(fatal)):
        stop_together(world.rank, RequestError(fatal))
    if world.rank != 0:
        return ()
    result = counted(len(findings), "warning") if findings else "no problems found"
    first = f"placement: {summary(places)}, {result}{where}"
    return (first, *(f"warning: {finding.text}" for finding in findings))


def _versions(world: World) -> dict[str, str]:
    return versions() | ({"mpi": mpi_library().partition(" (")[0]} if world.mpi is not None else {})


def _write(places: Sequence[RankPlace], findings: Sequence[PlacementFinding], run_dir: str) -> str:
    """Writes `placement.txt` and `placement.json`; returns the path, or the error, for the log."""
    if not run_dir:
        return ""
    rows = {
        "ranks": [asdict(place) for place in places],
        "findings": [asdict(finding) for finding in findings],
    }
    path = Path(run_dir) / "placement.txt"
    try:
        write_atomically(path, table(places, findings).encode(), _WRITER)
        write_atomically(path.with_suffix(".json"), (json.dumps(rows, indent=1) + "\n").encode(), _WRITER)
    except DdpHpcError as error:
        return f" ({error})"
    return f" ({path})"
