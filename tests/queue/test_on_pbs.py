"""submit, status, logs and cancel with the simulated PBS: real processes and real logs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.rehearse.pbs import server
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


def test_all_jobs_of_a_queued_chain_are_cancelled(site: Site) -> None:
    chain_script(site, "10", "20", "on_signal")
    ids = submit(site, site.work / "job.pbs", "--chain", "3")
    assert ids == ["12.pbs-srv", "13.pbs-srv", "14.pbs-srv"]
    wait_until_up(site)
    assert status(site, ids[1])["verdict"] == "waiting"
    done = ddp_hpc(site, "cancel", "12")
    assert (done.returncode, done.stdout.splitlines()) == (0, list(reversed(ids)))
    job = site.wait(ids[0])
    assert job["Exit_status"] == 256 + 15
    assert {site.wait(one)["job_state"] for one in ids} == {"F"}
    ended = status(site, ids[0])
    assert (ended["verdict"], ended["exit"]) == ("cancelled", 1)
    assert ended["state"]["state"] == "requeue", "the trainer had time to save"
    again = ddp_hpc(site, "cancel", "14")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "job 14.pbs-srv has already ended (F)\n")


def test_a_job_killed_at_its_walltime_is_reported_as_such(make_site: MakeSite) -> None:
    site = make_site(kill_delay_s=0.3)
    write_script(site, "sleep 30", "-j oe", "-k doe", "-l walltime=1")
    [job_id] = submit(site, site.work / "job.pbs", "--force")
    site.wait(job_id)
    found = status(site, job_id)
    assert (found["verdict"], found["exit"]) == ("failed", 1)
    dead = found["post_mortem"]
    assert isinstance(dead, dict)
    assert dead["cause"] == "walltime"
    assert "it reached its walltime of 00:00:01; Job run at " in dead["what"]
    assert dead["lines"][-1].startswith("=>> PBS: job killed: walltime ")


def test_a_rank_that_failed_under_pals_is_named(site: Site) -> None:
    said = "x3001c0s1b1n0: rank 3 died from signal 9"  # in the format of the stand-in for PALS
    write_script(site, f"echo before; echo '{said}' >&2; exit 137", "-j oe")
    [job_id] = submit(site, site.work / "job.pbs")
    site.wait(job_id)
    done = ddp_hpc(site, "status", job_id)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-5].startswith("cause     failed: exit code 137 (SIGKILL); Job run at ")
    assert lines[-4:-1] == ["failed    rank 3 on x3001c0s1b1n0", "  | before", f"  | {said}"]


def test_a_job_that_can_never_run_is_reported(site: Site) -> None:
    write_script(site, "true", "-l select=1:system=aurora")
    [job_id] = submit(site, site.work / "job.pbs", "--force")
    done = ddp_hpc(site, "status", job_id)
    assert done.returncode == 0
    assert "reason    Can Never Run: " in done.stdout
    assert "action    the job can never start; cancel it and correct the request" in done.stdout
    assert ddp_hpc(site, "cancel", job_id).stdout == f"{job_id}\n"
    assert status(site, job_id)["verdict"] == "cancelled"


def test_submit_creates_the_log_directory_because_pbs_would_hold_the_job(site: Site) -> None:
    write_script(site, "echo here", "-j oe", "-k doe", "-o logs/ddp/")
    [job_id] = submit(site, site.work / "job.pbs")
    assert site.wait(job_id, states="FH")["job_state"] == "F"
    assert ddp_hpc(site, "logs", job_id).stdout == "here\n"
    held = site.submit("-o", "nowhere/log", "-k", "doe", "job.pbs")
    assert site.wait(held, states="FH")["job_state"] == "H"
    found = status(site, held)
    assert found["verdict"] == "waiting"
    assert "check that the directory of its log exists" in str(found["advice"])


def test_logs_waits_for_a_log_that_pbs_delivers_at_the_end(site: Site) -> None:
    write_script(
        site, "for i in {1..600}; do if [[ -e go ]]; then break; fi; sleep 0.05; done; echo here", "-j oe"
    )
    [job_id] = submit(site, site.work / "job.pbs")
    site.wait(job_id, states="R")
    argv = [sys.executable, "-m", "ddp_hpc", "logs", job_id, "--follow"]
    env = {"PATH": f"{site.pbs_bin}:/usr/bin:/bin", "HOME": str(site.home), **QUIET}
    with subprocess.Popen(
        argv, cwd=site.work, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        assert following.stderr is not None
        assert "PBS writes its log only at the end" in following.stderr.readline()
        (site.work / "go").touch()
        out, _ = following.communicate(timeout=60)
    assert (following.returncode, out) == (0, "here\n")


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


def test_a_job_dropped_for_its_dependency_is_not_reported_as_cancelled(site: Site) -> None:
    write_script(site, "true")
    job_id = site.submit("-W", "depend=afterany:99", "job.pbs")
    done = ddp_hpc(site, "status", job_id)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "job       12.pbs-srv (job.pbs of pbsuser): failed, F"
    assert "cause     dropped: PBS dropped it without a message, and it never ran; " in done.stdout
    cause = "it depended on afterany:99.pbs-srv@pbs-srv, but the server does not know that job"
    assert f"{cause}\n" in done.stdout


def test_a_chain_is_not_continued_if_pbs_no_longer_knows_its_first_job(make_site: MakeSite) -> None:
    site = make_site(history=False)
    chain_script(site, "10", "20", "requeue")
    # The first job is over, and forgotten, before the second is queued.
    wait = f'until [[ $(cat {site.root}/jobs/12.json) == *\'"job_state": "F"\'* ]]; do sleep 0.05; done'
    program(
        site.root / "bin" / "qsub",
        f'#!/bin/bash\nif [[ $* == *depend* ]]; then {wait}; fi\nexec {site.pbs_bin}/qsub "$@"\n',
    )
    path = f"{site.root}/bin:{site.pbs_bin}:/usr/bin:/bin"
    argv = [sys.executable, "-m", "ddp_hpc", "submit", "--profile", "generic_pbs", "--chain", "3", "job.pbs"]
    done = site.run(*argv, env={**QUIET, "PATH": path})
    assert done.returncode == 1
    assert "PBS has dropped job 13.pbs-srv" in done.stderr.splitlines()[-1]
    assert "it depends on job 12.pbs-srv, which the server no longer knows" in done.stderr
    assert site.num_jobs() == 2


def test_following_ends_with_a_cancelled_successor(site: Site) -> None:
    """The successor is held before it starts, and then deleted."""
    script = chain_script(site, "10", "25", "requeue")
    held = f'#!/bin/bash\nexec {site.pbs_bin}/qsub -h "$@"\n'
    job_id = site.submit("-k", "doe", script)
    program(site.root / "bin" / "qsub", held)
    assert site.wait(job_id)["Exit_status"] == 75
    assert "job 13.pbs-srv resumes the run" in ddp_hpc(site, "status", job_id).stdout
    waits = status(site, "13")
    assert (waits["verdict"], waits["advice"]) == ("waiting", "release the job with: qrls 13.pbs-srv")
    site.run("qdel", "13")
    assert status(site, job_id)["next_job"] == ""
    assert "job 13.pbs-srv resumes the run" not in ddp_hpc(site, "status", job_id).stdout


# Task 1 is done, and task 2 fails; the others run until they are cancelled.
TASK = """\
case $PBS_ARRAY_INDEX in
1) echo fine ;;
2) echo "ValueError: odd"; exit 3 ;;
*) echo up; sleep 60 ;;
esac
"""


def submit_array(site: Site, indices: str = "1-6%2", body: str = TASK, *directives: str) -> str:
    write_script(site, body, "-j oe", "-k doe", f"-J {indices}", *directives)
    [array] = submit(site, site.work / "job.pbs")
    assert array == "12[].pbs-srv"
    return array


def wait_until_running(site: Site, *indices: int) -> None:
    for index in indices:
        site.wait(f"12[{index}].pbs-srv", states="R")


def test_an_array_is_shown_by_the_states_of_its_tasks_with_the_failed_ones(site: Site) -> None:
    array = submit_array(site)
    wait_until_running(site, 3, 4)
    for word in (array, "12[]", "12"):
        done = ddp_hpc(site, "status", word)
        assert (done.returncode, done.stderr) == (1, "")
        lines = done.stdout.splitlines()
        assert lines[:2] == [
            "job       12[].pbs-srv (job.pbs of pbsuser): failed",
            "tasks     1 done, 2 waiting, 2 running, 1 failed",
        ]
        assert lines[2].startswith("task      12[2].pbs-srv: failed; failed: exit code 3; Job run at ")
        # A shell would replace [2] by the name of a file.
        assert lines[3:] == ["  | ValueError: odd", "details   ddp-hpc status '12[2].pbs-srv'"]
    assert status(site, array)["counts"] == {"done": 1, "waiting": 2, "running": 2, "failed": 1}


def test_a_task_of_an_array_is_identified_by_its_index(site: Site) -> None:
    submit_array(site)
    wait_until_running(site, 3)
    verdicts = {index: status(site, f"12[{index}]")["verdict"] for index in (1, 2, 3, 6)}
    assert verdicts == {1: "done", 2: "failed", 3: "running", 6: "waiting"}
    assert status(site, "12[3].pbs-srv")["logs"] == [f"{site.work}/job.pbs.o12.3"]
    # A run directory that is not in runs/ is found through the script.
    (site.work / "job.pbs").write_text("#!/bin/bash\nexport DDP_HPC_RUN_DIR=$PWD/elsewhere\n")
    (site.work / "elsewhere" / "task-3").mkdir(parents=True)
    assert status(site, "12[3]")["run_dir"] == f"{site.work}/elsewhere/task-3"
    for word in ("12[9]", "99[]", "99"):
        done = ddp_hpc(site, "status", word)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"error: job {word} was not found by the scheduler or in a run directory"
        )


def test_the_logs_of_all_tasks_of_an_array_are_printed(site: Site) -> None:
    array = submit_array(site)
    site.wait("12[2].pbs-srv")
    wait_until_running(site, 3, 4)
    path = f"{site.work}/job.pbs.o12"
    wait_until_text(site, Path(f"{path}.4"), "up")
    done = ddp_hpc(site, "logs", array)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"==> {path}.1 <==\nfine\n\n==> {path}.2 <==\nValueError: odd\n\n"
        f"==> {path}.3 <==\nup\n\n==> {path}.4 <==\nup\n"
    )
    refused = ddp_hpc(site, "logs", "--follow", array)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("one of its tasks: ddp-hpc logs --follow '12[3].pbs-srv'\n")


def wait_until_text(site: Site, path: Path, text: str) -> None:
    end_s = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end_s, site.logs()
        time.sleep(0.05)


def test_the_live_tasks_of_an_array_are_cancelled_and_the_others_are_still_known(site: Site) -> None:
    array = submit_array(site)
    wait_until_running(site, 3, 4)
    done = ddp_hpc(site, "cancel", "12")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{array}\n", "")
    site.wait(array)
    assert status(site, array)["counts"] == {"done": 1, "cancelled": 4, "failed": 1}
    never = (
        "task      12[6].pbs-srv: cancelled; cancelled: it was cancelled; it has no log, so it never started"
    )
    assert never in ddp_hpc(site, "status", array).stdout
    again = ddp_hpc(site, "cancel", array)
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr == (f"all tasks of job {array} have already ended (1 done, 4 cancelled, 1 failed)\n")


def test_a_task_that_pbs_has_forgotten_did_not_end_like_another_task(make_site: MakeSite) -> None:
    """Without job history, qstat prints the exit code of the task that ended last for all of them."""
    site = make_site(history=False)
    runs = "export DDP_HPC_RUN_DIR=$PWD/runs/a"
    array = submit_array(site, "1-3", f"{runs}\n{TASK.replace('1)', '1) sleep 1;')}")
    wait_until_running(site, 3)
    for index in (2, 1):
        site.wait(f"12[{index}].pbs-srv")
    assert status(site, array)["counts"] == {"unknown": 2, "running": 1}
    one = status(site, "12[2]")
    assert (one["verdict"], one["exit"], one["logs"]) == ("unknown", 1, [f"{site.work}/job.pbs.o12.2"])
    for index, state in ((1, "done 60"), (2, "failed 3 loss is nan")):
        run_dir = site.work / "runs" / "a" / f"task-{index}"
        run_dir.mkdir(parents=True)
        (run_dir / "attempts").write_text(f"1 12[{index}].pbs-srv 0 1000\n")
        (run_dir / "state").write_text(f"{state}\n")
    assert status(site, array)["counts"] == {"done": 1, "running": 1, "failed": 1}
    found = ddp_hpc(site, "status", array, "--run-dir", "runs/a").stdout.splitlines()
    assert found[1:4] == [
        "tasks     1 done, 1 running, 1 failed",
        "task      12[2].pbs-srv: failed; failed: loss is nan",
        "  | ValueError: odd",
    ]


def test_the_jobs_that_resume_tasks_of_an_array_are_named_and_not_cancelled(site: Site) -> None:
    script = chain_script(site, "10", "25", "requeue")
    program(site.root / "bin" / "qsub", f'#!/bin/bash\nexec {site.pbs_bin}/qsub -h "$@"\n')
    array = site.submit("-k", "doe", "-J", "1-2", script)
    site.wait(array)
    done = ddp_hpc(site, "status", array)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[1]) == (75, "tasks     2 requeue")
    numbers = [line.split()[2] for line in lines if line.startswith("next ")]
    assert sorted(numbers) == ["13.pbs-srv", "14.pbs-srv"]
    cancelled = ddp_hpc(site, "cancel", array)
    assert (cancelled.returncode, cancelled.stdout) == (0, "")
    assert cancelled.stderr.splitlines() == [
        f"all tasks of job {array} have already ended (2 requeue)",
        *[f"the run continues in job {one}; to cancel it: ddp-hpc cancel {one}" for one in numbers],
    ]


def test_an_array_that_waits_is_shown_with_the_reason(site: Site) -> None:
    write_script(site, "true", "-J 1-4")
    array = site.submit("-h", "job.pbs")
    done = ddp_hpc(site, "status", "12")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (
        0,
        [
            "tasks     4 waiting",
            "reason    it is held by its user",
            "action    release the job with: qrls '12[].pbs-srv'",
        ],
    )
    one = status(site, "12[2]")
    assert one["advice"] == "release the job with: qrls '12[].pbs-srv'"
    assert ddp_hpc(site, "cancel", array).stdout == f"{array}\n"
    assert status(site, array)["counts"] == {"unknown": 4}


def test_an_array_is_not_shown_while_the_server_is_down(site: Site) -> None:
    array = submit_array(site, "1-2")
    (site.root / server.DOWN).touch()
    done = [ddp_hpc(site, command, array) for command in ("status", "logs", "cancel")]
    (site.root / server.DOWN).unlink()
    assert [(one.returncode, one.stdout) for one in done] == [(1, "")] * 3
    assert all(one.stderr.startswith("error: qstat failed 3 times: Connection refused") for one in done)


def test_a_refusal_of_qsub_is_one_line(site: Site) -> None:
    write_script(site, "true", "-q nosuch")
    done = ddp_hpc(site, "submit", "--profile", "generic_pbs", "job.pbs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "error: qsub rejected the job: Unknown queue. No job was queued."
    )
    assert site.num_jobs() == 0


def test_a_job_unknown_to_pbs_is_one_line(site: Site) -> None:
    done = ddp_hpc(site, "status", "99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: job 99 was not found by the scheduler or in a run directory in ")


@pytest.mark.parametrize("answers", ["", "{", "garbage", '{"Jobs": {"13.pbs-srv": {"job_state": "R"}}}'])
def test_invalid_output_of_qstat_is_one_line(site: Site, answers: str) -> None:
    program(site.pbs_bin / "qstat", f"#!/bin/sh\nprintf '%s' '{answers}'\n")
    start_s = time.monotonic()
    done = ddp_hpc(site, "status", "12")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: unexpected output of qstat for job 12: ")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - start_s < 20
