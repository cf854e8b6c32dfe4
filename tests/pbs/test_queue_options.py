"""Options of a job, such as --mem and --dependency, on the stand-in for PBS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fakes.site import Site, program
from tests.pbs.jobs import render

WALLTIME = ["--walltime", "00:05:00"]


def submit(site: Site, *options: str, command: tuple[str, ...] = ("true",)) -> str:
    """Submits a script that `ddp-hpc render` wrote with these options, and returns the job ID."""
    site.dotfile(site.pals_bin, Path(sys.prefix) / "bin")
    return site.submit(render(site, "generic_pbs", *WALLTIME, *options, command=command))


@pytest.mark.check
def test_a_job_waits_for_the_jobs_of_its_dependency(site: Site) -> None:
    waits = "cd $PBS_O_WORKDIR; until [ -e go_on ]; do sleep 0.1; done"
    first = site.submit(program(site.work / "first", f"#!/bin/sh\n{waits}; echo end >first_ended\n"))
    second = submit(site, "--dependency", f"afterok:{first}", command=("cat", "first_ended"))
    assert site.job(second)["job_state"] == "H"
    (site.work / "go_on").touch()
    job = site.wait(second)
    assert job["Exit_status"] == 0
    assert "end\n" in site.log(job)


def test_the_launcher_gets_its_arguments_and_commands_run_after_the_job(site: Site) -> None:
    options = ["--ranks-per-node", "2", "--launcher-arg", "--label", "--after", 'echo "after $code"']
    job = site.wait(submit(site, *options, "--env-style", "none", command=("sh", "-c", "exit 3")))
    log = site.log(job)
    assert "/mpiexec -n 2 --ppn 2 --label " in log
    assert log.rstrip().endswith("after 3")
    assert job["Exit_status"] == 3
