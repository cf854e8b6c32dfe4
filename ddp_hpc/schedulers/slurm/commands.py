"""The commands of Slurm on a login node."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.schedulers.commands import Commands
from ddp_hpc.schedulers.deadline import ask_once
from ddp_hpc.schedulers.device_share import DeviceShare
from ddp_hpc.schedulers.slurm import device_share

_VERSION_LIMIT_S = 5
# `slurm 26.05.3`, or `slurm-wlm 22.05.8` on Debian.
_VERSION = re.compile(r"^slurm\S* (\d\d\.\d\d(?:\.\d+)?)", re.MULTILINE)


class SlurmCommands(Commands):
    """Submits jobs to Slurm and asks about them."""

    interactive_command = "salloc"
    programs = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    start_without_ssh = "use --launcher srun, which needs no ssh"
    job_id_pattern = re.compile("[_@]|^s")

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        return device_share.device_share(queue, gpus_per_node)

    def installed_version(self) -> str:
        match = _VERSION.search(ask_once("sbatch", "--version", limit_s=_VERSION_LIMIT_S))
        return match[1] if match else ""

    def account_arguments(self, account: str, option: str) -> list[str]:
        return [f"--account={account}"]

    def submit_argv(self, script: str, options: Sequence[str]) -> list[str]:
        return ["sbatch", "--parsable", *options, script]

    def exclude_arguments(self, hosts: Sequence[str]) -> list[str]:
        return [f"--exclude={','.join(hosts)}"]

    def array_options(self, index: str) -> list[str]:
        return [f"--array={index}"]


ROLE = SlurmCommands
