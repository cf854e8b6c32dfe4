"""What carried the bytes, in the backend's own words, and no more than it says.

NCCL logs it when it connects. gloo and MPI say nothing to torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_hpc.world.interfaces import interface_address

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (\w+)")
_CHANNEL = re.compile(r" via ((?:P2P|SHM|NET|COLLNET|NVLS|C2C)\b.*?)(?: comm 0x.*)?$", re.MULTILINE)
_LOG_BYTES = 1 << 24


class NcclLog:
    """NCCL's log of this process, in memory. To be made before NCCL is; reads as empty without NCCL.

    Someone who has asked NCCL for its log gets it as before, and is told to look there.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        asked = {name: environ.get(name, "") for name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG")}
        self.theirs = " ".join(f"{name}={value}" for name, value in asked.items() if value)
        self._file = -1
        if not asked["NCCL_DEBUG_FILE"] and asked["NCCL_DEBUG"].upper() not in ("INFO", "TRACE"):
            self.theirs = ""
            self._file = os.memfd_create("nccl-log")
            environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{self._file}"
            # Level and parts that have the lines of connections; those of each call stay off.
            environ["NCCL_DEBUG"] = "INFO"
            environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"

    def read(self) -> str:
        """What NCCL has logged so far."""
        if self._file < 0:
            return ""
        return os.pread(self._file, _LOG_BYTES, 0).decode("utf-8", "replace")


def nccl_words(log: str) -> dict[str, Any]:
    """What a rank's log says: `version`, `networks`, and `channels`: how many of each kind it opened."""
    kinds = [
        "/".join(part for part in found.split("/") if not part.isdigit()) for found in _CHANNEL.findall(log)
    ]
    version = _VERSION.search(log)
    return {
        "version": version[1] if version else "",
        "networks": sorted(
            {*_NETWORK.findall(log), *(f"provider {name}" for name in _PROVIDER.findall(log))}
        ),
        "channels": dict(Counter(kinds)),
    }


def gloo_words(environ: Mapping[str, str]) -> dict[str, Any]:
    """The interface that gloo was told to listen on, and its address; else what the host's name leads to."""
    interface = environ.get("GLOO_SOCKET_IFNAME", "")
    device = environ.get("GLOO_DEVICE_TRANSPORT", "TCP")
    if interface:
        return {"device": device, "interface": interface, "address": interface_address(interface) or ""}
    address = ""
    with suppress(OSError, UnicodeError):
        address = socket.gethostbyname(socket.gethostname())
    return {"device": device, "interface": "", "address": address}


def words_of_rank(backend: str, log: NcclLog, environ: Mapping[str, str]) -> dict[str, Any]:
    """What this rank knows of its transport."""
    if backend == "nccl":
        return nccl_words(log.read())
    return gloo_words(environ) if backend == "gloo" else {}


def summary(backend: str, words: Sequence[dict[str, Any]], theirs: str = "") -> dict[str, Any]:
    """What all ranks know together, flat: with `line`, one for people."""
    if backend == "nccl":
        return _of_nccl(words, theirs)
    if backend == "gloo":
        return _of_gloo(words)
    return {"line": f"{backend} does not tell torch what carries its bytes"}


def _of_nccl(words: Sequence[dict[str, Any]], theirs: str) -> dict[str, Any]:
    if theirs:
        return {"line": f"NCCL logs as you asked it to ({theirs}): look there for the lines with ` via `"}
    channels: Counter[str] = Counter()
    for one in words:
        channels.update(one["channels"])
    versions = sorted({one["version"] for one in words} - {""})
    networks = sorted({network for one in words for network in one["networks"]})
    opened = ", ".join(f"{number} via {kind}" for kind, number in channels.most_common()) or "none was logged"
    return {
        "line": f"NCCL {' and '.join(versions) or 'of unknown version'} by its log: "
        f"network {', '.join(networks) or 'not named'}; channels of all ranks: {opened}",
        "versions": versions,
        "networks": networks,
        "channels": dict(channels),
    }


def _of_gloo(words: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ends = Counter((one["interface"], one["address"]) for one in words)
    places = [
        f"{address or 'an address it did not find'}"
        + (f" of {interface} (GLOO_SOCKET_IFNAME)" if interface else " (of the host's name)")
        + f" on {number} rank{'s' * (number > 1)}"
        for (interface, address), number in ends.items()
    ]
    devices = sorted({one["device"] for one in words})
    return {
        "line": f"gloo over {' and '.join(devices)}, told to listen on {'; '.join(places[:4])}"
        f"{'; ...' * (len(places) > 4)}; it does not tell which connections it made",
        "devices": devices,
        "interfaces": sorted({one["interface"] for one in words}),
        "addresses": sorted({one["address"] for one in words}),
    }
