"""Reports the transport that a backend used, as far as the backend provides it.

NCCL logs its connections. gloo and MPI provide no information to torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_hpc.base.units import counted
from ddp_hpc.discovery.network_interfaces import interface_address

_VERSION = re.compile(r"[NR]CCL version (?:: )?(\S+)")  # RCCL on ROCm: `RCCL version : 2.30.4-HEAD:2b22ab0`
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (\w+)")
_CHANNEL = re.compile(r" via ((?:P2P|SHM|NET|COLLNET|NVLS|C2C)\b.*?)(?: comm 0x.*)?$", re.MULTILINE)
_LOG_BYTES = 1 << 24


class NcclLog:
    """Captures the NCCL log of this process in memory. Must be created before NCCL is initialized.

    If the user has requested NCCL's log, those settings are not changed.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        settings = {name: environ.get(name, "") for name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG")}
        self.user_settings = " ".join(f"{name}={value}" for name, value in settings.items() if value)
        self._file = -1
        if not settings["NCCL_DEBUG_FILE"] and settings["NCCL_DEBUG"].upper() not in ("INFO", "TRACE"):
            self.user_settings = ""
            self._file = os.memfd_create("nccl-log")
            environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{self._file}"
            # This level and these subsystems log connections, but not individual calls.
            environ["NCCL_DEBUG"] = "INFO"
            environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"

    def read(self) -> str:
        """Returns the part of NCCL's log that has been written so far."""
        if self._file < 0:
            return ""
        return os.pread(self._file, _LOG_BYTES, 0).decode("utf-8", "replace")


def parse_nccl_log(log: str) -> dict[str, Any]:
    """Returns `version`, `networks` and the number of `channels` per kind from the log of a rank."""
    kinds = [
        "/".join(part for part in channel.split("/") if not part.isdigit())
        for channel in _CHANNEL.findall(log)
    ]
    version = _VERSION.search(log)
    return {
        "version": version[1] if version else "",
        "networks": sorted(
            {*_NETWORK.findall(log), *(f"provider {name}" for name in _PROVIDER.findall(log))}
        ),
        "channels": dict(Counter(kinds)),
    }


def gloo_address(environ: Mapping[str, str]) -> str:
    """Returns the interface on which gloo is set to listen, and its address; or the hostname's address."""
    if interface := environ.get("GLOO_SOCKET_IFNAME", ""):
        return f"{interface_address(interface) or 'an unknown address'} of {interface} (GLOO_SOCKET_IFNAME)"
    with suppress(OSError, UnicodeError):
        return f"{socket.gethostbyname(socket.gethostname())} (of the hostname)"
    return "an unknown address"


def transport_of_rank(backend: str, log: NcclLog, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the information about the transport that is available on this rank."""
    if backend == "nccl":
        return parse_nccl_log(log.read())
    return {"address": gloo_address(environ)} if backend == "gloo" else {}


def summary(backend: str, transports: Sequence[dict[str, Any]], user_settings: str = "") -> dict[str, Any]:
    """Combines the information of all ranks in a flat dict; `line` is a text for the user."""
    if backend == "nccl":
        return _of_nccl(transports, user_settings)
    if backend == "gloo":
        return _of_gloo(transports)
    return {"line": f"unknown, since {backend} does not report it to torch"}


def _of_nccl(transports: Sequence[dict[str, Any]], user_settings: str) -> dict[str, Any]:
    if user_settings:
        return {"line": f"see the lines with ` via ` in the NCCL log that you enabled with {user_settings}"}
    channels: Counter[str] = Counter()
    for rank in transports:
        channels.update(rank["channels"])
    versions = sorted({rank["version"] for rank in transports} - {""})
    networks = sorted({network for rank in transports for network in rank["networks"]})
    opened = ", ".join(f"{number} via {kind}" for kind, number in channels.most_common()) or "none logged"
    return {
        "line": f"NCCL {' and '.join(versions) or 'of unknown version'}, from its log: "
        f"network {', '.join(networks) or 'unknown'}; channels of all ranks: {opened}",
        "versions": versions,
        "networks": networks,
        "channels": dict(channels),
    }


def _of_gloo(transports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    addresses = Counter(rank["address"] for rank in transports)
    places = [f"{address} on {counted(number, 'rank')}" for address, number in addresses.items()]
    return {
        "line": f"gloo, set to listen on {'; '.join(places[:4])}{'; ...' * (len(places) > 4)}; gloo does not "
        "report its connections",
        "addresses": sorted(addresses),
    }
