"""submit, status, logs and cancel with the simulated PBS: real processes and real logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.fakes.site import Site, program
from tests.pbs.conftest import MakeSite, make_site, site
from tests.pbs.test_chain import chain_script, wait_until_up

__all__ = ["make_site", "site"]

QUIET = {"PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"}


def ddp_hpc(site: Site, *args: str) -> subprocess.CompletedProcess[str]:
    return site.run(sys.executable, "-m", "ddp_hpc", *args, env=QUIET)


def submit(site: Site, script: Path, *options: str) -> list[str]:
    """Submits jobs, and returns their IDs."""
    done = ddp_hpc(site, "submit", "--profile", "generic_pbs", script.name, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def status(site: Site, job_id: str) -> dict[str, object]:
    done = ddp_hpc(site, "status", job_id, "--json")
    found: dict[str, object] = json.loads(done.stdout)
    return {**found, "exit": done.returncode}


def write_script(site: Site, body: str, *directives: str) -> Path:
    lines = "".join(f"#PBS {one}\n" for one in ("-l select=1", "-l walltime=00:10:00", *directives))
    return program(site.work / "job.pbs", f"#!/bin/bash\n{lines}cd $PBS_O_WORKDIR\n{body}\n")


def test_a_run_of_three_jobs_is_followed_to_its_end(site: Site) -> None:
    """Each job submits the next one on its compute node, so the login node's ledger does not contain them."""
    chain_script(site, "10", "25", "requeue")
    [job_id] = submit(site, site.work / "job.pbs")
    done = ddp_hpc(site, "logs", job_id, "--follow")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "resumes" in line] == [
        "-- job 13.pbs-srv resumes the run",
        "-- job 14.pbs-srv resumes the run",
    ]
    assert done.stdout.count("ddp-hpc: job 1") == 3
    first, last = status(site, job_id), status(site, "14")
    assert (first["verdict"], first["exit"], first["next_job"]) == ("requeue", 75, "13.pbs-srv")
    assert (last["verdict"], last["exit"], last["post_mortem"]) == ("done", 0, None)
    assert [one["job_id"] for one in last["attempts"]] == ["12.pbs-srv", "13.pbs-srv", "14.pbs-srv"]  # type: ignore[attr-defined]
    assert ddp_hpc(site, "status", "--long").stdout.startswith(
        "job       14.pbs-srv (ddp of pbsuser): done, F"
    )


@pytest.mark.check
def test_without_a_history_a_running_job_is_shown_and_cancelled(make_site: MakeSite) -> None:
    site = make_site(history=False)
    job_id = site.submit("-k", "doe", chain_script(site, "10", "20", "on_signal"))
    wait_until_up(site)
    assert status(site, job_id)["verdict"] == "running"
    assert "ddp-hpc: job 12.pbs-srv" in ddp_hpc(site, "logs", job_id).stdout
    done = ddp_hpc(site, "cancel", job_id)
    assert (done.returncode, done.stdout) == (0, f"{job_id}\n")
    assert site.wait(job_id)["Exit_status"] == 256 + 15
    assert status(site, job_id)["verdict"] == "requeue"
    again = ddp_hpc(site, "cancel", job_id)
    assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.check
def test_a_job_dropped_for_its_dependency_is_not_reported_as_cancelled(site: Site) -> None:
    write_script(site, "true")
    job_id = site.submit("-W", "depend=afterany:99", "job.pbs")
    done = ddp_hpc(site, "status", job_id)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "job       12.pbs-srv (job.pbs of pbsuser): failed, F"
    assert "cause     dropped: PBS dropped it without a message, and it never ran; " in done.stdout
    cause = "it depended on afterany:99.pbs-srv@pbs-srv, but the server does not know that job"
    assert f"{cause}\n" in done.stdout


@pytest.mark.check
def test_following_ends_with_a_cancelled_successor(make_site: MakeSite) -> None:
    """The successor is held before it starts, and then deleted."""
    site = make_site(max_jobs=1)
    job_id = site.submit("-k", "doe", chain_script(site, "10", "25", "requeue"))
    assert site.wait(job_id)["Exit_status"] == 75
    site.wait("13.pbs-srv", states="H")
    assert "job 13.pbs-srv resumes the run" in ddp_hpc(site, "status", job_id).stdout
    assert status(site, "13")["verdict"] == "waiting"
    site.run("qdel", "13")
    assert status(site, job_id)["next_job"] == ""
    assert "job 13.pbs-srv resumes the run" not in ddp_hpc(site, "status", job_id).stdout
