"""Runs that are resumed automatically under PBS, with a program that only writes `state`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.site import PROJECT, Site, program
from tests.pbs.jobs import render
from tests.waiting import PATIENCE

# Arguments "steps_per_attempt last_step how": writes `state` as the trainer does, without training.
TRAINER = """#!/bin/bash
folder=$DDP_HPC_RUN_DIR
read -r _ step _ <"$folder/state" 2>/dev/null || step=0
say() { echo "$*" >"$folder/.state"; mv "$folder/.state" "$folder/state"; }
say running "$step"
step=$((step + $1)) how=$3
if ((step >= $2)); then step=$2 how=done; fi
case $how in
  requeue) say requeue "$step" no time left; exit 13 ;;  # launchers change the trainer's exit code 75
  done) say done "$step" ;;
  failed) say failed "$step" loss is nan; exit 1 ;;
  on_signal) trap 'say requeue "$step" SIGTERM; exit 13' TERM ;;
  stubborn) trap '' TERM ;;
esac
if [[ $how == on_signal || $how == stubborn ]]; then
  say running "$step"
  touch "$folder/up"
  for ((i = 0; i < 600; i++)); do sleep 0.05; done
fi
"""
# A launcher that starts only one rank.
MPIEXEC = """#!/bin/bash
if [[ $1 == --version ]]; then echo "HYDRA build details:"; exit 0; fi
while [[ $1 == -* ]]; do shift 2; done
exec "$@"
"""


def chain_script(site: Site, *words: str, options: Sequence[str] = (), profile: str = "generic_pbs") -> Path:
    """The script of a job whose program is TRAINER with these arguments."""
    mpiexec = program(site.root / "bin" / "mpiexec", MPIEXEC)
    site.dotfile(mpiexec.parent, site.pbs_bin)
    trainer = program(site.root / "trainer.sh", TRAINER)
    return render(site, profile, *options, command=[str(trainer), *words])


def run_dir(site: Site) -> Path:
    return site.work / "runs" / "ddp"


def state(site: Site) -> str:
    return (run_dir(site) / "state").read_text().strip()


def attempts(site: Site) -> list[str]:
    """`ATTEMPT JOBID STEP` of each start."""
    lines = (run_dir(site) / "attempts").read_text().splitlines()
    return [line.rpartition(" ")[0] for line in lines]


def wait_until_up(site: Site) -> None:
    end_s = time.monotonic() + PATIENCE * 30
    while not (run_dir(site) / "up").exists():
        assert time.monotonic() < end_s, site.logs()
        time.sleep(0.05)


def wait_for_text(site: Site, path: Path, text: str) -> None:
    end_s = time.monotonic() + PATIENCE * 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end_s, site.logs()
        time.sleep(0.05)


# Each job submits its successor.


@pytest.mark.check
def test_a_run_too_long_for_one_job_is_trained_by_three(site: Site) -> None:
    script = chain_script(site, "10", "25", "requeue")
    site.submit("-A", "PROJECT", "-q", "preemptable", script)
    jobs = [site.wait(f"{number}.pbs-srv") for number in (12, 13, 14)]
    assert [job["Exit_status"] for job in jobs] == [75, 75, 0]
    assert state(site) == "done 25"
    assert attempts(site) == ["1 12.pbs-srv 0", "2 13.pbs-srv 10", "3 14.pbs-srv 20"]
    assert {(job["Account_Name"], job["queue"]) for job in jobs} == {("PROJECT", "preemptable")}
    assert jobs[1]["depend"].split(",")[0] == "afterany:12.pbs-srv@pbs-srv"
    assert site.num_jobs() == 3


@pytest.mark.check
def test_the_successor_gets_no_variables_of_the_old_job(site: Site) -> None:
    variables = ["PMI_RANK=1", "PALS_RANKID=1", "SLURM_PROCID=1", "RANK=1", "MASTER_ADDR=old"]
    first_only = f"if [[ -z ${{DDP_HPC_ATTEMPT:-}} ]]; then export {' '.join(variables)}; fi"
    setup = ["--setup", first_only, "--setup", 'env >"env.$PBS_JOBID"']
    script = chain_script(site, "10", "20", "requeue", options=setup)
    recorder = f'#!/bin/bash\nenv >"{site.root}/env.qsub"\nexec "{site.pbs_bin}/qsub" "$@"\n'
    program(site.root / "bin" / "qsub", recorder)
    site.wait(site.submit(script))
    assert site.wait("13.pbs-srv")["Exit_status"] == 0, site.logs()
    seen = {line.partition("=")[0] for line in (site.root / "env.qsub").read_text().splitlines()}
    assert seen == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "SHLVL", "_"}
    old, new = ((site.work / f"env.{number}.pbs-srv").read_text().splitlines() for number in (12, 13))
    assert set(variables) <= set(old)
    assert not set(variables) & set(new)


@pytest.mark.check
def test_options_of_qsub_set_the_deadline_and_are_passed_to_the_successor(site: Site) -> None:
    options = ["--walltime", "01:00:00", "--setup", 'echo "at $(date +%s)"']
    script = chain_script(site, "10", "20", "requeue", options=options)
    see_deadline = f'#!/bin/bash\necho "until $DDP_HPC_DEADLINE"\n{TRAINER}'
    program(site.root / "trainer.sh", see_deadline)
    site.submit(
        "-l", "walltime=1:30,select=2:ncpus=2:mpiprocs=1", "-lplace=scatter:excl", "-l", "software=x", script
    )
    for number in (12, 13):
        job = site.wait(f"{number}.pbs-srv")
        granted = {
            "walltime": "00:01:30",
            "select": "2:ncpus=2:mpiprocs=1",
            "place": "scatter:excl",
            "software": "x",
        }
        assert job["Resource_List"] | granted == job["Resource_List"]
        [at_s, until_s] = (
            int(line.split()[1]) for line in site.log(job).splitlines() if line[:3] in ("at ", "unt")
        )
        assert 80 <= until_s - at_s <= 91
    assert site.job("13.pbs-srv")["Exit_status"] == 0


def test_a_deleted_job_saves_its_state_and_is_not_resumed(site: Site) -> None:
    job_id = site.submit(chain_script(site, "10", "25", "on_signal"))
    wait_until_up(site)
    site.run("qdel", job_id)
    job = site.wait(job_id)
    assert (job["Exit_status"], job["left_over"]) == (256 + 15, [])
    assert state(site) == "requeue 10 SIGTERM"
    assert "the job was cancelled, so no other job is submitted; to resume: cd " in site.log(job)
    assert site.num_jobs() == 1


@pytest.mark.check
def test_at_the_end_of_the_walltime_the_successor_is_submitted_within_the_kill_delay(site: Site) -> None:
    """PBS sends no warning: its first signal ends the job and kills the login shell of the script."""
    job = site.wait(
        site.submit(chain_script(site, "10", "20", "on_signal", options=["--walltime", "00:00:01"]))
    )
    assert (job["Exit_status"], job["left_over"]) == (-29, [])
    assert "; attempt 2 resumes the run in job 13.pbs-srv\n" in site.log(job)
    assert site.wait("13.pbs-srv")["Exit_status"] == 0
    assert state(site) == "done 20"


@pytest.mark.check
def test_a_job_cancelled_in_the_last_seconds_of_its_walltime_is_not_resumed(site: Site) -> None:
    job_id = site.submit(chain_script(site, "10", "25", "on_signal", options=["--walltime", "00:00:20"]))
    wait_until_up(site)
    # The server does not report who ended the job, as in other versions.
    program(site.root / "bin" / "qstat", f'#!/bin/sh\n{site.pbs_bin}/qstat "$@" | sed "/comment/d"\n')
    done = site.run(sys.executable, "-m", "ddp_hpc", "cancel", job_id, env={"PYTHONPATH": str(PROJECT)})
    assert (done.returncode, done.stdout) == (0, f"{job_id}\n"), done.stderr
    log = site.log(site.wait(job_id))
    assert log.splitlines()[-1].startswith(
        "ddp-hpc: stopped at step 10: SIGTERM; the job was cancelled, so no other job is submitted; "
        "to resume: cd "
    )
    assert site.num_jobs() == 1
    # The file applies only to that attempt.
    (run_dir(site) / "up").unlink()
    site.submit(site.work / "job.pbs")
    wait_until_up(site)
    assert not (run_dir(site) / "cancelled").exists()


@pytest.mark.check
def test_while_the_server_is_unreachable_qsub_is_retried(site: Site) -> None:
    down = site.server_is_down
    goes_down = f"if [[ ! -e {site.root}/was_down ]]; then touch {site.root}/was_down {down}; fi"
    script = chain_script(site, "10", "20", "requeue", options=["--setup", goes_down])
    site.submit("-k", "doe", script)
    log = site.work / "ddp.o12"
    wait_for_text(site, log, "retrying for up to 300 s")
    down.unlink()
    site.wait("12.pbs-srv")
    assert site.wait("13.pbs-srv")["Exit_status"] == 0
    assert site.job("13.pbs-srv")["depend"] == "afterany:12.pbs-srv@pbs-srv"
    said = log.read_text()
    assert "the scheduler could not be reached: Connection refused; qsub: cannot connect to server" in said
    assert f"by then, resume with: cd {site.work} && qsub " in said
    last = "ddp-hpc: stopped at step 10: no time left; attempt 2 resumes the run in job 13.pbs-srv"
    assert said.splitlines()[-1] == last
    assert not (run_dir(site) / "resume").exists()


@pytest.mark.check
def test_if_the_server_stays_unreachable_the_job_leaves_the_command_that_resumes_the_run(site: Site) -> None:
    """The job has 4 s left when its trainer stops, and the server is down for longer."""
    down = site.server_is_down
    script = chain_script(site, "10", "20", "requeue", options=["--walltime", "00:00:04"])
    goes_down = f"if ((step == 0)); then touch {down}; fi\nsay running"
    program(site.root / "trainer.sh", TRAINER.replace("say running", goes_down, 1))
    job_id = site.submit("-k", "doe", "-N", "nm", script)
    log = site.work / "nm.o12"
    wait_for_text(site, log, "no successor could be queued")
    down.unlink()
    assert site.wait(job_id)["Exit_status"] in (75, -29)
    command, why = (run_dir(site) / "resume").read_text().splitlines()
    assert command.startswith(f"cd {site.work} && qsub -N nm ")
    assert command.endswith(f" {run_dir(site)}/job.sh")
    assert why.startswith("# attempt 1 stopped at step 10: no time left; no successor could be queued: ")
    assert f"resume with: {command}" in log.read_text()
    status = site.run(sys.executable, "-m", "ddp_hpc", "status", job_id, env={"PYTHONPATH": str(PROJECT)})
    assert status.stdout.splitlines()[-1] == f"resume    {command}"
    # The command works as it is.
    done = site.run("bash", "-c", command)
    assert site.wait(done.stdout.strip())["Exit_status"] == 0
    assert state(site) == "done 20"
    assert not (run_dir(site) / "resume").exists()


@pytest.mark.check
def test_all_that_qsub_was_given_reaches_the_third_job_of_a_run(site: Site) -> None:
    """Variables, name, priority, mail, umask and log, which the directives do not contain."""
    show = ["--setup", 'printf "%s|%s|%s|%s\\n" "$LR" "$WORDS" "$QUOTED" "$(umask)" >"seen.$PBS_JOBID"']
    script = chain_script(site, "10", "30", "requeue", options=show)
    variables = 'LR=0.5,WORDS=a b,QUOTED="x;y"'
    given = ["-N", "nm", "-p", "-5", "-m", "abe", "-M", "me@x.org", "-W", "umask=027", "-o", "own.log"]
    site.submit("-v", variables, *given, script)
    jobs = [site.wait(f"{number}.pbs-srv") for number in (12, 13, 14)]
    assert state(site) == "done 30"
    seen = {(site.work / f"seen.{number}.pbs-srv").read_text() for number in (12, 13, 14)}
    assert seen == {'0.5|a b|"x;y"|0027\n'}
    names = ("Job_Name", "Priority", "Mail_Points", "Mail_Users", "umask", "Output_Path")
    assert len({tuple(job[name] for name in names) for job in jobs}) == 1, jobs


@pytest.mark.check
def test_a_walltime_that_was_shortened_with_qalter_does_not_look_like_a_cancellation(site: Site) -> None:
    job_id = site.submit(chain_script(site, "10", "20", "on_signal", options=["--walltime", "01:00:00"]))
    wait_until_up(site)
    site.change_walltime(job_id, 1)
    job = site.wait(job_id)
    assert job["Exit_status"] == -29
    assert "; attempt 2 resumes the run in job 13.pbs-srv\n" in site.log(job)


@pytest.mark.check
def test_a_job_that_pbs_runs_again_asks_nobody_to_submit_it(site: Site) -> None:
    job_id = site.submit(chain_script(site, "10", "20", "on_signal"))
    wait_until_up(site)
    site.requeue(job_id)
    job = site.wait(job_id)
    assert job["run_count"] == 2
    said = "ddp-hpc: stopped at step 10: SIGTERM; PBS has requeued this job, which will resume the run\n"
    assert said in site.log(job)
    assert "to resume" not in site.log(job)
    assert (state(site), site.num_jobs()) == ("done 20", 1)
    assert attempts(site) == ["1 12.pbs-srv 0", "2 12.pbs-srv 10"]


HANGS = """#!/bin/bash
if [[ $1 == --version ]]; then echo "HYDRA build details:"; exit 0; fi
while [[ $1 == -* ]]; do shift 2; done
trap '' TERM
"$@"
while :; do sleep 0.1; done
"""


@pytest.mark.check
def test_a_launcher_that_hangs_after_the_final_state_does_not_end_the_chain(site: Site) -> None:
    """mpiexec.hydra ignores SIGTERM while a stranger keeps a connection to its port."""
    script = chain_script(site, "10", "20", "requeue", options=["--walltime", "00:00:08"])
    program(site.root / "bin" / "mpiexec", HANGS)
    job = site.wait(site.submit(script))
    # The walltime of 8 s limits the patience, which otherwise is 30 s.
    log = site.log(job)
    assert "ddp-hpc: terminating mpiexec: it is still waiting for ranks " in log
    assert "ddp-hpc: killing mpiexec, which did not exit after SIGTERM\n" in log
    assert "; attempt 2 resumes the run in job 13.pbs-srv\n" in log
    assert "walltime" not in log.rpartition("resumes the run in job")[2]


@pytest.mark.check
def test_a_dropped_successor_is_queued_again_without_a_dependency(site: Site) -> None:
    """The server has lost the job, for example after `qdel -W force` or a loss of its database."""
    forgets = 'set -- "${@/depend=afterany:12.pbs-srv/depend=afterany:99}"'
    program(site.root / "bin" / "qsub", f'#!/bin/bash\n{forgets}\nexec {site.pbs_bin}/qsub "$@"\n')
    site.wait(site.submit(chain_script(site, "10", "20", "requeue")))
    assert site.wait("13.pbs-srv")["substate"] == 92
    assert site.wait("14.pbs-srv")["Exit_status"] == 0
    assert state(site) == "done 20"
    log = site.log(site.job("12.pbs-srv"))
    assert "PBS has dropped job 13.pbs-srv because the server no longer knows job 12.pbs-srv;" in log


@pytest.mark.check
def test_ranks_that_hang_until_the_walltime_leave_the_command_that_resumes_the_run(site: Site) -> None:
    """A rank that was stopped before the training began has written no state."""
    script = chain_script(site, "10", "20", "requeue", options=["--walltime", "00:00:02"])
    program(site.root / "bin" / "mpiexec", HANGS)
    program(site.root / "trainer.sh", "#!/bin/bash\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    job = site.wait(site.submit(script))
    log = site.log(job)
    assert "error: mpiexec did not end and was killed; look in the log for ranks that hang\n" in log
    command = (run_dir(site) / "resume").read_text().splitlines()[0]
    assert command.startswith(f"cd {site.work} && qsub ")
    assert f"; to resume anyway: {command}\n" in log
