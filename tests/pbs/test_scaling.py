"""`ddp-hpc bench scaling` with jobs of the simulated PBS, and real ranks under a simulated PALS."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import PROJECT
from tests.fakes.site import Site
from tests.pbs.conftest import MakeSite

JOBS = [
    "--profile",
    "polaris",
    "--queue",
    "debug",
    "--account",
    "P",
    "--walltime",
    "00:05:00",
    "--ranks",
    "1,2",
]
BENCH = ["--mode", "weak", "--steps", "4", "--warm-up", "2", "--batch-size", "4"]


def ddp_hpc(site: Site, *args: str) -> subprocess.CompletedProcess[str]:
    return site.run(sys.executable, "-m", "ddp_hpc", *args, env={"PYTHONPATH": str(PROJECT)})


def test_points_with_a_forgotten_job_are_not_awaited(make_site: MakeSite) -> None:
    site = make_site(alcf_hook=True, default_chunk_ncpus=64, default_chunk_ngpus=4, history=False)
    site.dotfile(site.pbs_bin)  # without a launcher the job ends at once
    done = ddp_hpc(site, "bench", "scaling", "--submit", *JOBS[:-1], "1", *BENCH, "--", "--model", "linear")
    assert done.returncode == 0, done.stderr
    done = ddp_hpc(site, "bench", "scaling", "--gather", "--wait")
    assert done.returncode == 1
    assert "job 12.pbs-srv is no longer known to the scheduler" in done.stderr


@pytest.mark.soak  # the same flow as on Slurm
def test_points_are_queued_and_collected(alcf: Site) -> None:
    training = ["--", "--model", "linear", "--threads", "1"]
    done = ddp_hpc(alcf, "bench", "scaling", "--submit", *JOBS, *BENCH, *training)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
    for job_id in done.stdout.split():
        alcf.wait(job_id)
    done = ddp_hpc(alcf, "bench", "scaling", "--gather", "--json", "s.json")
    assert done.returncode == 0, done.stderr + alcf.logs()
    one, two = json.loads((alcf.work / "s.json").read_text())["rows"]
    assert [(row["ranks"], row["nodes"], row["global_batch"]) for row in (one, two)] == [(1, 1, 4), (2, 1, 8)]
    assert 0 < two["comm_share"] < 1
