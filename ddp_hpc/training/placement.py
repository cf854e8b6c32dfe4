"""Looks in the first second of a job at where its ranks run, and ends it where that cannot work."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ddp_hpc.errors import DdpHpcError, RequestError, stop_together
from ddp_hpc.partial_files import write_whole
from ddp_hpc.training.devices import device_place
from ddp_hpc.training.metrics import versions
from ddp_hpc.training.store_comm import StoreComm
from ddp_hpc.world.comm import mpi_library
from ddp_hpc.world.placement import own_cores
from ddp_hpc.world.placement_check import Finding, check, summary, table
from ddp_hpc.world.rank_place import RankPlace, own_place
from ddp_hpc.world.topology import World

_WRITER = "placement"


def check_placement(
    comm: StoreComm | None, world: World, device: torch.device, backend: str
) -> tuple[str, ...]:
    """What rank 0 has to say of the placement: one line, and one more for each warning.

    The table goes into the run folder, where there is one. `comm` is None in a world of one.

    Collective: every rank must call this.

    Raises:
        RequestError: on rank 0, where two ranks would share a device under NCCL; ReportedElsewhereError on
            the others.
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
    well = "nothing to mend" if not findings else f"{len(findings)} warning{'s' * (len(findings) > 1)}"
    first = f"placement: {summary(places)}, {well}{where}"
    return (first, *(f"warning: {finding.text}" for finding in findings))


def _versions(world: World) -> dict[str, str]:
    return versions() | ({"mpi": mpi_library().partition(" (")[0]} if world.mpi is not None else {})


def _write(places: Sequence[RankPlace], findings: Sequence[Finding], run_dir: str) -> str:
    """Writes `placement.txt` and `placement.json`; gives what to say of it."""
    if not run_dir:
        return ""
    rows = {"ranks": [asdict(place) for place in places], "findings": [asdict(found) for found in findings]}
    path = Path(run_dir) / "placement.txt"
    try:
        write_whole(path, table(places, findings).encode(), _WRITER)
        write_whole(path.with_suffix(".json"), (json.dumps(rows, indent=1) + "\n").encode(), _WRITER)
    except DdpHpcError as error:
        return f" ({error})"
    return f" ({path})"
