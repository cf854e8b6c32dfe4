"""What is wrong in a profile: keys and types by line, facts without a source, scripts it cannot give."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.render import render
from ddp_hpc.batch.site import Site, read_site
from ddp_hpc.errors import RequestError, nearest

# What changes without notice, so that a reader has to know where it came from and when.
AGEING = (
    "account",
    "age",
    "env",
    "fabric",
    "fallbacks",
    "flux",
    "launch",
    "lustre",
    "node",
    "pbs",
    "proxy",
    "queues",
    "slurm",
    "software",
)


def faults_of(path: Path) -> list[str]:
    """One line for each fault of the profile at `path`; none where it is right.

    A file that does not even fit the schema has one: the first that was met.
    """
    try:
        site = read_site(path)
    except RequestError as error:
        return [str(error)]
    # What it takes over from another profile has that one's sources.
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    found = [*_source_faults(site, own), *_queue_faults(site), *_script_faults(site)]
    return [f"{path}: {fault}" for fault in found]


def _source_faults(site: Site, document: dict[str, object]) -> list[str]:
    keys = [field.name for field in fields(Site)]
    faults = [
        f"a source is said to be of {key!r}, which is no key{nearest(key, keys)}; name one of the profile's"
        for source in site.sources
        for key in source.of
        if key not in keys
    ]
    if site.scheduler == "local":
        return faults
    known = {key for source in site.sources for key in source.of}
    given = [name for name in AGEING if name in document]
    return faults + [
        f'"{name}" has no source; add it to the `of` of a [[sources]] with the date on which you read it'
        for name in given
        if name not in known
    ]


def _queue_faults(site: Site) -> list[str]:
    names = [queue.name for queue in site.queues if queue.submit]
    faults = [
        f"queue {queue.name} has max_nodes {queue.max_nodes} below min_nodes {queue.min_nodes}"
        for queue in site.queues
        if 0 < queue.max_nodes < queue.min_nodes
    ]
    if site.default_queue and names and site.default_queue not in names:
        hint = nearest(site.default_queue, names)
        faults.append(f"default_queue {site.default_queue!r} is none of its queues{hint}")
    return faults


def _script_faults(site: Site) -> list[str]:
    faults = []
    for num_nodes in (1,) if site.scheduler == "local" else (1, 2):
        try:
            render(Job(num_nodes=num_nodes), site)
        except RequestError as error:
            faults.append(f"gives no script for {num_nodes} nodes: {error}")
    return faults
