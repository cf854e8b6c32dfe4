"""The pip commands that install optional packages."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.base.errors import RequestError

_CHECKOUT = Path(__file__).resolve().parents[2]


def require(what: str, extra: str, *packages: str) -> None:
    """Checks that packages of an extra are installed, without importing them.

    Raises:
        RequestError: a package is missing; the message contains the pip command.
    """
    for package in packages:
        if find_spec(package) is None:
            raise RequestError(
                f"{what} requires {package}, which is not installed; run {install_command(extra)}"
            )


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra of ddp-hpc, such as `train`.

    The command lists the packages, because ddp-hpc is not in any package index: `pip install
    'ddp-hpc[train]'` would fail.
    """
    project = _CHECKOUT / "pyproject.toml"
    text = project.read_text(encoding="utf-8") if project.is_file() else ""
    if 'name = "ddp-hpc"' in text:
        packages: list[str] = tomllib.loads(text)["project"]["optional-dependencies"][extra]
    else:
        try:
            lines = [line.split(";") for line in metadata.requires("ddp-hpc") or ()]
        except metadata.PackageNotFoundError:  # only the directory of the package was copied
            return f"pip install '.[{extra}]' in the checkout of ddp-hpc"
        packages = [
            name.strip() for name, *marker in lines if re.search(rf"extra == .{extra}\b", "".join(marker))
        ]
    return f"pip install {shlex.join(packages)}"
