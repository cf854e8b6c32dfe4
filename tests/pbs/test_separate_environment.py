"""Jobs that are submitted by a ddp-hpc whose environment is not active."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fakes.site import Site
from tests.pbs.jobs import render
from tests.separate_environment import make_environment

pytestmark = pytest.mark.check

REQUEST = ("--profile", "generic_pbs", "--nodes", "1", "--ranks-per-node", "1", "--walltime", "00:05:00")
# Stops once, so that a successor completes the run.
PROGRAM = """import os, sys
print('python of', sys.prefix)
seen = os.path.exists('seen')
open('seen', 'w').close()
open(os.environ['DDP_HPC_PROGRESS_FILE'], 'w').close()
sys.exit(0 if seen else 75)
"""


def environment(site: Site, folder: Path) -> Path:
    """Returns the ddp-hpc of a new environment; the login shells of jobs find no python."""
    (site.home / ".bash_profile").write_text(f"export PATH={site.pals_bin}:{site.pbs_bin}:/usr/bin:/bin\n")
    (site.work / "program.py").write_text(PROGRAM)
    return make_environment(folder)


def test_a_portable_script_gets_the_environment_from_qsub_and_so_does_its_successor(
    site: Site, tmp_path: Path
) -> None:
    ddp_hpc = environment(site, tmp_path / "env")
    render(site, "generic_pbs", command=["python", "program.py"])
    done = site.run(ddp_hpc, "submit", "job.pbs")
    site.wait(done.stdout.strip(), timeout_s=60.0)
    for job_id in ("12.pbs-srv", "13.pbs-srv"):
        assert f"python of {tmp_path}/env\n" in site.log(site.wait(job_id, timeout_s=60.0))


def test_an_environment_that_the_node_lacks_is_one_line(site: Site, tmp_path: Path) -> None:
    ddp_hpc = environment(site, tmp_path / "env")
    done = site.run(ddp_hpc, "submit", *REQUEST, "--dry-run")
    (site.work / "job.pbs").write_text(done.stdout)
    shutil.rmtree(tmp_path / "env")
    job = site.wait(site.submit("job.pbs"))
    assert job["Exit_status"] == 1
    assert f"error: {tmp_path}/env/bin/python was not found on " in site.log(job)
