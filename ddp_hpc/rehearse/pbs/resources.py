"""Reads the requested resources of a job, and assigns its chunks to nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs.directives import Request
from ddp_hpc.rehearse.pbs.server import Settings

_ILLEGAL = "qsub: Illegal attribute or resource value"
_MAX_CHUNKS = 10_000


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a `select` request, and the node that is assigned to it."""

    ncpus: int
    ngpus: int
    mpiprocs: int
    ompthreads: int
    node: str = ""


def walltime_s(text: str) -> int:
    """Returns the seconds of a walltime `[[HH:]MM:]SS`.

    Raises:
        RefusedError: the text has another format.
    """
    if not re.fullmatch(r"(\d+:){0,2}\d+", text):
        raise RefusedError(f"{_ILLEGAL} Resource_List.walltime", 166)
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


def select_of(request: Request) -> str:
    """Returns the requested chunks in the syntax of `select`, also from the older syntax `nodes=N:ppn=P`."""
    if match := re.fullmatch(r"([0-9]+)(?::ppn=([0-9]+))?", request.resources.get("nodes", "")):
        ranks = match[2] or "1"
        return f"{match[1]}:ncpus={ranks}:mpiprocs={ranks}"
    return request.resources.get("select", "1")


def chunks(request: Request, settings: Settings) -> list[Chunk]:
    """Returns the requested chunks, without nodes.

    Raises:
        RefusedError: the server would refuse the request.
    """
    requested = []
    for group in select_of(request).split("+"):
        count, *pairs = group.split(":") if group[:1].isdecimal() else ("1", *group.split(":"))
        given = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        numbers = {name: given.get(name, "") for name in ("ncpus", "ngpus", "mpiprocs", "ompthreads")}
        for name, value in numbers.items():
            if value and not value.isdecimal():
                raise RefusedError(f"{_ILLEGAL} select.{name}", 166)
        if not group or not count.isdecimal() or not int(count):
            raise RefusedError(f"{_ILLEGAL} Resource_List.select", 166)
        ncpus = int(numbers["ncpus"] or settings.default_chunk_ncpus)
        chunk = Chunk(
            ncpus=ncpus,
            ngpus=int(numbers["ngpus"] or settings.default_chunk_ngpus),
            mpiprocs=int(numbers["mpiprocs"] or 1),
            ompthreads=int(numbers["ompthreads"] or ncpus),
        )
        # No machine has more chunks; the limit bounds the memory that a request can use.
        requested += [chunk] * min(int(count), _MAX_CHUNKS)
    return requested


def place(request: Request, settings: Settings) -> list[Chunk]:
    """Returns the first chunks, each on a node of its own, up to the number of simulated nodes.

    Raises:
        RefusedError: the server would refuse the request.
    """
    pairs = zip(settings.nodes, chunks(request, settings), strict=False)
    return [replace(chunk, node=node) for node, chunk in pairs]
