"""The variables that a job script sets for its ranks, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.layout import Layout
from ddp_hpc.batch.schedulers import cpus_per_task
from ddp_hpc.batch.shell import Raw, Word, sh
from ddp_hpc.batch.site import Site


@dataclass(frozen=True, eq=False)
class Export:
    """One exported variable; `why` becomes the comment above it."""

    name: str
    value: Word
    why: str = ""


def all_exports(job: Job, site: Site, layout: Layout, kill_delay_s: int) -> list[Export]:
    """What every rank gets, in order: the site's own, threads, proxy, network, caches, the run folder."""
    found = _explained(site, site.env.always)
    threads = layout.threads_per_rank
    # Where the cores are not known: one thread a rank under a scheduler, as PBS would set the whole chunk's
    # number for each rank; the machine's own choice where there is no scheduler.
    if threads or site.scheduler != "local":
        why = "PBS has set this to the cores of the whole node." if site.scheduler == "pbs" else ""
        found.append(Export("OMP_NUM_THREADS", str(threads or 1), why))
    if layout.launcher == "torchrun":
        found.append(Export("DDP_HPC_RANKS_PER_NODE", str(layout.ranks_per_node)))
    if job.min_nodes:
        found.append(Export("DDP_HPC_MIN_NODES", str(job.min_nodes)))
    if layout.launcher == "mpiexec" and site.scheduler == "slurm":
        why = "mpiexec starts a helper a node by srun, which would bind it and its ranks to one task's CPUs."
        found.append(Export("SRUN_CPUS_PER_TASK", str(cpus_per_task(layout) * layout.ranks_per_node), why))
        found.append(Export("SLURM_CPU_BIND", "none"))
        why = "Where pmix is the default of srun, MPICH's ranks would find two process managers and abort."
        found.append(Export("SLURM_MPI_TYPE", "none", why))
    if site.proxy:
        why = "The way out of the compute nodes; the nodes themselves are reached without it."
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
    if site.scheduler != "local":
        named = {export.name for export in found}
        found += [export for export in _cache_exports(site) if export.name not in named]
    if site.lustre.hint:
        why = "How a data file made on Lustre is striped: the count, and the size if the site names one."
        found.append(Export("DDP_HPC_LUSTRE_STRIPE", site.lustre.hint, why))
    if delay_s := site.kill_delay_s or kill_delay_s:
        found.append(Export("DDP_HPC_KILL_DELAY_S", str(delay_s)))
    run_dir = job.run_dir or f"runs/{job.name}"
    absolute: Word = run_dir if run_dir.startswith("/") else Raw(f'"$PWD"/{sh(run_dir)}')
    found.append(Export("DDP_HPC_RUN_DIR", absolute))
    if site.scheduler != "local":
        found.append(Export("DDP_HPC_MAX_ATTEMPTS", str(job.max_attempts)))
    return found


def _cache_exports(site: Site) -> list[Export]:
    """Where kernels that are compiled during the run are kept, unless the submitting shell has said it."""
    variable, slash, below = site.node.local_folder.removeprefix("$").partition("/")
    local = f"${{{variable}:-/tmp}}{slash}{below}" if variable else f"/{below}".rstrip("/")
    why = "Compiled kernels stay on the node: Triton's default is the home folder, which all nodes share."
    found = []
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "torchinductor")):
        found.append(Export(name, Raw(f'"${{{name}:-{local}/{folder}-$UID}}"'), why))
        why = ""
    return found


def single_node_exports(site: Site) -> list[Export]:
    """What a job on one node gets besides."""
    return _explained(site, site.env.single_node)


def multi_node_exports(site: Site) -> list[Export]:
    """What a job beyond one node gets besides."""
    prepended = {
        name: Raw(f'{sh(":".join(folders))}"${{{name}:+:${name}}}"')
        for name, folders in site.env.multi_node_prepend.items()
    }
    return [*_explained(site, site.env.multi_node), *_explained(site, prepended)]


def _explained(site: Site, values: Mapping[str, Word]) -> list[Export]:
    return [Export(name, value, site.why.get(name, "")) for name, value in values.items()]


def exported_names(exports: list[Export], layout: Layout) -> list[str]:
    """Names of all that is exported, once each, for a launcher that has to be told."""
    names = [export.name for export in exports]
    if layout.walltime_s is not None:
        names.append("DDP_HPC_DEADLINE")
    given = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    return [name for name in dict.fromkeys(names) if name not in given]
