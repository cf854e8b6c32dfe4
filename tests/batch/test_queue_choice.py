"""The queue of 60 requests at 12 sites, as the sites' own documents give it.

The expectations were written from the documents without reading the profiles. If a profile disagrees, the
document decides; its date stands above the rows of each site.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the directives of a script name; empty if they leave the choice to the scheduler."""

    queue: str = ""
    qos: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a number of nodes with all their GPUs, or with `gpus` of each node."""

    site: str
    num_nodes: int
    walltime: str
    gpus: int | None = None
    right: tuple[Named, ...]

    def __str__(self) -> str:
        gpus = "" if self.gpus is None else f"-{self.gpus}_gpus"
        return f"{self.site}-{self.num_nodes}_nodes-{self.walltime}{gpus}"


def row(site: str, num_nodes: int, walltime: str, *right: Named, gpus: int | None = None) -> Request:
    """One line of the table; the queues in `right` are equally good; without one, no queue takes the job."""
    return Request(site=site, num_nodes=num_nodes, walltime=walltime, gpus=gpus, right=right)


def queue(name: str) -> Named:
    return Named(queue=name)


BATCH = (queue("batch"), Named(queue="batch", qos="normal"))
BOOSTER = (queue("boost_usr_prod"), Named(queue="boost_usr_prod", qos="normal"))
GPU72 = (queue(""), queue("gpu72"))
T3 = (Named(qos="qos_gpu_a100-t3"), Named(queue="gpu_p5", qos="qos_gpu_a100-t3"), queue("gpu_p5"), queue(""))

REQUESTS = (
    # ALCF user guides, Running Jobs on Polaris, 2026-02-17
    row("polaris", 2, "1:00:00", queue("debug")),
    row("polaris", 4, "1:00:00", queue("debug-scaling")),
    row("polaris", 2, "2:00:00", queue("capacity")),
    row("polaris", 100, "24:00:00", queue("prod")),
    row("polaris", 24, "4:00:00"),
    # ALCF user guides, Running Jobs on Aurora, 2026-07-27
    row("aurora", 2, "1:00:00", queue("debug")),
    row("aurora", 3, "1:00:00", queue("debug-scaling")),
    row("aurora", 2, "2:00:00", queue("capacity")),
    row("aurora", 2000, "24:00:00", queue("prod")),
    row("aurora", 17, "2:00:00"),
    # NERSC documentation, Queues and Charges, as quoted in 2026-04
    # debug takes 8 nodes, but NERSC prohibits chains of jobs there.
    row("perlmutter", 8, "0:30:00", Named(qos="regular")),
    row("perlmutter", 9, "0:30:00", Named(qos="regular")),
    row("perlmutter", 1, "1:00:00", Named(qos="shared"), gpus=2),
    row("perlmutter", 512, "48:00:00", Named(qos="regular")),
    row("perlmutter", 1, "49:00:00"),
    # OLCF user documentation, Frontier User Guide, 2026-07-07
    # The debug QOS takes it too, but prohibits chains of jobs, and the scripts submit their next job.
    row("frontier", 2, "1:00:00", *BATCH),
    row("frontier", 92, "6:00:00", *BATCH),
    row("frontier", 2, "3:00:00", queue("extended")),
    row("frontier", 2000, "12:00:00", *BATCH),
    row(
        "frontier",
        65,
        "3:00:00",
    ),
    # LUMI user guide, Slurm partitions, 2024-08-08; LUMI AI Factory, chapter 4, 2026-07-16
    row("lumi_g", 2, "0:30:00", queue("dev-g")),
    row("lumi_g", 33, "0:30:00", queue("standard-g")),
    row("lumi_g", 1, "4:00:00", queue("small-g"), gpus=1),
    row("lumi_g", 512, "48:00:00", queue("standard-g")),
    row("lumi_g", 5, "72:00:00"),
    # CINECA documentation, Leonardo, as quoted in 2026-09
    row("leonardo", 2, "0:30:00", Named(queue="boost_usr_prod", qos="boost_qos_dbg")),
    row("leonardo", 9, "0:30:00", *BOOSTER),
    row("leonardo", 2, "48:00:00", Named(queue="boost_usr_prod", qos="boost_qos_lprod")),
    row("leonardo", 128, "24:00:00", Named(queue="boost_usr_prod", qos="boost_qos_bprod")),
    row(
        "leonardo",
        9,
        "48:00:00",
    ),
    # Imperial College RCS user guide, Job Sizing Guidance, 2026-06-03
    row("cx3", 1, "1:00:00", *GPU72, gpus=1),
    row("cx3", 2, "1:00:00", gpus=1),
    row("cx3", 1, "73:00:00", gpus=1),
    row("cx3", 1, "72:00:00", *GPU72, gpus=8),
    row("cx3", 1, "24:00:00", gpus=9),
    # NCAR HPC documentation, Job submission queues and charges, 2025-12-29
    # develop shares its nodes, and some of them have only 2 GPUs.
    row("derecho", 2, "1:00:00", queue("develop"), queue("main")),
    row("derecho", 3, "1:00:00", queue("main")),
    row("derecho", 2, "7:00:00", queue("main")),
    row("derecho", 64, "12:00:00", queue("main")),
    row("derecho", 83, "12:00:00"),
    # IDRIS documentation, GPU partitions, and sacctmgr as quoted in 2026-08
    row(
        "jean_zay_a100",
        2,
        "2:00:00",
        Named(qos="qos_gpu_a100-dev"),
        Named(queue="gpu_p5", qos="qos_gpu_a100-dev"),
    ),
    # The QOS for H100 allows 32 GPUs.
    row("jean_zay_h100", 9, "1:00:00", Named(qos="qos_gpu_h100-t3")),
    row("jean_zay_a100", 1, "3:00:00", *T3),
    row("jean_zay_a100", 8, "20:00:00", *T3),
    row("jean_zay_a100", 1, "21:00:00"),
    # TACC documentation, Lonestar6, table 5, 2026-06-08
    row("lonestar6", 2, "2:00:00", queue("gpu-a100-dev")),
    row("lonestar6", 3, "2:00:00", queue("gpu-a100")),
    # One GPU would also fit into gpu-a100-small, whose number of cores the guide does not give.
    row("lonestar6", 1, "3:00:00", queue("gpu-a100")),
    row("lonestar6", 8, "48:00:00", queue("gpu-a100")),
    row("lonestar6", 9, "48:00:00"),
    # CSCS documentation, Clariden, 2026-06-09
    row("alps_clariden", 1, "1:30:00", queue("debug")),
    row("alps_clariden", 5, "0:10:00", queue("normal")),
    row("alps_clariden", 4, "0:30:00", queue("normal")),
    row("alps_clariden", 64, "12:00:00", queue("normal")),
    row("alps_clariden", 1, "13:00:00"),
    # TACC documentation, Vista, table 4, 2026-06-08
    row("vista", 8, "2:00:00", queue("gh-dev")),
    row("vista", 9, "2:00:00", queue("gh")),
    row("vista", 1, "3:00:00", queue("gh")),
    row("vista", 64, "48:00:00", queue("gh")),
    row("vista", 65, "48:00:00"),
)


@pytest.mark.parametrize("asked", REQUESTS, ids=str)
def test_a_request_gets_the_right_queue_or_the_right_refusal(asked: Request) -> None:
    walltime_s = parse_walltime_s(asked.walltime)
    job = Job(num_nodes=asked.num_nodes, walltime_s=walltime_s, gpus_per_node=asked.gpus)
    site = load_site(asked.site)
    if asked.right:
        assert named(render(job, site)) in asked.right
    else:
        with pytest.raises(RequestError, match=r"no queue of .* took .* takes .*. Use other --nodes"):
            render(job, site)


def named(script: str) -> Named:
    """Returns what the directives of a script name."""
    lines = [line for line in script.splitlines() if line.startswith(("#PBS", "#SBATCH"))]
    matches = filter(None, (re.search(r"(-q|--\w+)[ =](\S+)$", line) for line in lines))
    found = {match[1]: match[2] for match in matches}
    return Named(queue=found.get("-q", found.get("--partition", "")), qos=found.get("--qos", ""))
