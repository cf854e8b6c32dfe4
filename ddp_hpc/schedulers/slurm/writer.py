"""Directives of job scripts for Slurm.

Source: sbatch(1) of Slurm 22.05 and 24.05.
"""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import QUEUE_OPTIONS, parse_mail_types, parse_memory
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.raw_options import launcher_words, raw_directive
from ddp_hpc.schedulers.directive_values import (
    Directives,
    cpus_per_task,
    optional_value,
    refuse_unused,
)
from ddp_hpc.schedulers.slurm.running_job import TOTAL_OF_GPUS
from ddp_hpc.schedulers.writer import ScriptWriter
from ddp_hpc.sites.site import Site

# Options of srun that choose nodes.
_NODE_FLAGS = frozenset(("-w", "--nodelist", "-F", "--nodefile", "-x", "--exclude", "-r", "--relative"))


class SlurmWriter(ScriptWriter):
    """Writes directives for Slurm."""

    template = "slurm.sh.j2"
    launchers = ("srun", "mpiexec", "ibrun", "torchrun")
    agent_launcher = "srun"
    passes_arguments = True
    may_lose_nodes = True
    queue_options = frozenset(QUEUE_OPTIONS)

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        if job.node_loss_option:
            self._check_node_loss(job, site, layout)
        if not site.slurm.queue_option:
            refuse_unused(site, [("--queue", job.queue)])
        # With torchrun, one agent per node is the task; otherwise each rank is a task.
        per_node = 1 if layout.launcher == "torchrun" else layout.ranks_per_node
        return {
            **super().directives(job, site, layout),
            "nodes": str(job.total_nodes),
            "tasks_per_node": str(per_node),
            "cpus_per_task": str(cpus_per_task(layout)),
            "gpus": _gpu_option(site, layout),
            "queue_option": site.slurm.queue_option,
            **({} if site.slurm.queue_option else {"queue": ""}),
            "qos": optional_value("QOS", layout.queue.qos),
            # job.constraint has been checked already. It may contain brackets, which optional_value rejects.
            "constraint": job.constraint or optional_value("constraint", site.slurm.constraint),
            "options": [*site.slurm.options, *_memory_option(site, layout)],
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        options = _queue_options(job)
        given = [*options, *(raw_directive(text)[1] for text in job.directive)]
        for name in (name for option in given for name in self.option_names(option)):
            if name in site.slurm.forbidden:
                raise RequestError(f"{name} was given, but {site.title} does not accept it. Remove {name}.")
        return options

    def _check_node_loss(self, job: Job, site: Site, layout: Layout) -> None:
        given = job.node_loss_option
        if layout.launcher not in ("srun", "torchrun"):
            raise RequestError(
                f"{given} was given, but {layout.launcher} cannot leave out nodes of a Slurm job. Use "
                "--launcher srun, or torchrun, whose agents srun starts."
            )
        words = [word.partition("=")[0] for text in job.launcher_arg for word in launcher_words(text)]
        for flag in sorted(_NODE_FLAGS & {*words}):
            raise RequestError(
                f"--launcher-arg {flag} cannot be combined with {given}, which chooses the nodes of the "
                "ranks. Use --directive for nodes that the whole job must have or must not have."
            )
        options = [*site.slurm.options, *(raw_directive(text)[1] for text in job.directive)]
        if any("--gpus" in self.option_names(option) for option in options):
            raise RequestError(f"{given} was given, but {TOTAL_OF_GPUS}")

    def refuse_qos(self, site: Site) -> str:
        if site.slurm.queue_option == "qos":
            return f"at {site.title}, --queue sets the QOS"
        if "--qos" in site.slurm.forbidden:
            return f"{site.title} does not accept it"
        return ""

    def account_placeholder(self, site: Site) -> str:
        return "-A PROJECT"

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[tuple[str, str, str]]:
        why_cpus = (
            "mpiexec starts one process per node with srun, which would bind all ranks to one task's CPUs."
        )
        why_mpi = "If pmix is the default of srun, MPICH would find two process managers and abort."
        return [
            ("SRUN_CPUS_PER_TASK", str(cpus_per_task * ranks_per_node), why_cpus),
            ("SLURM_CPU_BIND", "none", ""),
            ("SLURM_MPI_TYPE", "none", why_mpi),
        ]


ROLE = SlurmWriter


def _memory_option(site: Site, layout: Layout) -> list[str]:
    """Returns the option that requests the share of memory, unless the site's options request the memory."""
    is_fixed = any(option.partition("=")[0] == "--mem" for option in site.slurm.options)
    return [f"--mem={layout.memory_mib}M"] if layout.memory_mib and not is_fixed else []


def _gpu_option(site: Site, layout: Layout) -> str:
    """Returns the option that requests GPUs; empty if jobs get all GPUs of their nodes without it."""
    option = site.slurm.gpu_option
    if not layout.devices or not option:
        return ""
    named = f"{site.slurm.gpu_type}:{layout.devices}" if site.slurm.gpu_type else str(layout.devices)
    return f"--gres=gpu:{named}" if option == "gres" else f"--gpus-per-node={named}"


def _queue_options(job: Job) -> list[str]:
    """Returns the options of sbatch, except the constraint, which the profile can set too."""
    options = []
    if job.mem:
        # 0 requests the whole memory of each node.
        options.append("--mem=0" if job.mem == "0" else "--mem={}{}".format(*parse_memory(job.mem)))
    if job.exclusive:
        options.append("--exclusive")
    if job.reservation:
        options.append(f"--reservation={job.reservation}")
    if job.dependency:
        options.append(f"--dependency={job.dependency}")
    if job.mail_user:
        options.append(f"--mail-user={job.mail_user}")
    if job.mail_type:
        options.append(f"--mail-type={','.join(parse_mail_types(job.mail_type))}")
    if job.array:
        options.append(f"--array={job.array}")
    return options
