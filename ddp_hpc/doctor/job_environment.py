"""Checks of the launcher's variables and of the scheduler's commands."""

from __future__ import annotations

import shutil

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.discovery.launcher_environment import batch_shell_tasks
from ddp_hpc.discovery.world import discover
from ddp_hpc.doctor.check_result import DoctorFinding, Here, fail, ok, warn
from ddp_hpc.schedulers.registry import MONITORED


def launch(here: Here) -> DoctorFinding:
    """Checks whether the launcher's variables identify the rank of this process."""
    try:
        world = discover(here.environ, load_mpi=lambda _family, _title: None)
    except LaunchError as error:
        if batch_shell_tasks(here.environ):
            return warn(f"{error}", "only this node is checked", "batch shell")
        return fail(f"{error}", "run ddp-hpc env to see the variables", "launch error")
    if world.world_size == 1:
        return ok(f"one process ({world.sources['rank']})")
    place = f"rank {world.rank} of {world.world_size}, started by {world.launcher}"
    return ok(place, f"{world.launcher} {world.world_size}")


def scheduler(here: Here) -> DoctorFinding:
    """Checks the commands of Slurm or PBS on the PATH."""
    path = here.environ.get("PATH", "")
    complete: list[str] = []
    for one in MONITORED.values():
        programs = one.commands.programs
        found = [command for command in programs if shutil.which(command, path=path)]
        missing = [command for command in programs if command not in found]
        if found and not missing:
            complete.append(f"{one.title} ({', '.join(found)})")
        # Slurm installs some commands with the names of PBS commands, so an incomplete PBS is accepted.
        elif found and not complete:
            return warn(
                f"found {', '.join(found)} of {one.title}, but not {', '.join(missing)}",
                f"load the scheduler's module, or add the directory of the {one.title} commands to the PATH",
            )
    if complete:
        return ok(" and ".join(complete))
    if here.in_job:
        return ok("no scheduler commands on this node; only job scripts that resubmit themselves need them")
    submit = " nor ".join(one.submit_program for one in MONITORED.values())
    return warn(f"neither {submit} is on the PATH", "scripts can be rendered here, but not submitted")
