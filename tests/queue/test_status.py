"""`ddp-hpc status`, `logs` and `cancel` with recorded output of schedulers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd, write_end
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.base.run_state import RunState, write_state
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.queue import submission_ledger as ledger
from ddp_hpc.queue.array_report import _ORDER
from tests.conftest import clean_environ
from tests.queue.answers import NO_RECORD, pbs, qstat_text, slurm
from tests.queue.conftest import Programs, Run
from tests.queue.test_ledger import make_run, submission

LOG = "epoch 1/10 step 100/640 loss 1.25 61.3 samples/s eta 0:30:00\n"


def answer(programs: Programs, work: Path, **changes: str) -> Path:
    """Makes scontrol report job 12, whose log is in the current directory; returns the log's path."""
    known = {"work": str(work), "log": str(work / "ddp-12.out"), "script": str(work / "job.sh")}
    programs.answers("scontrol", slurm(**{**known, **changes}))
    return work / "ddp-12.out"


def test_a_training_job(work: Path, programs: Programs, run: Run) -> None:
    answer(programs, work).write_text(LOG)
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    write_state(folder, RunState(State.RUNNING, 90, "saved a snapshot"))
    done = run("status", "12")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "job       12 (ddp of me): running, RUNNING on n[1-2]",
        "time      00:10:00 of 01:00:00",
        "step      100 of 640, loss 1.25",
        "eta       00:30:00 left, 00:20:00 before the walltime ends",
        "state     running 90 saved a snapshot",
        "attempts  1 (job 12 from step 0)",
        f"log       {work}/ddp-12.out",
        f"run       {folder}",
    ]


def test_the_cost_of_a_run_and_why_ranks_were_started_again(work: Path, programs: Programs, run: Run) -> None:
    answer(programs, work)
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000", "2 12 0 4600")
    end = AttemptEnd(cause=Cause.EXITED, exit_code=3, reason="rank 3 on n2 exited with code 3", rank=3)
    note(folder, "1 12", Moment.JOB_BEGAN, at_s=time.time() - 3600, num_nodes=2)
    launched = {"num_used": None, "records_steps": False, "checks_s": 0.0}
    note(folder, "1 12", Moment.LAUNCHER_STARTED, at_s=time.time() - 3600, **launched)
    write_end(folder, "1 12", end)
    note(folder, "1 12", Moment.LAUNCHER_ENDED, checkpoint_s=time.time())
    note(folder, "2 12", Moment.LAUNCHER_STARTED, **launched)
    assert (
        "\ncost      2 node-hours, 100 % useful; 1 restart: rank 3 on n2 exited with code 3\n"
        in run("status", "12").out
    )
    cost = json.loads(run("status", "12", "--json").out)["cost"]
    assert cost["restarts"] == ["rank 3 on n2 exited with code 3"]
    assert cost["node_hours"]["useful_steps"] == pytest.approx(2, rel=0.01)
    assert [attempt["attempt"] for attempt in cost["attempts"]] == [1, 2]


def test_step_and_eta_are_those_of_the_current_attempt(work: Path, programs: Programs, run: Run) -> None:
    """A requeued job appends to its log."""
    log = answer(programs, work)
    make_run(work / "runs" / "ddp", "1 12 0 1000", "2 12 100 2000")
    log.write_text(f"{LOG}ddp-hpc: job 12: srun --ntasks=2 python -m ddp_hpc.train\n")
    out = run("status", "12").out
    assert "\nstep " not in out
    assert "\neta " not in out
    log.write_text(f"{log.read_text()}{LOG.replace('step 100', 'step 110')}")
    assert "\nstep      110 of 640" in run("status", "12").out
    answer(programs, work, state="PENDING", reason="BeginTime")
    assert "\nstep " not in run("status", "12").out, "the next attempt has not begun"


def test_the_state_of_an_earlier_run_is_not_that_of_a_job_that_failed_at_its_start(
    work: Path, programs: Programs, run: Run
) -> None:
    answer(programs, work, state="FAILED", exit="1:0", reason="NonZeroExitCode")
    folder = make_run(work / "runs" / "ddp", f"1 12 30 {int(time.time()) - 60}")
    write_state(folder, RunState(State.DONE, 40, "training complete"))
    an_hour_ago = time.time() - 3600
    os.utime(folder / "state", (an_hour_ago, an_hour_ago))
    out = run("status", "12").out
    assert "cause     failed: exit code 1\n" in out
    assert "training complete" not in out
    assert "it resumes after step 30" in out


def test_a_waiting_job(work: Path, programs: Programs, run: Run) -> None:
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5400))
    answer(programs, work, state="PENDING", reason="Resources", start=start, nodes="", run_time="00:00:00")
    done = run("status", "12")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[:2] == ["job       12 (ddp of me): waiting, PENDING", "reason    Resources"]
    assert lines[2].startswith(f"starts    about {start[:10]} ")
    assert lines[3] == "time      01:00:00 requested"


def test_a_failed_job(work: Path, programs: Programs, run: Run) -> None:
    log = answer(programs, work, state="FAILED", exit="1:0", reason="NonZeroExitCode")
    log.write_text("[rank 1/2 n2] error: data.h5: is damaged\n")
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    write_state(folder, RunState(State.FAILED, 0, "data.h5: is damaged"))
    done = run("status", "12")
    assert done.code == 1
    assert done.out.splitlines()[-4:] == [
        "cause     failed: exit code 1; data.h5: is damaged",
        "failed    rank 1 on n2",
        "  | [rank 1/2 n2] error: data.h5: is damaged",
        "action    fix the error shown above, then submit it again",
    ]


def test_the_failure_that_exec_recorded_in_the_last_attempt_is_reported(
    work: Path, programs: Programs, run: Run
) -> None:
    answer(programs, work, state="FAILED", exit="143:0").write_text("no word\n")
    run_dir = make_run(work / "runs" / "ddp", "1 12 0 1000", "2 12 0 2000")
    end = AttemptEnd(cause=Cause.EXITED, exit_code=1, reason="rank 3 exited", rank=3, host="n2")
    write_end(run_dir, "2 12", end)
    out = run("status", "12").out
    assert "cause     failed: exit code 1\nfailed    rank 3 on n2\n" in out
    (run_dir / "end").unlink()
    write_end(run_dir, "1 12", end)
    assert "cause     failed: exit code 143 (SIGTERM)\n" in run("status", "12").out


def array(programs: Programs, work: Path) -> None:
    """Makes scontrol report array 12: task 0 is done, 1 failed, 2 runs, 3 to 6 wait."""
    records = [
        ("COMPLETED", "0:0", "0"),
        ("FAILED", "1:0", "1"),
        ("RUNNING", "0:0", "2"),
        ("PENDING", "0:0", "3-6%1"),
    ]
    text = ""
    for number, (state, code, index) in enumerate(records, start=13):
        script = str(work / "job.sh")
        job_id = f"{number} ArrayJobId=12 ArrayTaskId={index}"
        text += slurm(
            job_id=job_id,
            state=state,
            exit=code,
            work=str(work),
            log=str(work / f"ddp-12_{index}.out"),
            script=script,
        )
    programs.answers("scontrol", text)
    for index in range(3):
        (work / f"ddp-12_{index}.out").write_text(f"task {index}\n" + "ValueError: odd\n" * (index == 1))


def test_an_array_is_shown_by_the_states_of_its_tasks_with_the_failed_ones(
    work: Path, programs: Programs, run: Run
) -> None:
    array(programs, work)
    done = run("status", "12")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        "job       12 (ddp of me): failed",
        "tasks     1 done, 4 waiting, 1 running, 1 failed",
        "task      12_1: failed; failed: exit code 1",
        "  | task 1",
        "  | ValueError: odd",
        "details   ddp-hpc status 12_1",
    ]
    found = json.loads(run("status", "12", "--json").out)
    assert found["counts"] == {"done": 1, "waiting": 4, "running": 1, "failed": 1}
    assert [one["job_id"] for one in found["problems"]] == ["12_1"]


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_the_log_of_an_array_is_that_of_a_task(
    work: Path, programs: Programs, run: Run, options: tuple[str, ...]
) -> None:
    array(programs, work)
    done = run("logs", "12", *options)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: job 12 is a job array, and each of its tasks has its own log; give the ID of a task: "
        "ddp-hpc logs 12_2\n"
    )


def test_the_jobs_that_resume_tasks_of_an_array_are_named_and_not_cancelled(
    work: Path, programs: Programs, run: Run
) -> None:
    jobs(programs, work, j20="RUNNING", j21="PENDING")
    tasks = ""
    for index in (0, 1):
        job_id = f"{13 + index} ArrayJobId=12 ArrayTaskId={index}"
        tasks += slurm(job_id=job_id, state="FAILED", exit="75:0", work=str(work))
        make_run(work / "runs" / "ddp" / f"task-{index}", f"1 12_{index} 0 1000", f"2 {20 + index} 5 2000")
    (programs.folder / "12").write_text(tasks)
    done = run("status", "12")
    lines = done.out.splitlines()
    assert (done.code, lines[1]) == (75, "tasks     2 requeue")
    assert [line for line in lines if line.startswith("next ")] == [
        "next      job 20 resumes the run of 12_0",
        "next      job 21 resumes the run of 12_1",
    ]
    cancelled = run("cancel", "12")
    assert (cancelled.code, cancelled.out) == (0, "")
    assert cancelled.err.splitlines() == [
        "all tasks of job 12 have already ended (2 requeue)",
        *[f"the run continues in job {one}; to cancel it: ddp-hpc cancel {one}" for one in (20, 21)],
    ]


def test_tasks_of_which_pbs_has_no_record_end_as_their_runs_and_logs_show(
    work: Path, programs: Programs, run: Run
) -> None:
    """Tasks 1 to 30 are done, 31 has failed, 32 to 40 have a log but no run, and 41 to 60 have no log."""
    forgotten = {**NO_RECORD, "Variable_List": {"PBS_O_WORKDIR": str(work)}, "job_state": "X"}
    forgotten |= {"comment": "Subjob finished", "Output_Path": f"login:{work}/ddp.o12.^array_index^"}
    answer = pbs(**{**forgotten, "job_state": "F", "array_indices_remaining": "-"})
    [parent] = answer.values()
    [task] = pbs(**forgotten).values()
    answer = {"12[].pbs-srv": parent} | {f"12[{index}].pbs-srv": task for index in range(1, 61)}
    programs.answers("qstat", qstat_text(answer))
    for index in range(1, 41):
        (work / f"ddp.o12.{index}").write_text("ValueError: odd\n")
    for index in range(1, 32):
        own = make_run(work / "runs" / "ddp" / f"task-{index}", f"1 12[{index}].pbs-srv 0 1000")
        write_state(own, RunState(State.DONE if index < 31 else "failed", 60, "loss is nan"))
    done = run("status", "12[]")
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[:5] == [
        "job       12[].pbs-srv (ddp of me): failed",
        "tasks     30 done, 20 cancelled, 9 unknown, 1 failed",
        "task      12[31].pbs-srv: failed; failed: loss is nan",
        "  | ValueError: odd",
        "task      12[32].pbs-srv: unknown; unknown: PBS has no record of how it ended, or whether it ran",
    ]
    never = "cancelled; cancelled: it was cancelled; it has no log, so it never started"
    assert f"task      12[41].pbs-srv: {never}" in lines
    assert lines[-2:] == ["          and 10 more", "details   ddp-hpc status '12[31].pbs-srv'"]


def test_an_array_is_cancelled_with_one_request_and_its_tasks_do_not_resume(
    work: Path, programs: Programs, run: Run
) -> None:
    array(programs, work)
    programs.answers("scancel", "")
    tasks = [make_run(work / "runs" / "ddp" / f"task-{index}", f"1 12_{index} 0 1000") for index in (1, 2)]
    done = run("cancel", "12")
    assert (done.code, done.out, done.err) == (0, "12\n", "")
    assert programs.called("scancel") == ["scancel 12"]
    assert [ledger.is_cancelled(one, f"12_{n}") for n, one in enumerate(tasks, start=1)] == [False, True]


def test_a_job_at_its_walltime_whose_run_will_be_resumed_is_not_a_failure(
    work: Path, programs: Programs, run: Run
) -> None:
    answer(programs, work, state="TIMEOUT", exit="0:15", reason="TimeLimit")
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    write_state(folder, RunState(State.REQUEUE, 60, "the allocation ends soon"))
    done = run("status", "12")
    assert done.code == 75
    assert (
        "action    increase --walltime, or save snapshots so that the next job can resume; "
        "it resumes after step 60" in done.out
    )
    make_run(folder, "1 12 0 1000", "2 13 60 2000")
    assert "action    none: job 13 resumes the run" in run("status", "12").out


def test_the_json_is_complete_and_valid_even_if_the_loss_is_nan(
    work: Path, programs: Programs, run: Run
) -> None:
    answer(programs, work, name="\x1b[31m\"'").write_text(LOG.replace("1.25", "nan"))
    ledger.record(make_run(work / "runs" / "ddp"), submission("12"))
    found = json.loads(run("status", "12", "--json").out, parse_constant=pytest.fail)
    assert (found["verdict"], found["job"]["phase"], found["job"]["name"]) == (
        "running",
        "running",
        "\x1b[31m\"'",
    )
    assert found["progress"] == {"step": 100, "num_steps": 640, "loss": None, "left_s": 1800}
    assert found["submission"]["user"] == "me"
    assert found["post_mortem"] is None


def test_without_an_argument_one_line_is_printed_for_each_run(
    work: Path, programs: Programs, run: Run
) -> None:
    programs.program("scontrol", f'cat "{programs.folder}/$4"')
    states = {"12": "RUNNING", "13": "FAILED", "14": "PENDING", "15": "COMPLETED"}
    for job_id, state in states.items():
        reason = {"reason": "Resources"} if state == "PENDING" else {}
        exit_ = {"exit": "1:0"} if state == "FAILED" else {}
        log = work / f"{job_id}.out"
        text = slurm(job_id=job_id, state=state, work=str(work), log=str(log), **reason, **exit_)
        (programs.folder / job_id).write_text(text)
        log.write_text("" if state == "PENDING" else LOG)
        make_run(work / "runs" / f"run{job_id}", f"1 {job_id} 0 {job_id}")
    write_state(work / "runs" / "run13", RunState(State.FAILED, 0, "data.h5: is damaged"))
    assert run("status").out.splitlines() == [
        "12           running   runs/run12           step 100 of 640, 00:10:00 of 01:00:00",
        "13           failed    runs/run13           exit code 1; data.h5: is damaged",
        "14           waiting   runs/run14           Resources",
        "15           done      runs/run15           step 100 of 640",
    ]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_command_that_a_job_has_left_is_shown_unless_another_job_resumes_the_run(
    work: Path, programs: Programs, run: Run, is_known: bool
) -> None:
    if is_known:
        answer(programs, work, state="FAILED", exit="75:0", reason="NonZeroExitCode")
    else:
        programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Invalid job id specified")
    folder = make_run(work / "runs" / "ddp", f"1 12 0 {int(time.time()) - 60}")
    write_state(folder, RunState(State.REQUEUE, 60, "no time left"))
    (folder / "resume").write_text(f"cd {work} && sbatch runs/ddp/job.sh\n# the scheduler is down\n")
    lines = run("status", "12").out.splitlines()
    assert lines[-1] == f"resume    cd {work} && sbatch runs/ddp/job.sh"
    assert (
        "action    resume the run with the command in `resume`; it resumes after step 60" in lines
    ) == is_known
    make_run(folder, f"1 12 0 {int(time.time()) - 60}", "2 13 60 1900000000")
    assert "\nresume " not in run("status", "12").out


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
def test_the_verdict_on_a_job_is_the_state_of_its_run(
    work: Path, programs: Programs, run: Run, state: State
) -> None:
    folder = make_run(work / "runs" / "ddp", f"1 12 0 {int(time.time()) - 60}")
    write_state(folder, RunState(state, 60, "why"))
    word = "COMPLETED" if state.is_complete else "FAILED"
    answer(programs, work, state=word, exit=f"{state.exit_code}:0", reason="NonZeroExitCode")
    done = run("status", "12")
    assert (done.code, f": {state}, {word}" in done.out) == (state.exit_code, True), done.out
    programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Invalid job id specified")
    done = run("status", "12")
    assert (done.code, f"12: {state}; the scheduler" in done.out) == (state.exit_code, True), done.out
    has_action = not state.is_complete and not state.is_resumed_by_job
    assert (f"\naction    {state.how_to_resume()}\n" in done.out) == has_action


def test_the_verdict_on_an_array_is_that_of_the_tasks_that_need_most_attention() -> None:
    ends = ("failure", "running", "waiting", "stop", "unknown", "cancelled", "success")
    expected = [word for end in ends for word in State.ending_in(end) or (end,)]  # type: ignore[arg-type]  # other words
    assert list(_ORDER) == expected


def test_without_a_scheduler_the_content_of_the_run_directory_is_reported(
    work: Path, programs: Programs, run: Run
) -> None:
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    write_state(folder, RunState(State.DONE, 640, "all steps are trained"))
    done = run("status", "--long")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "job       12: done; known only from the files of the run"
    assert lines[1].startswith("scheduler neither scontrol (Slurm) nor qstat (PBS) was found on the PATH")
    assert lines[2] == "state     done 640 all steps are trained"
    write_state(folder, RunState(State.RUNNING, 90, ""))
    assert run("status").code == 1, "the state is unknown"


@pytest.mark.parametrize("args", [["runs/ddp"], ["--run-dir", "runs/ddp"], ["12", "--run-dir", "runs/ddp"]])
def test_status_and_logs_read_the_files_of_a_run_if_the_scheduler_does_not_answer(
    work: Path, programs: Programs, run: Run, args: list[str]
) -> None:
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    write_state(folder, RunState(State.FAILED, 640, "rank 1 was killed"))
    note(folder, "1 12", Moment.JOB_BEGAN, num_nodes=1)
    note(folder, "1 12", Moment.NOT_RESTARTED, reason="--restarts is 0")
    (folder / "failed_nodes").write_text("n3 1700000000 it does not answer\n")
    (folder / "logs/attempt-1/n1").mkdir(parents=True)
    (folder / "logs/attempt-1/n1/rank-0.log").write_text("epoch 1\n")
    programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Unable to contact controller\n")
    assert run("status").code == 1, "without the directory of a run, the scheduler must answer"
    done = run("status", *args)
    assert (done.code, done.err) == (1, "")
    if args[0] != "--run-dir":
        assert "scheduler scontrol failed: slurm_load_jobs error" in done.out
        assert "\nrestart   none: --restarts is 0\n" in done.out
        assert "\n          to use these nodes again: ddp-hpc submit --forget-nodes\n" in done.out
    done = run("logs", *args, "--rank", "0")
    assert (done.code, done.out) == (0, "epoch 1\n")
    assert "-- the state of job 12 is not known: " in done.err
    assert run("logs", *args).code == 1
    (work / "ddp-12.out").write_text("a line\n")
    done = run("logs", *args)
    assert (done.code, done.out) == (0, "a line\n"), "the log in this directory"


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_an_invalid_job_is_one_line(work: Path, programs: Programs, run: Run, command: str) -> None:
    done = run(command, "12")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "error: neither scontrol (Slurm) nor qstat (PBS) was found on the PATH. Run this on"
    )
    programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    done = run(command, "99")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: job 99 was not found by the scheduler or in a run directory in ")
    for hostile in ("12\n13", "$(touch canary)", "12;13", "../12"):
        done = run(command, hostile)
        assert (done.code, done.out) == (2, "")
        assert "is not a job ID" in done.err
    assert not (work / "canary").exists()
    assert len(programs.called("scontrol")) == 1


def test_a_pbs_machine_with_slurms_clients_is_a_pbs_machine(work: Path, programs: Programs, run: Run) -> None:
    programs.answers(
        "scontrol", "", code=1, err="scontrol: fatal: Could not establish a configuration source"
    )
    programs.answers("qstat", qstat_text(pbs(Exit_status=0, job_state="F")))
    assert "12.pbs-srv (ddp of me): done, F" in run("status", "12").out
    programs.answers("qstat", "", code=153, err="qstat: Unknown Job Id 12\n")
    assert run("status", "12").code == 2
    programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Unable to contact slurm controller")
    done = run("status", "12")
    assert done.code == 1, "it may know the job when it is reachable again"
    assert done.err.startswith(
        "error: PBS does not know job 12, and Slurm does not answer: scontrol failed 3"
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("PENDING", "job 12 has not started (Priority); there is no log yet"),
        ("RUNNING", "job 12 has no output yet"),
        ("FAILED", "job 12 ended (FAILED) without a log"),
    ],
)
def test_a_missing_log_is_explained(work: Path, programs: Programs, run: Run, state: str, said: str) -> None:
    answer(programs, work, state=state, reason="Priority")
    done = run("logs", "12")
    assert (done.code, done.out) == (1, "")
    assert said in done.err


def lives(programs: Programs, work: Path, *states: str) -> None:
    """Makes scontrol report job 12 in these states, one per call; the last one is repeated."""
    for index, state in enumerate(states):
        text = slurm(
            state=state, reason="Priority", work=str(work), log=str(work / "log"), script=f"{work}/job.sh"
        )
        (programs.folder / f"{index}.txt").write_text(text)
    grow = f'echo "line of question ${{#calls[@]}}" >>"{work}/log"'
    last = len(states) - 1
    programs.program(
        "scontrol",
        f'mapfile -t calls <"{programs.calls}"; n=$((${{#calls[@]}} - 1)); if ((n > 0)); then {grow}; fi\n'
        f'if ((n > {last})); then n={last}; fi; cat "{programs.folder}/$n.txt"',
    )


def test_the_log_of_a_job_unknown_to_the_scheduler_is_found_by_its_default_name(
    work: Path, programs: Programs, run: Run
) -> None:
    programs.answers("scontrol", "", code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    ledger.record(make_run(work / "runs" / "ddp", "1 12 0 1000"), submission("12", work_dir=str(work)))
    (work / "ddp-12.out").write_text("a line\n")
    for words in (["12"], ["12", "--follow"]):
        done = run("logs", *words)
        assert (done.code, done.out) == (0, "a line\n")


def test_following_waits_for_the_start_and_ends_with_the_job(
    work: Path, programs: Programs, run: Run
) -> None:
    lives(programs, work, "PENDING", "PENDING", "RUNNING", "RUNNING", "COMPLETED")
    done = run("logs", "12", "--follow")
    assert done.code == 0
    assert done.out.splitlines() == [f"line of question {n}" for n in (2, 3, 4, 5)]
    assert done.err.splitlines() == ["-- job 12 has not started (Priority)", "-- job 12: done"]


def test_following_continues_with_the_successor(work: Path, programs: Programs, run: Run) -> None:
    programs.program("scontrol", f'cat "{programs.folder}/$4"')
    for job_id, exit_ in (("12", "75:0"), ("13", "0:0")):
        state = "FAILED" if exit_ == "75:0" else "COMPLETED"
        text = slurm(job_id=job_id, state=state, exit=exit_, work=str(work), log=f"{work}/{job_id}.out")
        (programs.folder / job_id).write_text(text)
    said = "ddp-hpc: stopped at step 60: no time; attempt 2 resumes the run in job 13\n"
    (work / "12.out").write_text(said)
    ledger.record(make_run(work / "runs" / "ddp", "1 12 0 1000"), submission("13", after="12"))
    (work / "13.out").write_text("done\n")
    done = run("logs", "12", "--follow")
    assert (done.code, done.out) == (0, f"{said}done\n")
    assert "-- job 13 resumes the run" in done.err


def write_rank_logs(run_dir: Path, *places: str) -> None:
    for place in places:
        path = run_dir / "logs" / place
        path.parent.mkdir(parents=True)
        path.write_text(f"{place}\n")


def test_the_logs_of_a_rank_are_those_of_all_attempts_of_the_job(
    work: Path, programs: Programs, run: Run
) -> None:
    answer(programs, work, state="COMPLETED").write_text("rank 0\n")
    run_dir = make_run(work / "runs" / "ddp", "1 11 0 1000", "2 12 0 2000", "3 12 0 3000")
    old, second, third = "attempt-1/n1/rank-3.log", "attempt-2/n1/rank-3.log", "attempt-3/n2/rank-3.log"
    write_rank_logs(run_dir, old, second, third, "attempt-3/n3/rank-13.log")
    for words in ([], ["--follow"]):
        done = run("logs", "12", "--rank", "3", *words)
        assert done.out == f"{second}\n{third}\n"
        assert [done.err.count(f"-- {run_dir}/logs/{place}\n") for place in (second, third)] == [1, 1]
        done = run("logs", "12", *words)
        assert done.out == "rank 0\n"
        assert done.err.count(f"-- the output of each rank is in {run_dir}/logs/attempt-3; to print") == 1
        assert run("logs", "12", "--rank", "3", "--attempt", "1", *words).out == f"{old}\n"
    done = run("logs", "12", "--rank", "4")
    assert (done.code, done.out) == (1, "")
    assert "rank 4 of job 12 has no log of its own in " in done.err
    done = run("logs", "12", "--attempt", "1")
    assert (done.code, done.out) == (2, "")
    assert "add --rank" in done.err


def test_following_continues_while_the_scheduler_is_unreachable(
    work: Path, programs: Programs, run: Run
) -> None:
    running, ended = (
        slurm(work=str(work), log=f"{work}/log"),
        slurm(state="COMPLETED", work=str(work), log=f"{work}/log"),
    )
    (work / "log").write_text("a line\n")
    (programs.folder / "running").write_text(running)
    (programs.folder / "ended").write_text(ended)
    away = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1'
    programs.program(
        "scontrol",
        f'mapfile -t calls <"{programs.calls}"; n=${{#calls[@]}}\n'
        f'if ((n == 1)); then cat "{programs.folder}/running"\n'
        f'elif ((n < 6)); then {away}; else cat "{programs.folder}/ended"; fi',
    )
    done = run("logs", "12", "-f")
    assert (done.code, done.out) == (0, "a line\n")
    assert "-- scontrol failed 3 times" in done.err


def test_an_unreadable_log_is_named(
    work: Path, programs: Programs, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, mode: str = "r") -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    answer(programs, work).write_text("a line\n")
    monkeypatch.setattr(Path, "open", refuse)
    done = run("logs", "12")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {work}/ddp-12.out cannot be read ({os.strerror(errno.ESTALE)}); ")


def test_ctrl_c_ends_the_output_and_not_the_job(work: Path, programs: Programs) -> None:
    answer(programs, work).write_text("a line\n")
    argv = [sys.executable, "-m", "ddp_hpc", "logs", "12", "--follow"]
    env = {**clean_environ(), "PATH": str(programs.folder)}
    with subprocess.Popen(argv, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a line\n"
        process.send_signal(2)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"\ninterrupted\n")
    assert not programs.called("scancel")


def jobs(programs: Programs, work: Path, **states: str) -> None:
    """Makes scontrol report these jobs, such as `j12="RUNNING"`."""
    programs.program("scontrol", f'cat "{programs.folder}/${{!#}}"')
    for name, state in states.items():
        number = name.removeprefix("j")
        text = slurm(job_id=number, state=state, work=str(work), log=f"{work}/{number}.out")
        (programs.folder / number).write_text(text)


def test_cancelling_an_ended_job_cancels_no_other_job(work: Path, programs: Programs, run: Run) -> None:
    """Job 11 was submitted by mistake for a run directory that job 12 uses now."""
    jobs(programs, work, j10="TIMEOUT", j11="FAILED", j12="RUNNING")
    programs.answers("scancel", "")
    make_run(work / "runs" / "ddp", "1 10 0 1000", "1 11 0 1001", "2 12 60 2000")
    done = run("cancel", "11")
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines() == [
        "job 11 has already ended (FAILED)",
        "the run continues in job 12; to cancel it: ddp-hpc cancel 12",
    ]
    assert not programs.called("scancel")


def test_a_job_that_is_not_part_of_the_chain_is_named_and_not_cancelled(
    work: Path, programs: Programs, run: Run
) -> None:
    jobs(programs, work, j11="RUNNING", j12="RUNNING")
    programs.answers("scancel", "")
    make_run(work / "runs" / "ddp", "1 11 0 1001", "2 12 60 2000")
    done = run("cancel", "11")
    assert (done.code, done.out) == (0, "11\n")
    assert done.err == "the run continues in job 12; to cancel it: ddp-hpc cancel 12\n"


@pytest.mark.parametrize("args", [["status", "12"], ["status"], ["logs", "12"], ["cancel", "12"]])
def test_a_missing_run_directory_is_an_invalid_request(
    work: Path, programs: Programs, run: Run, args: list[str]
) -> None:
    done = run(*args, "--run-dir", "nope")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err == "error: --run-dir nope is not a readable directory; give the run directory of the job\n"
    )
    assert not programs.called()


@pytest.mark.parametrize(
    ("program", "refusal"),
    [
        ("scancel", "scancel: error: Kill job error on job id 12: Access/permission denied"),
        ("qdel", "qdel: Unauthorized Request 12.pbs-srv"),
    ],
)
def test_a_job_of_another_user_is_refused_in_one_line(
    work: Path, programs: Programs, run: Run, program: str, refusal: str
) -> None:
    if program == "scancel":
        answer(programs, work, user="you")
    else:
        programs.answers("qstat", qstat_text(pbs(Job_Owner="you@login")))
    programs.answers(program, "", code=1, err=f"{refusal}\n")
    done = run("cancel", "12")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {refusal} (job 12")
    assert "of you was not cancelled" in done.err
    assert done.err.count("\n") == 1


def test_ranks_that_trained_separately_are_named_though_the_job_ended_well(
    work: Path, programs: Programs, run: Run
) -> None:
    """A program that ignores torchrun's variables trains alone on each rank, and ends without an error."""
    log = answer(programs, work, state="COMPLETED", exit_code="0:0")
    # tests/mpi tests that `ddp-hpc exec` writes this line.
    said = "2 ranks were started, but rank 0's program has not opened a process group"
    log.write_text(f"[n1] warning: {said}\n" + "step 1 of a program of somebody else\n" * 20_000)
    done = run("status", "12")
    assert done.code == 0
    [line] = [line for line in done.out.splitlines() if line.startswith("warning")]
    assert line == f"warning   {said}"


def test_a_running_training_whose_last_snapshot_was_not_saved_has_a_warning(
    work: Path, programs: Programs, run: Run
) -> None:
    """The user can free space on the disk before the walltime ends; tests/training tests that line."""
    log = answer(programs, work)
    folder = make_run(work / "runs" / "ddp", "1 12 0 1000")
    said = "the snapshot of step 95 was NOT saved in runs/ddp: No space left on device; the newest snapshot"
    log.write_text(LOG + f"WARNING: {said}\n")
    write_state(folder, RunState(State.RUNNING, 90, "saved a snapshot"))
    assert f"warning   {said}" in run("status", "12").out.splitlines()
    write_state(folder, RunState(State.RUNNING, 100, "saved a snapshot"))
    assert "warning" not in run("status", "12").out


def test_control_characters_in_logs_are_not_printed(work: Path, programs: Programs, run: Run) -> None:
    log = answer(programs, work, name="\x1b[31mred", state="FAILED", exit="1:0")
    log.write_text("[rank 1/2 n2] error: \x1b]0;title\x07\n")
    assert run("status", "12").out.replace("\n", "").isprintable()
