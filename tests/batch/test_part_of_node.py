"""Jobs that request a part of a node, and what render says about the choices that it made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.rejection_warnings import advice, choices_made
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, load_site


def with_shared_queue(name: str) -> Site:
    site = load_site(name)
    node = replace(site.node, memory_mib_per_device=60000)
    shared = Queue(name="shared", max_nodes=1, max_walltime="48:00:00", shared=True)
    whole = [replace(entry, shared=False) for entry in site.queues]
    return replace(site, node=node, queues=(*whole, shared))


def test_a_part_of_a_node_gets_its_share_of_cores_and_memory_in_a_shared_queue() -> None:
    script = render(Job(gpus_per_node=2, account="a"), with_shared_queue("lumi_g"))
    for line in ("--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=7", "--mem=120000M"):
        assert f"\n#SBATCH {line}\n" in script
    assert "\n#SBATCH --partition=shared\n" in script


def test_a_part_of_a_node_is_not_bound_to_the_cores_and_gpus_of_a_whole_node() -> None:
    site = with_shared_queue("perlmutter")
    part, whole = (render(Job(gpus_per_node=gpus, account="a_g"), site) for gpus in (2, 4))
    assert "CUDA_VISIBLE_DEVICES" in whole
    assert "CUDA_VISIBLE_DEVICES" not in part
    site = with_shared_queue("lumi_g")
    part, whole = (render(Job(gpus_per_node=gpus, account="a"), site) for gpus in (2, 8))
    for option in ("--cpu-bind", "--exclusive"):
        assert option in whole
        assert option not in part


def test_a_part_of_a_node_is_refused_in_queues_with_whole_nodes() -> None:
    site = with_shared_queue("perlmutter")
    with pytest.raises(RequestError, match="allocates whole nodes with 4"):
        render(Job(gpus_per_node=2, queue="regular", account="a_g"), site)
    with pytest.raises(RequestError, match="allocates whole nodes with 4"):
        render(Job(gpus_per_node=2, account="a_g"), replace(site, queues=site.queues[:-1]))
    with pytest.raises(RequestError, match="shared takes 1 node"):
        render(Job(gpus_per_node=2, num_nodes=2, account="a_g"), site)


def test_render_says_why_a_job_does_not_get_the_default_queue() -> None:
    (line,) = choices_made(Job(num_nodes=4), load_site("polaris"))
    assert line.startswith(
        "queue debug-scaling, because debug does not take 4 nodes for 00:30:00 (1-2 nodes for "
    )
    assert choices_made(Job(num_nodes=2), load_site("polaris")) == []
    assert choices_made(Job(num_nodes=4, queue="debug"), load_site("polaris")) == []


def test_render_says_how_many_gpus_a_job_gets_where_jobs_request_single_gpus() -> None:
    expected = ["1 GPU per node; --gpus-per-node requests another number"]
    assert choices_made(Job(), load_site("cx3")) == expected
    assert choices_made(Job(gpus_per_node=1), load_site("cx3")) == []


def test_cores_and_memory_that_nobody_knows_are_warned_about() -> None:
    site = load_site("generic_slurm")
    (line,) = advice(Job(gpus_per_node=4), site)
    assert (
        "each rank gets one CPU and the default memory of the queue. Use --cpus-per-node and --mem." in line
    )
    assert advice(Job(gpus_per_node=4, cpus_per_node=16), site) == []
