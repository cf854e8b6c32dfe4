"""Checks the requested resources, detects requests that can never run, and assigns chunks to nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs.directives import Request
from ddp_hpc.rehearse.pbs.server import QUEUES, Settings

_CHUNK_RESOURCES = frozenset({"ncpus", "mpiprocs", "ompthreads", "ngpus", "mem", "host", "vnode", "system"})
_JOB_RESOURCES = frozenset(
    {"select", "place", "walltime", "filesystems", "mem", "ncpus", "ngpus", "cput", "nodes", "software"}
)
_ILLEGAL = "qsub: Illegal attribute or resource value"
_MAX_CHUNKS = 10_000
_PLACE = re.compile(r"(free|pack|v?scatter)?(:?(excl|shared|exclhost))?(:?group=\w+)?")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a `select` request, and the node that is assigned to it."""

    ncpus: int
    ngpus: int
    mpiprocs: int
    ompthreads: int
    system: str
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
    select = select_of(request)
    if not select:
        raise RefusedError(f"{_ILLEGAL} Resource_List.select", 166)
    found = []
    for group in select.split("+"):
        count, *pairs = group.split(":") if group[:1].isdecimal() else ("1", *group.split(":"))
        given = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        if not settings.any_site:
            _refuse_unknown(given, _CHUNK_RESOURCES)
        numbers = {name: given.get(name, "") for name in ("ncpus", "ngpus", "mpiprocs", "ompthreads")}
        for name, value in numbers.items():
            if value and not value.isdecimal():
                raise RefusedError(f"{_ILLEGAL} select.{name}", 166)
        if not count.isdecimal():
            raise RefusedError(f"{_ILLEGAL} Resource_List.select", 166)
        if not int(count):
            raise RefusedError(_ILLEGAL, 166)
        ncpus = int(numbers["ncpus"] or settings.default_chunk_ncpus)
        chunk = Chunk(
            ncpus=ncpus,
            ngpus=int(numbers["ngpus"] or settings.default_chunk_ngpus),
            mpiprocs=int(numbers["mpiprocs"] or 1),
            ompthreads=int(numbers["ompthreads"] or ncpus),
            system=given.get("system", ""),
        )
        # No machine has more chunks; the limit bounds the memory that a request can use.
        found += [chunk] * min(int(count), _MAX_CHUNKS)
    return found


def check(request: Request, settings: Settings) -> None:
    """Checks a request as the server and its hooks do at submission.

    Raises:
        RefusedError: qsub rejects the request. The error has the message and the exit code of the real qsub.
    """
    if settings.alcf_hook:
        if not request.account:
            raise RefusedError("qsub: Account_Name is required to be set.", 32)
        for name in ("walltime", "filesystems"):
            if name not in request.resources:
                raise RefusedError(f"qsub: Resource: {name} is required to be set.", 32)
    if not settings.any_site:
        _refuse_unknown(request.resources, _JOB_RESOURCES)
    if "nodes" in request.resources and {"select", "place"} & set(request.resources):
        raise RefusedError("qsub: Cannot be used with select or place: nodes", 6)
    if "select" in request.resources:
        for name in ("ncpus", "mem", "ngpus"):
            if name in request.resources:
                text = '"-lresource=" cannot be used with "select" or "place", resource is: '
                raise RefusedError(f"qsub: {text}{name}", 5)
    if not _PLACE.fullmatch(request.resources.get("place", "free")):
        raise RefusedError(f"{_ILLEGAL} Resource_List.place", 166)
    if "place" in request.resources and "select" not in request.resources:
        raise RefusedError('qsub: Cannot have "place" without "select"', 7)
    if settings.any_site:
        walltime_s(request.resources.get("walltime", "0"))
        chunks(request, settings)
        return
    queue = QUEUES.get(request.queue or settings.default_queue)
    if queue is None:
        raise RefusedError("qsub: Unknown queue", 170)
    if queue.from_route_only:
        raise RefusedError("qsub: Access to queue is denied", 174)
    num_nodes, limit_s = len(chunks(request, settings)), walltime_s(request.resources.get("walltime", "0"))
    too_short = limit_s and limit_s < queue.min_walltime_s
    too_long = queue.max_walltime_s and limit_s > queue.max_walltime_s
    if too_short or too_long or (queue.max_nodes and num_nodes > queue.max_nodes):
        raise RefusedError("qsub: Job violates queue and/or server resource limits", 188)


def never_runs_reason(request: Request, settings: Settings) -> str:
    """Returns the comment of the scheduler on a job that can never run, or an empty string."""
    if settings.any_site:
        return ""
    wanted = chunks(request, settings)
    for chunk in wanted:
        if chunk.system and chunk.system != settings.system:
            why = f"system ({chunk.system} != {settings.system})"
            return f"Can Never Run: Insufficient amount of resource: {why}"
        if chunk.ncpus > settings.node_ncpus:
            why = f"ncpus (R: {chunk.ncpus} A: {settings.node_ncpus} T: {settings.node_ncpus})"
            return f"Can Never Run: Insufficient amount of resource: {why}"
    return "" if place(request, settings) else "Can Never Run: Not enough total nodes available"


def place(request: Request, settings: Settings) -> list[Chunk]:
    """Returns the chunks with assigned nodes; empty if there are too few nodes.

    Without scatter, several chunks can be on one node.
    """
    if settings.any_site:
        pairs = zip(settings.nodes, chunks(request, settings), strict=False)
        return [replace(chunk, node=node) for node, chunk in pairs]
    scatter = "scatter" in request.resources.get("place", "free")
    free = dict.fromkeys(settings.nodes, (settings.node_ncpus, settings.node_ngpus))
    found = []
    for chunk in chunks(request, settings):
        wanted = (chunk.ncpus, chunk.ngpus)
        fitting = [name for name, (n, g) in free.items() if n >= wanted[0] and g >= wanted[1]]
        if not fitting:
            return []
        node = fitting[0]
        ncpus, ngpus = free[node]
        free[node] = (ncpus - wanted[0], ngpus - wanted[1])
        if scatter:
            del free[node]
        found.append(replace(chunk, node=node))
    return sorted(found, key=lambda chunk: settings.nodes.index(chunk.node))


def _refuse_unknown(given: dict[str, str], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise RefusedError(f"qsub: Unknown resource Resource_List.{name}", 187)
