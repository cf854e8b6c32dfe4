"""Valid and invalid output of qstat."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.pbs.query_and_cancel import cancel, parse_text, read_job, read_jobs
from tests.queue.answers import NO_RECORD, PBS_TEXT, pbs, pbs_array, qstat_text
from tests.queue.conftest import Programs


def parsed(**changes: Any) -> JobState:
    [job] = parse_text(qstat_text(pbs(**changes)), "12")
    return job


def test_a_running_job() -> None:
    job = parsed()
    assert (job.job_id, job.phase, job.word, job.end) == ("12.pbs-srv", "running", "R", "")
    assert (job.name, job.owner, job.nodes) == ("ddp", "me", "x3001c0s1b0n0+x3001c0s1b1n0")
    assert (job.walltime_s, job.exit_code) == (3600, None)
    assert (job.log, job.error_log, job.log_is_live) == ("/w/ddp.o12", "", True)
    assert (job.work_dir, job.script) == ("/w", "/w/my job.sh")


def test_a_waiting_job_has_a_reason_and_an_estimated_start() -> None:
    start = {"exec_vnode": "(x:ncpus=4)", "start_time": "Sat Nov 21 18:00:00 2026"}
    job = parsed(
        job_state="Q", comment="Not Running: Insufficient amount of resource: ncpus", estimated=start
    )
    assert (job.phase, job.reason) == ("waiting", "Not Running: Insufficient amount of resource: ncpus")
    assert job.starts_at_s == time.mktime((2026, 11, 21, 18, 0, 0, 0, 0, -1))
    after = parsed(job_state="H", comment=None, depend="afterany:11.pbs-srv@pbs-srv")
    assert after.reason == "it waits for afterany:11.pbs-srv@pbs-srv"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"Hold_Types": "u"}, "it is held by its user"),
        (
            {"Hold_Types": "ou", "comment": "Job held by me"},
            "it is held by its user; it is held by an operator; Job held by me",
        ),
        ({"Hold_Types": "s"}, "it is held by the system"),
        (
            {"Hold_Types": "su", "depend": "afterany:11.s@s"},
            "it is held by its user; it waits for afterany:11.s@s",
        ),
        ({"Hold_Types": "u", "depend": "beforeany:13.s@s"}, "it is held by its user"),
        (
            {"job_state": "W", "Execution_Time": "Sat Nov 21 18:00:00 2026"},
            "it cannot start before Sat Nov 21 18:00:00 2026",
        ),
    ],
)
def test_a_held_or_delayed_job_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    job = parsed(**{"job_state": "H", "comment": None, **changes})
    assert (job.phase, job.reason) == ("waiting", reason)
    if "Execution_Time" in changes:
        assert job.starts_at_s == time.mktime((2026, 11, 21, 18, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("changes", "end", "code", "signal"),
    [
        ({"Exit_status": 0}, "done", 0, None),
        ({"Exit_status": 75, "substate": 93}, "failed", 75, None),
        ({"Exit_status": 271, "substate": 91}, "cancelled", None, 15),
        ({"Exit_status": 143, "substate": 91}, "cancelled", 143, None),
        ({"Exit_status": 0, "substate": 91}, "done", 0, None),
        ({"Exit_status": 271, "substate": 93}, "failed", None, 15),
        ({"Exit_status": 265, "substate": 93}, "failed", None, 9),
        ({"Exit_status": -29, "substate": 93}, "walltime", None, None),
        ({"Exit_status": -27}, "memory", None, None),
        ({"Exit_status": -20}, "node", None, None),
        ({"Exit_status": -3}, "not started", None, None),
        ({"Exit_status": -99}, "failed", None, None),
        ({"stime": None, "substate": 91}, "cancelled", None, None),
        ({"stime": None, "substate": 92}, "dropped", None, None),
    ],
)
def test_every_kind_of_end_is_recognized(
    changes: dict[str, Any], end: str, code: int | None, signal: int | None
) -> None:
    job = parsed(job_state="F", **changes)
    assert (job.phase, job.end, job.exit_code, job.signal) == ("ended", end, code, signal)


@pytest.mark.parametrize(
    ("changes", "log", "errors", "is_live"),
    [
        ({"Join_Path": "n"}, "/w/ddp.o12", "/w/ddp.e12", True),
        ({"Keep_Files": "n"}, "/w/ddp.o12", "", False),
        ({"Output_Path": "host:/w/logs/"}, "/w/logs/12.pbs-srv.OU", "", True),
        ({"Output_Path": ""}, "", "", True),
    ],
)
def test_the_path_of_the_log(changes: dict[str, Any], log: str, errors: str, is_live: bool) -> None:
    job = parsed(**changes)
    assert (job.log, job.error_log, job.log_is_live) == (log, errors, is_live)


@pytest.mark.parametrize("text", ["", "no job", "{}", "Job Id: 13.pbs-srv\n    job_state = R\n"])
def test_output_without_the_job_is_an_error(text: str) -> None:
    with pytest.raises(DdpHpcError, match="unexpected output of qstat for job 12"):
        parse_text(text, "12")


def test_wrapped_lines_of_the_text_output_are_joined() -> None:
    [job] = parse_text(PBS_TEXT, "67")
    assert (job.end, job.walltime_s, job.elapsed_s) == ("walltime", 10, 37)
    assert job.reason.startswith("Job run at Sat Nov 21 at 02:02 on (x3001c0s1b0n0")
    assert job.reason.endswith(":ngpus=4) and exceeded resource walltime")
    assert (job.work_dir, job.script) == ("/home/pbsuser/w", "/home/pbsuser/w/mpisig.sh")
    assert (job.log, job.error_log) == ("/home/pbsuser/w/ms2.o67", "/home/pbsuser/w/ms2.e67")


def test_an_array_has_one_state_for_each_task_that_has_started_and_each_range_of_others(
    programs: Programs,
) -> None:
    programs.answers("qstat", qstat_text(pbs_array()))
    found = read_jobs("12[]")
    assert programs.called() == ["qstat -xtf 12[]"]
    assert [(one.job_id, one.phase, one.end, one.exit_code, one.num_tasks) for one in found] == [
        ("12[1].pbs-srv", "ended", "done", 0, 1),
        ("12[2].pbs-srv", "ended", "failed", 3, 1),
        ("12[3].pbs-srv", "ended", "cancelled", None, 1),
        ("12[4].pbs-srv", "running", "", None, 1),
        ("12[5].pbs-srv", "ended", "unknown", None, 1),
        ("12[6-7].pbs-srv", "waiting", "", None, 2),
        ("12[8].pbs-srv", "ended", "unknown", None, 1),
        ("12[9].pbs-srv", "waiting", "", None, 1),
    ]
    assert {(one.array, one.script, one.name) for one in found} == {("12[].pbs-srv", "/w/a.sh", "ddp")}
    assert [one.log for one in found][:5] == [f"/w/a.sh.o12.{index}" for index in range(1, 6)]
    assert {one.reason for one in found if one.phase == "waiting"} == {""}
    refusal = r"12\[\] is a job array; give the ID of one of its jobs, such as '12\[1\]\.pbs-srv'"
    with pytest.raises(RequestError, match=refusal):
        read_job("12[]")


def test_an_array_can_be_given_by_its_number(programs: Programs, tmp_path: Any) -> None:
    (tmp_path / "array").write_text(
        "Job Id: 12[].pbs-srv\n    Job_Name = a.sh\n    job_state = B\n    array = True\n"
        "    array_indices_remaining = 3-4\n    Submit_arguments = -J 1-4 a.sh\n\n"
        "Job Id: 12[1].pbs-srv\n    Job_Name = a.sh\n    job_state = X\n    Exit_status = 3\n"
        "    array_index = 1\n    comment = Job run at noon and\n\t failed\n\n"
        "Job Id: 12[2].pbs-srv\n    job_state = X\n    comment = Subjob finished\n\n"
    )
    programs.program(
        "qstat",
        "if [[ $* != *'[]'* ]]; then echo 'qstat: Unknown Job Id 12.pbs-srv' >&2; exit 153; fi\n"
        f"cat {tmp_path}/array",
    )
    found = [(one.job_id, one.end) for one in read_jobs("12.pbs-srv")]
    assert found == [("12[1].pbs-srv", "failed"), ("12[2].pbs-srv", "unknown"), ("12[3-4].pbs-srv", "")]
    assert programs.called() == ["qstat -xf 12.pbs-srv", "qstat -xtf 12[].pbs-srv"]


@pytest.mark.parametrize(
    ("comment", "end"),
    [("Subjob finished", "unknown"), ("Subjob failed", "failed"), ("Subjob terminated", "cancelled")],
)
def test_a_task_without_a_record_does_not_end_like_another_task(comment: str, end: str) -> None:
    """qstat prints the exit code of the task of the array that ended last."""
    [job] = pbs(**{**NO_RECORD, "job_state": "X", "comment": comment}).values()
    [task] = parse_text(qstat_text({"12[2].pbs-srv": job}), "12[2]")
    assert (task.phase, task.end, task.exit_code, task.log) == ("ended", end, None, "/w/a.sh.o12.2")


@pytest.mark.parametrize(
    ("tasks", "operand"),
    [
        ((), "12[]"),
        (("12[4].pbs-srv", "12[6-7].pbs-srv", "12[9].pbs-srv"), "12[4-9].pbs-srv"),
        (("12[3-9:2]",), "12[3-9]"),
        (("12[4].pbs-srv",), "12[4].pbs-srv"),
    ],
)
def test_an_array_is_cancelled_with_one_operand(
    programs: Programs, tasks: tuple[str, ...], operand: str
) -> None:
    """`qdel 12[]` deletes the records of ended tasks, and several operands leave tasks in the queue."""
    programs.answers("qdel", "")
    assert cancel("12[]", tasks) == ""
    assert programs.called() == [f"qdel {operand}"]
