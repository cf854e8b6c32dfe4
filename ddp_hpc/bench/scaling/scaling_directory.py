"""The directory of a scaling benchmark, with the request in `scaling.json` and a subdirectory per point."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.bench.scaling.points import (
    LOG,
    METRICS,
    MODES,
    SUMMARY,
    TRACES,
    Point,
    Settings,
    Size,
    differing,
    mode_points,
)

_REQUEST, _LOCK = "scaling.json", ".lock"
_KIND = "request of ddp-hpc bench scaling"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All points requested for a directory so far: the settings, and the sizes of each mode by increasing
    ranks.
    """

    settings: Settings
    sizes: Mapping[str, tuple[Size, ...]]

    def points(self) -> list[Point]:
        """Returns all points without duplicates, the smallest first."""
        return sorted({point for mode in self.sizes for point in self.of_mode(mode)})

    def of_mode(self, mode: str) -> list[Point]:
        """Returns the points of a mode."""
        return mode_points(mode, self.settings, self.sizes[mode])


def read_plan(directory: Path) -> Plan | None:
    """Reads the plan of a directory; None if it is empty or does not exist.

    Raises:
        RequestError: the path is a file, or the directory contains something else.
    """
    path = directory / _REQUEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if _has_entries(directory):
            raise RequestError(
                f"--dir {directory} contains files, but not {_REQUEST}, so it is not the directory of a "
                "scaling benchmark; use a new or empty directory"
            ) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{_REQUEST} is not a text file"
        raise _unusable(directory, why) from None
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{path} was not written by ddp-hpc bench scaling; use another --dir, or remove the file"
        ) from None


def extend_plan(before: Plan | None, settings: Settings, sizes: Mapping[str, tuple[Size, ...]]) -> Plan:
    """Adds the points of a new request to those of earlier requests for the directory.

    Raises:
        RequestError: the points are not comparable, or would need the same subdirectory.
    """
    if before is None:
        return Plan(settings=settings, sizes=dict(sizes))
    if other := differing(before.settings, settings):
        raise RequestError(
            f"--dir contains points measured with {other}; use the same options as before, or another "
            "directory"
        )
    merged = {}
    for mode in MODES:
        by_ranks = {size.ranks: size for size in before.sizes.get(mode, ())}
        for size in sizes.get(mode, ()):
            if (old := by_ranks.setdefault(size.ranks, size)) != size:
                raise RequestError(
                    f"--dir contains a point with {size.ranks} ranks on {old.nodes} nodes, but the current "
                    f"options place these ranks on {size.nodes} nodes; use another directory"
                )
        if by_ranks:
            merged[mode] = tuple(sorted(by_ranks.values()))
    global_batch = before.settings.global_batch or settings.global_batch
    return Plan(settings=replace(settings, global_batch=global_batch), sizes=merged)


def write_plan(directory: Path, plan: Plan) -> None:
    """Writes the plan to the directory.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    sizes = {mode: [asdict(size) for size in of_mode] for mode, of_mode in plan.sizes.items()}
    value = {"kind": _KIND, "settings": asdict(plan.settings), "sizes": sizes}
    write_atomically(directory / _REQUEST, (json.dumps(value, indent=2) + "\n").encode(), "scaling")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the directory for the block against other processes on this machine that start points in it.

    Raises:
        RequestError: another process holds the lock, or the directory is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(
            f"cannot write to --dir {directory} ({error.strerror}); use another directory"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"--dir {directory} is in use by another ddp-hpc bench scaling; wait until that has ended, "
                "or use another directory"
            ) from None
        yield
    finally:
        os.close(handle)


def is_in_use(directory: Path) -> bool:
    """Returns whether another process on this machine is starting points in the directory."""
    try:
        with (directory / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def empty_point(directory: Path) -> None:
    """Creates the directory of a point, and removes the files of an earlier attempt from it.

    Raises:
        DdpHpcError: the file system returned an error.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY, METRICS, LOG):
            (directory / name).unlink(missing_ok=True)
        if (directory / TRACES).is_dir():
            shutil.rmtree(directory / TRACES)
    except OSError as error:
        raise DdpHpcError(f"cannot prepare the directory {directory} for a run") from error


def _has_entries(directory: Path) -> bool:
    try:
        return any(path.name != _LOCK for path in directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(directory, error.strerror) from None


def _unusable(directory: Path, why: str | None) -> RequestError:
    return RequestError(f"cannot use --dir {directory} ({why}); use another directory")


def _parse(value: Any) -> Plan:
    if value["kind"] != _KIND:
        raise ValueError
    settings = dict(value["settings"])
    settings |= {name: tuple(settings[name]) for name in ("training", "launch")}
    sizes = {mode: tuple(Size(**size) for size in value["sizes"][mode]) for mode in value["sizes"]}
    return Plan(settings=Settings(**settings), sizes=sizes)
