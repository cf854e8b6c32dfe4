"""The stand-in for PBS behaves and fails as observed with OpenPBS 23.06."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddp_hpc.schedulers.pbs.query_and_cancel import attributes_in
from tests.fakes.site import Site
from tests.pbs.conftest import MakeSite, alcf, make_site, site

__all__ = ["alcf", "make_site", "site"]

WAIT = "until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done"


def write(site: Site, *lines: str, name: str = "a.sh", shebang: str = "#!/bin/bash") -> Path:
    path = site.work / name
    path.write_text("\n".join([shebang, *lines]) + "\n")
    return path


def output_of(site: Site, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    job = site.wait(site.submit(*options, write(site, "#PBS -j oe", *lines)))
    assert job["Exit_status"] == 0, site.logs()
    return site.log(job).splitlines()


def wait_for(site: Site, job_id: str, path: Path, text: str = "") -> None:
    while not (path.exists() and text in path.read_text()):
        assert site.job(job_id)["job_state"] in "QR"


# qsub.


def test_a_dependency_on_a_subjob_is_refused(site: Site) -> None:
    """As in parse_depend.c of OpenPBS."""
    done = site.run("qsub", "-W", "depend=afterany:12[1].pbs-srv", write(site, "true"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot have dependancy on subjob or range" in done.stderr


# The job.


@pytest.mark.parametrize(
    ("select", "threads", "lines"),
    [
        ("2:ncpus=64:mpiprocs=4:ompthreads=16", "16", "aaaabbbb"),
        ("1:ncpus=64:mpiprocs=2+1:ncpus=32:mpiprocs=1", "64", "aab"),
    ],
)
def test_the_node_file_has_one_line_per_mpiproc(alcf: Site, select: str, threads: str, lines: str) -> None:
    said, *nodefile = output_of(
        alcf, "echo $OMP_NUM_THREADS", "cat $PBS_NODEFILE", options=("-l", f"select={select}")
    )
    names = {"a": "x3001c0s1b0n0.hsn.cm.pbs.lab", "b": "x3001c0s1b1n0.hsn.cm.pbs.lab"}
    assert (said, nodefile) == (threads, [names[letter] for letter in lines])


def test_a_job_runs_a_copy_of_its_script_in_the_home_directory_with_umask_0077(site: Site) -> None:
    home, umask, script = output_of(site, "pwd", "umask", "echo $0")
    assert (home, umask) == (str(site.home), "0077")
    assert script == f"{site.root}/mom_priv/jobs/12.pbs-srv.SC"


def test_walltime_and_qdel_have_their_own_exit_status(site: Site) -> None:
    script = write(site, "sleep 60")
    timed, deleted = site.submit("-l", "walltime=1", script), site.submit(script)
    site.wait(deleted, states="R")
    site.run("qdel", deleted)
    job = site.wait(deleted)
    assert (job["Exit_status"], site.wait(timed)["Exit_status"]) == (271, -29)
    assert job["comment"].endswith(" and terminated by pbsuser@pbs-srv")
    error = site.log(site.job(timed), "Error_Path")
    assert re.match(r"=>> PBS: job killed: walltime [2-9] exceeded limit 1\n", error)


def test_processes_that_left_the_session_of_the_job_are_named_and_killed(site: Site) -> None:
    job = site.wait(site.submit(write(site, "setsid sleep 61 &", "exit 0")))
    assert job["left_over"] == ["sleep 61"]


def test_a_job_waits_for_its_dependency_or_is_dropped(site: Site) -> None:
    first = site.submit(write(site, f"{WAIT}; exit 3"))
    script = write(site, "true", name="b.sh")
    assert site.wait(site.submit("-W", f"depend=after:{first}", script))["Exit_status"] == 0
    after = [site.submit("-W", f"depend={kind}:{first}", script) for kind in ("afterany", "afterok")]
    waiting = site.job(after[0])
    assert (waiting["job_state"], waiting["Hold_Types"]) == ("H", "s")
    assert waiting["depend"] == "afterany:12.pbs-srv@pbs-srv"
    unknown = site.submit("-W", "depend=afterany:99", script)
    (site.work / "go").touch()
    assert site.wait(after[0])["Exit_status"] == 0
    assert site.job(first)["Exit_status"] == 3
    for job in (site.wait(after[1]), site.job(unknown)):
        assert (job["job_state"], job["substate"]) == ("F", 92)
        assert not {"stime", "Exit_status", "comment"} & set(job)


def test_a_requeued_job_has_the_same_id_and_environment_and_appends_to_its_log(site: Site) -> None:
    script = write(site, "echo run; env >>$PBS_O_WORKDIR/env", WAIT)
    job_id = site.submit(script)
    env = site.work / "env"
    for num_runs in (1, 2):
        while not (env.exists() and env.read_text().count("PBS_JOBID=") == num_runs):
            assert site.job(job_id)["job_state"] in "QR"
        if num_runs == 1:
            site.requeue(job_id, grace_s=0.0)
    (site.work / "go").touch()
    job = site.wait(job_id)
    assert (job["run_count"], site.log(job)) == (2, "run\nrun\n")
    lines = env.read_text().splitlines()
    once = {line.partition("=")[0] for line in lines if lines.count(line) == 1}
    assert once == {"PBS_JOBCOOKIE"}


def test_a_signal_ends_a_job_although_its_script_traps_it(site: Site) -> None:
    """The signal also reaches the login shell of the script."""
    script = write(site, "trap : USR1", "touch $PBS_O_WORKDIR/up", "while :; do sleep 0.05; done")
    job_id = site.submit(script)
    wait_for(site, job_id, site.work / "up")
    site.signal(job_id, signal.SIGUSR1)
    assert site.wait(job_id)["Exit_status"] == 256 + 10


def test_jobs_are_killed_when_the_process_that_owns_the_machine_ends(make_site: MakeSite) -> None:
    with subprocess.Popen(["sleep", "60"]) as keeper:
        site = make_site(keeper_pid=keeper.pid)
        job_id = site.submit(write(site, "sleep 60"))
        keeper.kill()
    assert site.wait(job_id)["Exit_status"] == 265


# The other commands.


def test_qstat_shows_a_finished_job_only_with_x(site: Site) -> None:
    job_id = site.submit("-l", "walltime=10", write(site, "true"))
    site.wait(job_id)
    done = site.run("qstat", "-f", job_id)
    assert (done.returncode, done.stdout) == (35, "")
    assert "Job has finished, use -x or -H" in done.stderr
    shown = attributes_in(site.run("qstat", "-xf", job_id).stdout)
    assert (shown["Exit_status"], shown["Resource_List.walltime"]) == ("0", "00:00:10")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("F", 0, 2)),
        (("-r", "n"), ("F", -14, 1)),
        (("-W", "tolerate_node_failures=job_start"), ("F", 0, 2)),
        (("-W", "tolerate_node_failures=all"), ("R", None, 1)),
    ],
)
def test_a_job_that_loses_a_sister_is_killed_and_requeued_unless_it_tolerates_this(
    options: tuple[str, ...], expected: tuple[str, int | None, int], make_site: MakeSite
) -> None:
    """As mom_comm.c, mom_main.c and req_jobobit.c of OpenPBS."""
    site = make_site(max_poll_downtime_s=0.2)
    script = write(site, "#PBS -l select=2", 'echo run >>"$PBS_O_WORKDIR/runs"', WAIT)
    job_id = site.submit(*options, script)
    wait_for(site, job_id, site.work / "runs", "run")
    down = site.lose(site.job(job_id)["_chunks"][1]["node"])
    time.sleep(0.5)
    if "all" not in " ".join(options):
        site.wait(job_id, states="FQ")
        (site.work / "go").touch()
        down.unlink()
        site.wait(job_id)
    job = site.job(job_id)
    assert (job["job_state"], job.get("Exit_status"), job["run_count"]) == expected
