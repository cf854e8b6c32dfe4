"""Output common to all benchmarks: the machine description and the JSON document."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.text_table import Row
from ddp_hpc.training.process_group.versions import versions
from ddp_hpc.training.telemetry.metrics_file import check_outputs, write_json


def say(line: str) -> None:
    """Prints a message to stderr; stdout contains only results."""
    click.echo(line, err=True)


def format_us(value: float) -> str:
    """Returns a number of microseconds for tables."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def machine() -> dict[str, Any]:
    """Describes the properties of this machine that affect measurements."""
    import torch

    from ddp_hpc.training.process_group.devices import device_name

    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
    }


def available_bytes() -> int:
    """Returns the available memory of this machine as estimated by the kernel."""
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


def document(name: str, rows: list[Row], packages: Sequence[str] = (), **about: Any) -> dict[str, Any]:
    """Returns the JSON document of a benchmark, with the machine, the fields in `about` and the versions of
    `packages`.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    installed = versions() | {package: version(package) for package in packages}
    fields = {"machine": machine()} | about
    return {"name": name, "created": created, "versions": installed, **fields, "rows": rows}


def check_files(json_file: Path | None, data: Path | None = None) -> None:
    """Raises RequestError if the JSON file cannot be written or would overwrite an unrelated file."""
    if why := check_outputs({"--json": json_file}, data):
        raise RequestError(why)


def save(result: dict[str, Any], json_file: Path | None) -> None:
    """Writes the JSON document of a benchmark atomically, if a file was requested.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    if json_file is not None:
        write_json(json_file, result)
