"""How Slurm reads the directives of a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from ddp_hpc.schedulers.reader import ScriptReader
from ddp_hpc.schedulers.script_options import ReadOption, ScriptOptions, last_directive, whole_number
from ddp_hpc.schedulers.slurm.check_option_values import expected_value, is_time, time_s
from ddp_hpc.schedulers.slurm.parse_directives import read_options
from ddp_hpc.schedulers.versions import is_between
from ddp_hpc.sites.site import Site


class SlurmReader(ScriptReader):
    """Reads directives of Slurm."""

    # sbatch does not require a blank after the prefix, and all versions also read #SLURM.
    directive_pattern = re.compile(r"#(?:SBATCH|SLURM)(.*)", re.DOTALL)
    log_flags = ("--output", "--error")
    walltime_flag = "--time"
    walltime_directive = "#SBATCH --time=HH:MM:SS"
    bare_walltime_unit_s = 60
    account_flags = ("--account",)
    name_flags = frozenset(("--mail-user", "--job-name"))
    bare_memory_unit = "megabytes"
    submit_directory = "SLURM_SUBMIT_DIR"
    port_of_job = "$((20000 + SLURM_JOB_ID % 10000))"
    submit_with_variable = "sbatch --export=ALL,NAME=VALUE"
    own_commands = ("srun", "sbcast", "scontrol", "squeue", "sinfo", "sacct", "scancel")
    # The variables of sbatch(1) and srun(1) that scripts read.
    variables = frozenset(
        f"SLURM_{name}"
        for name in re.findall(
            r"\w+",
            "ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN ARRAY_TASK_STEP "
            "CLUSTER_NAME CPUS_ON_NODE CPUS_PER_GPU CPUS_PER_TASK DISTRIBUTION EXPORT_ENV GPUS "
            "GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_TASK GPU_BIND GTIDS HET_SIZE HINT JOBID JOB_ACCOUNT "
            "JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_END_TIME JOB_GPUS JOB_ID JOB_NAME JOB_NODELIST "
            "JOB_NODES JOB_NUM_NODES JOB_PARTITION JOB_QOS JOB_RESERVATION JOB_START_TIME JOB_UID "
            "JOB_USER LAUNCH_NODE_IPADDR LOCALID MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NNODES NODEID "
            "NODELIST NODENAME NODE_ALIASES NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE "
            "NTASKS_PER_SOCKET OVERCOMMIT PRIO_PROCESS PROCID RESTART_COUNT RESV_PORTS STEPID STEP_GPUS "
            "STEP_ID STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR "
            "SUBMIT_HOST TASKS_PER_NODE TASK_PID THREADS_PER_CORE TIMELIMIT TOPOLOGY_ADDR "
            "TOPOLOGY_ADDR_PATTERN TMPDIR SCRATCH ",
        )
    )
    variables_of_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "SLURM_CPUS_PER_TASK": ("--cpus-per-task",),
        "SLURM_NTASKS": ("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"),
        "SLURM_NPROCS": ("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"),
        "SLURM_NTASKS_PER_NODE": ("--ntasks-per-node",),
        "SLURM_GPUS_PER_NODE": ("--gpus-per-node",),
        "SLURM_GPUS_PER_TASK": ("--gpus-per-task",),
        "SLURM_GPUS": ("--gpus",),
    }

    def version_of(self, site: Site) -> str:
        return site.slurm.version

    def repeatable_flags_in(self, version: str) -> frozenset[str]:
        # Since 25.05, the last --mail-type counts; before, all of them did (src/common/slurm_opt.c).
        adds_mail_types = not version or not is_between(version, "25.05", "")
        return frozenset(
            ("--mail-type", "--verbose", "--quiet") if adds_mail_types else ("--verbose", "--quiet")
        )

    def read_directives(self, lines: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
        yield from read_options(lines)

    def rejects(self, option: ReadOption) -> bool:
        return expected_value(option.flag, option.value) != ""

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        for option in read_options([(1, shlex.join(words))]):
            yield option.flag, option.value

    def accepts_walltime(self, text: str) -> bool:
        return is_time(text)

    def walltime_s(self, text: str) -> int | None:
        return time_s(text)

    def num_nodes(self, script: ScriptOptions) -> int | None:
        nodes, tasks = whole_number(script.value("--nodes")), whole_number(script.value("--ntasks"))
        return min(nodes, tasks) if nodes and tasks else nodes  # sbatch requests no node without a task

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        per_node = whole_number(script.value("--ntasks-per-node"))
        tasks = whole_number(script.value("--ntasks"))
        if per_node and tasks:  # then --ntasks-per-node is a maximum (sbatch(1))
            return min(per_node, max(1, tasks // (self.num_nodes(script) or 1)))
        return per_node

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        for value in (script.value("--gpus-per-node"), _gres_gpus(script.value("--gres"))):
            if value is not None:
                return whole_number(value.rpartition(":")[2])
        return None

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        return whole_number(script.value("--cpus-per-task"))

    def memory(self, script: ScriptOptions) -> Iterator[tuple[int, str, str]]:
        for option in script.read():
            if option.flag in ("--mem", "--mem-per-cpu", "--mem-per-gpu") and not option.fault:
                yield option.line, option.flag, option.value

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        return last_directive(script, f"--{site.slurm.queue_option if site else 'partition'}")

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        is_queue = site is not None and site.slurm.queue_option == "qos"
        return "" if is_queue else script.value("--qos") or ""


ROLE = SlurmReader


def _gres_gpus(gres: str | None) -> str | None:
    """Returns the GPUs in the value of --gres, such as `gpu:a100:4`; 1 for `gpu` alone."""
    for part in (gres or "").split(","):
        name = part.removeprefix("gres/").removeprefix("gres:")
        if name == "gpu":
            return "1"
        if name.startswith("gpu:"):
            return name.partition("(")[0]
    return None
