"""The pip commands that install optional packages."""

from __future__ import annotations

from importlib.util import find_spec

from ddp_hpc.base.errors import RequestError


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

    ddp-hpc is not in any package index, so it is installed from its checkout.
    """
    return f"pip install '.[{extra}]' in the checkout of ddp-hpc"
