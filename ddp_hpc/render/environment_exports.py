"""Environment variables that a job script sets for its ranks, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.launch_lines import copies_output
from ddp_hpc.render.shell_quoting import Raw, Word, sh
from ddp_hpc.render.variable_meanings import MEANINGS
from ddp_hpc.request.job import MAX_RANKS_OF_ONE_LOG, Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.directive_values import cpus_per_task
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.profile_tables import DEFAULT_LOCAL_FOLDER
from ddp_hpc.sites.site import Site


class Export(NamedTuple):
    """One exported variable; `why` is the comment above it, and `meaning` is the comment at the end of its
    line.
    """

    name: str
    value: Word
    why: str = ""
    meaning: str = ""


def all_exports(job: Job, site: Site, layout: Layout, scheduler: Scheduler) -> list[Export]:
    """Returns the variables of every rank, in the order in which the script exports them.

    Raises:
        RequestError: --rank-logs was given, but nothing copies the output of the ranks.
    """
    exports = _explained(site, site.env.always)
    threads = layout.threads_per_rank
    # If the number of cores is unknown, use one thread per rank under a scheduler, since PBS would otherwise
    # set OMP_NUM_THREADS to the CPUs of the whole chunk. Without a scheduler, the number of threads is not
    # set.
    if threads or scheduler.has_queue:
        exports.append(Export("OMP_NUM_THREADS", str(threads or 1), scheduler.writer.why_omp_num_threads))
    if layout.launcher == "torchrun":
        exports.append(Export("DDP_HPC_RANKS_PER_NODE", str(layout.ranks_per_node)))
    if scheduler.has_queue and _has_rank_logs(job, layout):
        meaning = "each rank writes its output to a file in logs/ of the run directory (--rank-logs)"
        exports.append(Export("DDP_HPC_RANK_LOGS", "1", meaning=meaning))
    if layout.launcher == "mpiexec" and site.launch.own_mpiexec and scheduler.has_queue:
        why = "Use the first mpiexec on the PATH, even if it belongs to the Python environment."
        exports.append(Export("DDP_HPC_MPIEXEC", "mpiexec", why))
    if layout.launcher == "mpiexec":
        variables = scheduler.writer.mpiexec_variables(cpus_per_task(layout), layout.ranks_per_node)
        exports += [Export(*variable) for variable in variables]
    if site.proxy:
        why = (
            "The proxy for connections from compute nodes to the internet; nodes connect to each other "
            "without it."
        )
        exports.append(Export("http_proxy", site.proxy.url, why))
        exports.append(Export("https_proxy", site.proxy.url))
        if site.proxy.no_proxy:
            exports.append(Export("no_proxy", site.proxy.no_proxy))
    exports += _read_by_ddp_hpc(site)
    if site.kill_delay_s not in (0, scheduler.inside_job.kill_delay_s):
        exports.append(Export("DDP_HPC_KILL_DELAY_S", str(site.kill_delay_s)))
    run_dir = job.run_dir or f"runs/{job.name}"
    absolute: Word = run_dir if run_dir.startswith("/") else Raw(f'"$PWD"/{sh(run_dir)}')
    exports.append(
        Export(
            "DDP_HPC_RUN_DIR",
            absolute,
            "The snapshots (checkpoints) of this run. A job with the same directory resumes the run.",
        )
    )
    return exports


def _read_by_ddp_hpc(site: Site) -> list[Export]:
    exports = [
        Export("DDP_HPC_PROFILE", site.name, meaning="the default profile of ddp-hpc's commands in this job")
    ]
    if site.fabric.suffix:
        meaning = "appended to the host name in MASTER_ADDR, for the high-speed network"
        exports.append(Export("DDP_HPC_FABRIC_SUFFIX", site.fabric.suffix, meaning=meaning))
    if site.fabric.interface:
        meaning = "ranks connect through this network interface"
        exports.append(Export("DDP_HPC_FABRIC_INTERFACE", site.fabric.interface, meaning=meaning))
    return exports


def local_directory(site: Site) -> Word:
    """Returns the profile's node-local directory as a word for bash."""
    variable, rest = site.node.local_folder_parts
    return Raw(f'"${{{variable}:-{DEFAULT_LOCAL_FOLDER}}}{rest}"') if variable else rest


def _has_rank_logs(job: Job, layout: Layout) -> bool:
    """Returns whether each rank has a log of its own.

    Raises:
        RequestError: --rank-logs was given, but nothing copies the output of the ranks.
    """
    copies = copies_output(job, layout)
    if job.rank_logs and not copies:
        raise RequestError(
            "--rank-logs was given, but this program is started without ddp-hpc exec, which copies the "
            "output of a rank; omit --rank-logs or --env-style none, or put ddp-hpc exec before the program"
        )
    has_many_ranks = job.num_nodes * layout.ranks_per_node > MAX_RANKS_OF_ONE_LOG
    return copies and (has_many_ranks if job.rank_logs is None else job.rank_logs)


def multi_node_exports(site: Site) -> list[Export]:
    """Returns the additional variables of jobs on several nodes."""
    prepended = {
        name: Raw(f'{sh(":".join(folders))}"${{{name}:+:${name}}}"')
        for name, folders in site.env.multi_node_prepend.items()
    }
    return [*_explained(site, site.env.multi_node), *_explained(site, prepended)]


def _explained(site: Site, values: Mapping[str, Word]) -> list[Export]:
    return [
        Export(name, value, site.why.get(name, ""), MEANINGS.get(name, "")) for name, value in values.items()
    ]
