"""The facts of a profile that change without notice, each with the command that shows it on the machine."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.queue_choice import limits_of
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.site import Site

_SIZES = ("cores", "threads", "devices", "cores_per_device", "memory_mib_per_device")


def facts_to_confirm(site: Site) -> Iterator[tuple[str, str, str]]:
    """Yields the key of each fact, its value in the profile, and the command that shows it on a login node.

    Raises:
        RequestError: the profile has no scheduler.
    """
    scheduler = scheduler_of_site(site)
    shows = scheduler.commands.shows
    if not shows:
        raise RequestError(
            f"the scheduler of profile {site.name} is {site.scheduler}, which has no commands that show the "
            "facts of a profile. Choose a profile with slurm or pbs."
        )
    yield f"{site.scheduler}.version", scheduler.reader.version_of(site) or "-", shows["version"]
    for entry in site.queues:
        is_qos = entry.qos or site.slurm.queue_option == "qos"
        key = ".".join(filter(None, ("queues", entry.name, entry.qos)))
        yield key, limits_of(entry), shows["qos" if is_qos else "queue"].format(name=entry.qos or entry.name)
    for name in _SIZES:
        if value := getattr(site.node, name):
            yield f"node.{name}", str(value), shows["node"]
    for line in site.software:
        yield "software", "-", line
    yield "launch.default", site.launch.default, f"{site.launch.default} --version"
    if site.fabric.interface:
        yield "fabric.interface", site.fabric.interface, "ip -brief link, on a compute node"
