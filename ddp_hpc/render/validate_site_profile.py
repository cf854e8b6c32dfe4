"""Validates profiles: their keys and types, missing sources of facts, and rendering of their scripts."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_choice import largest_num_nodes
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.site import Site, read_site

# These facts change without notice, so a profile must give their source.
AGEING = (
    "account",
    "container",
    "env",
    "fabric",
    "fallbacks",
    "launch",
    "node",
    "pbs",
    "proxy",
    "queues",
    "slurm",
    "software",
)


def faults_of(path: Path) -> list[str]:
    """Returns one line for each error in the profile at `path`; empty if the profile is correct.

    If a file does not match the schema, only the first error is returned.
    """
    try:
        site = read_site(path)
    except RequestError as error:
        return [str(error)]
    # Facts that are inherited from another profile have the sources of that profile.
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    faults = [*_source_faults(site, own), *_queue_faults(site), *_script_faults(site)]
    return [f"{path}: {fault}" for fault in faults]


def _source_faults(site: Site, document: dict[str, object]) -> list[str]:
    keys = [field.name for field in fields(Site)]
    faults = [
        f"a source names {key!r}, which is not a key of profiles{nearest(key, keys)}"
        for source in site.sources
        for key in source.of
        if key.partition(".")[0] not in keys
    ]
    if not _has_queue(site):
        return faults
    known = {key.partition(".")[0] for source in site.sources for key in source.of}
    given = [name for name in AGEING if name in document]
    return faults + [
        f'"{name}" has no source. Add it to `of` in a [[sources]] table.'
        for name in given
        if name not in known
    ]


def _has_queue(site: Site) -> bool:
    return site.scheduler not in SCHEDULERS or SCHEDULERS[site.scheduler].has_queue


def _queue_faults(site: Site) -> list[str]:
    names = [queue.name for queue in site.queues if queue.name and queue.submit]
    faults = [
        f"queue {queue.name} has max_nodes {queue.max_nodes} below min_nodes {queue.min_nodes}"
        for queue in site.queues
        if 0 < queue.max_nodes < queue.min_nodes
    ]
    if site.default_queue and names and site.default_queue not in names:
        hint = nearest(site.default_queue, names)
        faults.append(f"default_queue {site.default_queue!r} is not one of its queues{hint}")
    if site.default_queue and not all(queue.name for queue in site.queues):
        faults.append("an entry of [[queues]] has no name. Add one, or remove default_queue.")
    return faults


def _script_faults(site: Site) -> list[str]:
    jobs = {"one node": Job()}
    if _has_queue(site) and largest_num_nodes(site) != 1:
        jobs["two nodes"] = Job(num_nodes=2)
    if site.container.command:
        jobs["a container"] = Job(container="image.sif")
    faults = []
    for what, job in jobs.items():
        try:
            render(job, site)
        except RequestError as error:
            faults.append(f"cannot render a script for {what}: {error}")
    return faults
