"""Options of a job, such as --dependency and --reservation, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Cluster
from .nodes import wait_for
from .test_arrays import submit_with, write

pytestmark = [pytest.mark.slurm, pytest.mark.check]


def submit(cluster: Cluster, folder: Path, *options: str) -> str:
    """Submits a job with these options of `render`, and returns its ID."""
    folder.mkdir(exist_ok=True)
    return submit_with(cluster, write(cluster, folder, *options), "once")


def test_a_job_has_the_memory_the_nodes_and_the_features_that_it_requested(
    cluster: Cluster, tmp_path: Path
) -> None:
    job_id = submit(cluster, tmp_path, "--mem", "3G", "--exclusive", "--constraint", "gpu&gpu")
    assert cluster.wait(job_id).state == "COMPLETED"
    job = cluster.job(job_id)
    assert (job["MinMemoryNode"], job["OverSubscribe"], job["Features"]) == ("3G", "NO", "gpu&gpu")
    assert int(job["NumCPUs"]) == cluster.settings.cpus_per_node


def test_a_job_waits_for_the_jobs_of_its_dependency_and_sends_a_mail_at_its_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = cluster.sbatch("#!/bin/sh\nsleep 3\n")
    second = submit(
        cluster, tmp_path, "--dependency", f"afterok:{first}", "--mail-type", "end", "--mail-user", "me@x.org"
    )
    assert cluster.job(second)["Dependency"] == f"afterok:{first}(unfulfilled)"
    assert cluster.wait(second).state == "COMPLETED"
    start, end = cluster.job(second)["StartTime"], cluster.job(first)["EndTime"]
    assert start >= end
    wait_for("the mail", cluster.layout.mails.exists)
    mail = cluster.layout.mails.read_text()
    assert f"Job_id={second} Name=ddp Ended" in mail
    assert mail.rstrip().endswith(" me@x.org")


def test_commands_after_the_job_run_when_it_was_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    script = write(cluster, tmp_path, "--after", 'echo "after $code" >after')
    (tmp_path / "program.sh").write_text("trap 'exit 9' TERM; touch started; while :; do sleep 0.1; done\n")
    job_id = submit_with(cluster, script)
    wait_for("the program", (tmp_path / "started").exists)
    cluster.run(["scancel", "--batch", "--signal=TERM", job_id])
    assert cluster.wait(job_id).exit_code == 9
    assert (tmp_path / "after").read_text() == "after 9\n"


def test_other_options_reach_sbatch_and_srun(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, "--directive", "--comment=survey", "--launcher-arg", "--label")
    assert cluster.wait(job_id).state == "COMPLETED"
    assert cluster.job(job_id)["Comment"].strip() == "survey"
    assert "0: arguments: once in runs/ddp after 0" in cluster.job_output(job_id)
