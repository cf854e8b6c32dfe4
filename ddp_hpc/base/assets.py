"""Finds the directories templates, profiles and jobs: those of the package, and the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError

_PACKAGE = Path(__file__).resolve().parents[1]


def asset_directory(name: str) -> Path:
    """Returns the directory `templates`, `profiles` or `jobs` of the installed wheel or of the checkout.

    Raises:
        DdpHpcError: the installation does not contain it.
    """
    in_wheel = _PACKAGE / "_assets" / name
    if in_wheel.is_dir():
        return in_wheel
    checkout = _PACKAGE.parent
    project = checkout / "pyproject.toml"
    # Any project may have a directory `templates`, so the pyproject.toml next to it must be that of ddp-hpc.
    if project.is_file() and 'name = "ddp-hpc"' in project.read_text(encoding="utf-8"):
        beside = checkout / name
        if beside.is_dir():
            return beside
    raise DdpHpcError(
        f"the directory {name}/ was not found in {in_wheel.parent} or in {checkout}; reinstall ddp-hpc"
    )


def user_directory(name: str) -> Path:
    """Returns the user's own directory `~/.config/ddp-hpc/NAME`, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "ddp-hpc" / name
