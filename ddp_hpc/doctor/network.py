"""Interfaces, the host's own name, and what launches and schedules jobs here."""

from __future__ import annotations

import shutil
import socket

from ddp_hpc.doctor.result import Finding, Here, fail, first_line, ok, warn
from ddp_hpc.errors import LaunchError
from ddp_hpc.world.interfaces import all_interfaces, interface_address, is_loopback, outward_interfaces
from ddp_hpc.world.launch_env import batch_shell_tasks
from ddp_hpc.world.topology import discover

_SLURM = ("sbatch", "srun", "squeue", "scancel", "scontrol")
_PBS = ("qsub", "qstat", "qdel")


def fabric(here: Here) -> Finding:
    """Interfaces that lead to other nodes, and whether those that the environment names are here."""
    own = sorted(all_interfaces())
    for variable in ("DDP_HPC_FABRIC_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = here.environ.get(variable, "")
        if text and not _names_one(variable, text, own):
            return fail(
                f"{variable}={text[:80]}, but the interfaces here are {', '.join(own)}",
                f"name one of them, or unset {variable}",
            )
    outward = outward_interfaces()
    what = ", ".join(f"{name} {address}" for name, address in outward.items())
    if outward:
        return ok(what, ", ".join(outward))
    if here.num_nodes > 1:
        return fail(f"only {', '.join(own)}: no interface leads to another node", "ask the site")
    return warn(f"only {', '.join(own)}: no interface leads to another node", "jobs of one node work")


def _names_one(variable: str, text: str, own: list[str]) -> bool:
    """Whether a setting names an interface of this host. NCCL: prefixes, `=` exactly, `^` all but."""
    names = [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]
    if text.startswith("^"):
        return True
    if variable == "NCCL_SOCKET_IFNAME" and not text.startswith("="):
        return any(interface.startswith(tuple(names)) for interface in own)
    return any(interface_address(name) for name in names)


def own_name(_here: Here) -> Finding:
    """What this host's name resolves to: Debian's 127.0.1.1 sends other nodes to themselves."""
    return name_finding(socket.gethostname())


def name_finding(name: str) -> Finding:
    """The same of any name. No failure: ddp-hpc goes by interfaces, other programs go by the name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return warn(
            f"{name} does not resolve ({first_line(error)})",
            "add the host to /etc/hosts or DNS; until then export GLOO_SOCKET_IFNAME=INTERFACE",
            "does not resolve",
        )
    addresses = ", ".join(dict.fromkeys(str(info[4][0]) for info in found))
    if is_loopback(name):
        return warn(
            f"{name} is {addresses}, loopback: as master address it sends every node to itself",
            "use the address of an interface (ddp-hpc does), and export GLOO_SOCKET_IFNAME=INTERFACE "
            "for other programs",
            "loopback",
        )
    return ok(f"{name} is {addresses}", "resolves")


def launch(here: Here) -> Finding:
    """Whether this process can tell which rank it is, by the launcher's variables alone."""
    try:
        world = discover(here.environ, load_mpi=lambda _family, _title: None)
    except LaunchError as error:
        if batch_shell_tasks(here.environ):
            return warn(f"{error}", "this checks one node alone", "batch shell")
        return fail(f"{error}", "see ddp-hpc env", "launch error")
    if world.world_size == 1:
        return ok(f"one process ({world.sources['rank']})")
    place = f"rank {world.rank} of {world.world_size}, started by {world.launcher}"
    return ok(place, f"{world.launcher} {world.world_size}")


def scheduler(here: Here) -> Finding:
    """The commands of Slurm or PBS on the PATH."""
    path = here.environ.get("PATH", "")
    complete: list[str] = []
    for title, commands in (("Slurm", _SLURM), ("PBS", _PBS)):
        there = [command for command in commands if shutil.which(command, path=path)]
        # Slurm brings wrappers with the names of PBS commands, and PBS none with Slurm's.
        if there and len(there) == len(commands):
            complete.append(f"{title} ({', '.join(there)})")
        elif there and not complete:
            lacking = [command for command in commands if command not in there]
            return warn(
                f"{title} has {', '.join(there)} here, but no {', '.join(lacking)}",
                f"load the scheduler's module, or put its folder on the PATH to use all of {title}",
            )
    if complete:
        return ok(" and ".join(complete))
    if here.in_job:
        return ok("no scheduler's commands on this node; job scripts that submit again need them")
    return warn("neither sbatch nor qsub is on the PATH", "scripts can be written here, not submitted")
