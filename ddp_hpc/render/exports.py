"""Environment variables that a job script sets for its ranks, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.render.launch_lines import uses_exec
from ddp_hpc.render.shell_quoting import Raw, Word, sh
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.base import Scheduler, cpus_per_task
from ddp_hpc.sites.site import Site


@dataclass(frozen=True, eq=False)
class Export:
    """One exported variable; `why` becomes the comment above it."""

    name: str
    value: Word
    why: str = ""


def all_exports(job: Job, site: Site, layout: Layout, scheduler: Scheduler) -> list[Export]:
    """Return the variables of every rank, in the order in which the script exports them."""
    found = _explained(site, site.env.always)
    threads = layout.threads_per_rank
    # If the number of cores is unknown, use one thread per rank under a scheduler, since PBS would set the
    # number of the whole chunk. Without a scheduler, leave the choice to the machine.
    if threads or scheduler.has_queue:
        found.append(Export("OMP_NUM_THREADS", str(threads or 1), scheduler.why_omp_num_threads))
    if layout.launcher == "torchrun":
        found.append(Export("DDP_HPC_RANKS_PER_NODE", str(layout.ranks_per_node)))
    if job.min_nodes:
        found.append(Export("DDP_HPC_MIN_NODES", str(job.min_nodes)))
    if layout.launcher == "mpiexec":
        variables = scheduler.mpiexec_variables(cpus_per_task(layout), layout.ranks_per_node)
        found += [Export(one.name, one.value, one.why) for one in variables]
    if site.proxy:
        why = (
            "The proxy for connections from compute nodes to the outside; nodes connect to each other "
            "without it."
        )
        found.append(Export("http_proxy", site.proxy.url, why))
        found.append(Export("https_proxy", site.proxy.url))
        if site.proxy.all:
            found.append(Export("all_proxy", site.proxy.all))
        if site.proxy.no_proxy:
            found.append(Export("no_proxy", site.proxy.no_proxy))
    found.append(Export("DDP_HPC_PROFILE", site.name))
    if site.fabric.suffix:
        found.append(Export("DDP_HPC_FABRIC_SUFFIX", site.fabric.suffix))
    if site.fabric.interface:
        found.append(Export("DDP_HPC_FABRIC_INTERFACE", site.fabric.interface))
    if scheduler.has_queue:
        named = {export.name for export in found}
        found += [export for export in _cache_exports(site) if export.name not in named]
    if site.lustre.hint:
        why = "Striping of new data files on Lustre: the count, and the size if the profile defines one."
        found.append(Export("DDP_HPC_LUSTRE_STRIPE", site.lustre.hint, why))
    if delay_s := site.kill_delay_s or scheduler.kill_delay_s:
        found.append(Export("DDP_HPC_KILL_DELAY_S", str(delay_s)))
    if uses_exec(job, layout):
        why = "A unique id of this launch, with which its ranks find each other."
        found.append(Export("DDP_HPC_LAUNCH", Raw('"$HOSTNAME-$$-$RANDOM$RANDOM"'), why))
    run_dir = job.run_dir or f"runs/{job.name}"
    absolute: Word = run_dir if run_dir.startswith("/") else Raw(f'"$PWD"/{sh(run_dir)}')
    found.append(Export("DDP_HPC_RUN_DIR", absolute))
    if scheduler.has_queue:
        found.append(Export("DDP_HPC_MAX_ATTEMPTS", str(job.max_attempts)))
    return found


def _cache_exports(site: Site) -> list[Export]:
    """Return cache directories for compiled kernels, unless the submitting shell sets them."""
    variable, slash, below = site.node.local_folder.removeprefix("$").partition("/")
    local = f"${{{variable}:-/tmp}}{slash}{below}" if variable else f"/{below}".rstrip("/")
    why = "Compiled kernels stay on the node: Triton's default is the home directory, which all nodes share."
    found = []
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "torchinductor")):
        found.append(Export(name, Raw(f'"${{{name}:-{local}/{folder}-$UID}}"'), why))
        why = ""
    return found


def single_node_exports(site: Site) -> list[Export]:
    """Return the additional variables of jobs on one node."""
    return _explained(site, site.env.single_node)


def multi_node_exports(site: Site) -> list[Export]:
    """Return the additional variables of jobs on several nodes."""
    prepended = {
        name: Raw(f'{sh(":".join(folders))}"${{{name}:+:${name}}}"')
        for name, folders in site.env.multi_node_prepend.items()
    }
    return [*_explained(site, site.env.multi_node), *_explained(site, prepended)]


def _explained(site: Site, values: Mapping[str, Word]) -> list[Export]:
    return [Export(name, value, site.why.get(name, "")) for name, value in values.items()]


def exported_names(exports: list[Export], layout: Layout) -> list[str]:
    """Return the distinct names of all exports, for launchers that need them listed."""
    names = [export.name for export in exports]
    if layout.walltime_s is not None:
        names += ["DDP_HPC_DEADLINE", "DDP_HPC_THIS_ATTEMPT", "DDP_HPC_STATE_FORMAT"]
    given = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    return [name for name in dict.fromkeys(names) if name not in given]
