"""The commands of Slurm on a login node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddp_hpc.schedulers.commands import Commands
from ddp_hpc.schedulers.deadline import ask_once
from ddp_hpc.schedulers.device_share import DeviceShare
from ddp_hpc.schedulers.machine_facts import MachineFacts, Question
from ddp_hpc.schedulers.slurm import ask_machine
from ddp_hpc.sites.site import Site

_VERSION_LIMIT_S = 5


class SlurmCommands(Commands):
    """Submits jobs to Slurm and asks about them."""

    interactive_command = "salloc"
    programs = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    start_without_ssh = "use --launcher srun, which needs no ssh"
    job_id_pattern = re.compile("[_@]|^s")

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        return ask_machine.device_share(queue, gpus_per_node)

    def questions(self) -> tuple[Question, ...]:
        return ask_machine.QUESTIONS

    def read_answers(self, answers: Mapping[str, str], site: Site) -> MachineFacts:
        return ask_machine.read_answers(answers, site)

    def installed_version(self) -> str:
        return ask_machine.version_in(ask_once("sbatch", "--version", limit_s=_VERSION_LIMIT_S))

    def account_arguments(self, account: str, option: str) -> list[str]:
        return [f"--account={account}"]

    def submit_argv(self, script: str, options: Sequence[str]) -> list[str]:
        return ["sbatch", "--parsable", *options, script]

    def exclude_host(self, host: str) -> str:
        return f"sbatch --exclude={host}"

    def array_options(self, index: str) -> list[str]:
        return [f"--array={index}"]


ROLE = SlurmCommands
