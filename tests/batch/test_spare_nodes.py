"""Spare nodes in the directives of PBS jobs, and requests that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, load_site

JOB = Job(num_nodes=2, ranks_per_node=4, cpus_per_node=32, spare_nodes=1)


def site_with(dialect: str = "auto", resources: tuple[str, ...] = ()) -> Site:
    site = load_site("generic_pbs")
    pbs = replace(site.pbs, resources=resources)
    return replace(site, pbs=pbs, launch=replace(site.launch, dialect=dialect))


def test_the_resources_of_the_whole_job_include_the_spare_nodes() -> None:
    script = render(replace(JOB, mem="8G"), site_with(resources=("ncpus={all_cpus}", "mem=1gb")))
    assert "#PBS -l ncpus=96\n" in script
    assert "#PBS -l mem=24gb\n" in script


def test_a_job_that_continues_on_fewer_nodes_is_not_ended_when_it_loses_one() -> None:
    few = Job(num_nodes=4, ranks_per_node=4, cpus_per_node=32, min_nodes=3)
    assert "\n#PBS -W tolerate_node_failures=all\n" in render(few, site_with())
    for launcher in ("srun", "torchrun"):
        script = render(replace(few, launcher=launcher), load_site("generic_slurm"))
        assert "\n#SBATCH --nodes=4\n" in script
        assert "\n#SBATCH --no-kill\n" in script
        assert "--kill-on-bad-exit=1" in script
        assert " --min-nodes 3 -- " in script


@pytest.mark.parametrize("option", [{"spare_nodes": 1}, {"min_nodes": 1}])
def test_the_loss_of_a_node_needs_restarts(option: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="does not let the job start its ranks again"):
        Job(num_nodes=2, restarts=0, **option)


def test_a_site_must_allow_that_jobs_lose_nodes() -> None:
    with pytest.raises(RequestError, match=r"set tolerate_node_failures = true in \[pbs\] of a profile"):
        render(JOB, load_site("polaris"))


def test_open_mpi_is_refused() -> None:
    with pytest.raises(RequestError, match="that of Open MPI, which cannot leave nodes of a PBS job out"):
        render(JOB, site_with(dialect="openmpi"))
