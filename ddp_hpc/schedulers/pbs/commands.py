"""The commands of PBS on a login node."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.schedulers.commands import Commands
from ddp_hpc.schedulers.device_share import DeviceShare
from ddp_hpc.schedulers.pbs import device_share
from ddp_hpc.schedulers.pbs.writer import UMASK
from ddp_hpc.schedulers.script_options import ScriptOptions


class PbsCommands(Commands):
    """Submits jobs to PBS and asks about them."""

    interactive_command = "qsub -I"
    programs = ("qsub", "qstat", "qdel")
    # The mpiexec of MPICH 5.0.2 quotes the command for a shell, which pbs_tmrsh alone does not start.
    start_without_ssh = (
        "use the MPI of the site, or let mpiexec start ranks with pbs_tmrsh: write an executable script "
        """with the line `host=$1; shift; exec pbs_tmrsh "$host" /bin/sh -c "$*"`, and add the options """
        "--env HYDRA_LAUNCHER=rsh --env HYDRA_LAUNCHER_EXEC=/PATH/OF/THE/SCRIPT"
    )
    job_id_pattern = re.compile(r"[.[]")

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        return device_share.device_share(queue, gpus_per_node)

    def umask_arguments(self, script: ScriptOptions, umask: int) -> list[str]:
        is_default = any(f"{option.flag} {option.value}" == UMASK for option in script.read())
        own = f"umask={umask:03o}"
        return ["-W", own] if is_default and f"-W {own}" != UMASK else []

    def submit_argv(self, script: str, options: Sequence[str]) -> list[str]:
        return ["qsub", *options, script]


ROLE = PbsCommands
