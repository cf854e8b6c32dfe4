"""Output common to all benchmarks: the machine description, the JSON document and the picture."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.atomic_files import begins_with, write_atomically
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.text_table import Row
from ddp_hpc.training.process_group.versions import versions
from ddp_hpc.training.telemetry.metrics_file import check_outputs, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = {".png": (b"\x89PNG",), ".svg": (b"<?xml", b"<svg")}


@dataclass(frozen=True)
class Panel:
    """A group of bars in the picture, each with a label, a length and a note."""

    title: str
    bars: Sequence[tuple[str, float, str]]

    @property
    def height(self) -> int:
        """The height in units of bars, including one for the title."""
        return len(self.bars) + 1

    def draw(self, axes: Any, axis: str) -> None:
        """Draws the bars on a logarithmic axis."""
        labels, lengths, notes = zip(*self.bars, strict=True)
        bars = axes.barh(range(len(labels)), lengths)
        axes.set_yticks(range(len(labels)), labels)
        axes.bar_label(bars, notes, padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set(title=self.title, xlabel=axis, xscale="log")


@dataclass(frozen=True)
class Curves:
    """Curves in the picture: the points (x, y) for each label, with logarithmic axes."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    x_axis: str

    height = 16

    def draw(self, axes: Any, axis: str) -> None:
        """Draws the curves; `axis` is the label of the y axis."""
        for label, points in self.points.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.legend()
        axes.grid(alpha=0.3)
        axes.set(title=self.title, xlabel=self.x_axis, ylabel=axis, xscale="log", yscale="log")


def say(line: str) -> None:
    """Prints a message to stderr; stdout contains only results."""
    click.echo(line, err=True)


def format_us(value: float) -> str:
    """Returns a number of microseconds for tables and pictures."""
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


def document(name: str, rows: list[Row], packages: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Returns the JSON document of a benchmark, with the fields in `more` and the versions of `packages`."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    found = versions() | {package: version(package) for package in packages}
    return {"name": name, "created": created, "versions": found, **more, "rows": rows}


def check_files(json_file: Path | None, picture: Path | None, data: Path | None = None) -> None:
    """Raises RequestError if an output cannot be written or would overwrite an unrelated file."""
    if picture is not None:
        suffix = picture.suffix.lower()
        if suffix not in _PICTURES:
            raise RequestError(
                f"--picture {picture}: unknown suffix {suffix!r}; use {' or '.join(_PICTURES)}"
            )
        if find_spec("matplotlib") is None:
            raise RequestError(
                f"--picture requires matplotlib, which is not installed; run {install_command('report')}"
            )
        if picture.is_file() and not begins_with(picture, *_PICTURES[suffix]):
            raise RequestError(
                f"--picture {picture} exists and is not a {suffix} file; choose another file, or remove this "
                "one"
            )
    old_picture = picture is not None and picture.is_file()
    if why := check_outputs({"--json": json_file, "--picture": None if old_picture else picture}, data):
        raise RequestError(why)


def write_files(
    result: dict[str, Any],
    json_file: Path | None,
    picture: Path | None,
    panels: Sequence[Panel | Curves],
    axis: str,
) -> None:
    """Writes the requested JSON and picture files atomically.

    Raises:
        DdpHpcError: a file cannot be written.
    """
    if json_file is not None:
        write_json(json_file, result)
    if picture is not None:
        _write_picture(picture, f"ddp-hpc bench {result['name']}, {result['created'][:10]}", panels, axis)


def _write_picture(path: Path, title: str, panels: Sequence[Panel | Curves], axis: str) -> None:
    from matplotlib.figure import Figure

    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(9, 1 + 0.3 * (sum(heights) + len(panels))), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for one, panel in zip(axes, panels, strict=True):
        panel.draw(one, axis)
    write_figure(path, figure)


def write_figure(path: Path, figure: Figure) -> None:
    """Writes a picture in the format of the suffix atomically.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    write_atomically(path, drawn.getvalue(), "bench")
