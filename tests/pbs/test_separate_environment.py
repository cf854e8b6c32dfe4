"""Jobs that are submitted by a ddp-hpc whose environment is not active."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fakes.site import Site
from tests.separate_environment import make_environment

pytestmark = pytest.mark.check

REQUEST = ("--profile", "generic_pbs", "--nodes", "1", "--ranks-per-node", "1", "--walltime", "00:05:00")


def environment(site: Site, folder: Path) -> Path:
    """Returns the ddp-hpc of a new environment; the login shells of jobs find no python."""
    (site.home / ".bash_profile").write_text(f"export PATH={site.pals_bin}:{site.pbs_bin}:/usr/bin:/bin\n")
    return make_environment(folder)


def test_an_environment_that_the_node_lacks_is_one_line(site: Site, tmp_path: Path) -> None:
    ddp_hpc = environment(site, tmp_path / "env")
    done = site.run(ddp_hpc, "submit", *REQUEST, "--dry-run")
    (site.work / "job.pbs").write_text(done.stdout)
    shutil.rmtree(tmp_path / "env")
    job = site.wait(site.submit("job.pbs"))
    assert job["Exit_status"] == 1
    assert f"error: {tmp_path}/env/bin/python was not found on " in site.log(job)
