"""The commands of PBS on a login node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_walltime
from ddp_hpc.schedulers.commands import Commands, Overrides
from ddp_hpc.schedulers.device_share import DeviceShare
from ddp_hpc.schedulers.machine_facts import MachineFacts, Question
from ddp_hpc.schedulers.pbs import ask_machine
from ddp_hpc.schedulers.pbs.reader import last_resource
from ddp_hpc.schedulers.pbs.writer import UMASK
from ddp_hpc.schedulers.script_options import ScriptOptions
from ddp_hpc.sites.site import Site


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
        return ask_machine.device_share(queue, gpus_per_node)

    def questions(self) -> tuple[Question, ...]:
        return ask_machine.QUESTIONS

    def read_answers(self, answers: Mapping[str, str], site: Site) -> MachineFacts:
        return ask_machine.read_answers(answers, site, self.scheduler.reader.walltime_s)

    def umask_arguments(self, script: ScriptOptions, umask: int) -> list[str]:
        is_default = any(f"{option.flag} {option.value}" == UMASK for option in script.read())
        own = f"umask={umask:03o}"
        return ["-W", own] if is_default and f"-W {own}" != UMASK else []

    def submit_argv(self, script: str, options: Sequence[str]) -> list[str]:
        return ["qsub", *options, script]

    def overrides(self, given: Overrides, script: ScriptOptions, site: Site | None) -> list[list[str]]:
        if given.qos:
            raise RequestError(f"--qos {given.qos} was given, but PBS has no QOS; omit this option")
        options = []
        if given.num_nodes:
            options.append(["-l", f"select={given.num_nodes}{_one_chunk(script, given.num_nodes)}"])
        if given.walltime_s:
            options.append(["-l", f"walltime={format_walltime(given.walltime_s)}"])
        if given.queue:
            options.append(["-q", given.queue])
        if given.name:
            options.append(["-N", given.name])
        return options


ROLE = PbsCommands


def _one_chunk(script: ScriptOptions, num_nodes: int) -> str:
    """Returns the resources of the script's chunks, such as `:ncpus=4:ngpus=4`.

    Raises:
        RequestError: the script does not request identical chunks.
    """
    select = last_resource(script, "select")
    if select is None or "+" in select[1]:
        raise RequestError(
            f"--nodes {num_nodes} was given, but the script does not request its nodes as a single chunk, "
            "such as -l select=2:ncpus=4; change the directives of the script"
        )
    count, colon, rest = select[1].partition(":")
    return colon + rest if count.isdecimal() else f":{select[1]}"
