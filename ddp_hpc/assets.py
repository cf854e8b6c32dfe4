"""Where templates/, profiles/ and jobs/ are: in the wheel, in a checkout, or in the user's own folder."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_hpc.errors import DdpHpcError

_PACKAGE = Path(__file__).resolve().parent


def asset_folder(name: str) -> Path:
    """The shipped folder of that name (`templates`, `profiles` or `jobs`).

    Raises:
        DdpHpcError: where the installation lacks it.
    """
    in_wheel = _PACKAGE / "_assets" / name
    if in_wheel.is_dir():
        return in_wheel
    checkout = _PACKAGE.parent
    project = checkout / "pyproject.toml"
    # A sibling folder named "templates" proves nothing; the project file beside it does.
    if project.is_file() and 'name = "ddp-hpc"' in project.read_text(encoding="utf-8"):
        beside = checkout / name
        if beside.is_dir():
            return beside
    raise DdpHpcError(
        f"the folder {name}/ was found neither in {in_wheel.parent} nor in a checkout at {checkout}; "
        "install ddp-hpc again (pip install --force-reinstall ddp-hpc)"
    )


def user_folder(name: str) -> Path:
    """The user's own folder of that name, which need not exist: `~/.config/ddp-hpc/NAME`."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "ddp-hpc" / name
