"""`ddp-hpc bench scaling` with a job of the simulated PBS."""

from __future__ import annotations

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
    "1",
]
BENCH = ["--mode", "weak", "--steps", "4", "--warm-up", "2", "--batch-size", "4"]


def ddp_hpc(site: Site, *args: str) -> subprocess.CompletedProcess[str]:
    return site.run(sys.executable, "-m", "ddp_hpc", *args, env={"PYTHONPATH": str(PROJECT)})


@pytest.mark.check
def test_points_with_a_forgotten_job_are_not_awaited(make_site: MakeSite) -> None:
    site = make_site(default_chunk_ncpus=64, default_chunk_ngpus=4, history=False)
    site.dotfile(site.pbs_bin)  # without a launcher the job ends at once
    done = ddp_hpc(site, "bench", "scaling", "--submit", *JOBS, *BENCH, "--", "--model", "linear")
    assert done.returncode == 0, done.stderr
    done = ddp_hpc(site, "bench", "scaling", "--gather", "--wait")
    assert done.returncode == 1
    assert "job 12.pbs-srv is no longer known to the scheduler" in done.stderr
