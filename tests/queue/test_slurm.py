"""Valid and invalid output of scontrol and sacct."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.queue.post_mortem import Evidence, examine
from ddp_hpc.schedulers.slurm.query_and_cancel import cancel, read_job, read_jobs
from tests.queue.answers import slurm, slurm_job
from tests.queue.conftest import Programs

UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"


def test_a_running_job() -> None:
    job = slurm_job(slurm(), "12")
    assert (job.phase, job.word, job.end, job.reason) == ("running", "RUNNING", "", "")
    assert (job.name, job.owner, job.nodes) == ("ddp", "me", "n[1-2]")
    assert (job.elapsed_s, job.walltime_s, job.exit_code) == (600, 3600, None)
    assert (job.log, job.error_log, job.work_dir, job.script) == ("/w/ddp-12.out", "", "/w", "/w/job.sh")


@pytest.mark.parametrize(
    ("state", "exit_", "end", "code", "signal"),
    [
        ("COMPLETED", "0:0", "done", 0, None),
        ("FAILED", "143:0", "failed", 143, None),
        ("FAILED", "0:53", "not started", 0, 53),
        ("TIMEOUT", "0:15", "walltime", 0, 15),
        ("OUT_OF_MEMORY", "0:125", "memory", 0, 125),
        ("NODE_FAIL", "1:0", "node", 1, None),
        ("CANCELLED", "0:15", "cancelled", 0, 15),
        ("PREEMPTED", "0:0", "preempted", 0, None),
    ],
)
def test_every_kind_of_end_is_recognized(
    state: str, exit_: str, end: str, code: int, signal: int | None
) -> None:
    job = slurm_job(slurm(state=state, exit=exit_), "12")
    assert (job.phase, job.end, job.exit_code, job.signal) == ("ended", end, code, signal)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("EXPEDITING", "waiting"),
        ("UPDATE_DB", "running"),
        ("DANCING", "running"),
    ],
)
def test_a_state_of_another_slurm_version_is_shown_unchanged(state: str, phase: str) -> None:
    job = slurm_job(slurm(state=state), "12")
    assert (job.phase, job.word, job.end) == (phase, state, "")


def test_a_job_of_another_cluster_is_queried_there(programs: Programs) -> None:
    programs.answers("scontrol", slurm())
    programs.answers("scancel", "")
    job = read_job("12@cm4")
    assert job is not None
    assert (job.job_id, job.phase) == ("12@cm4", "running")
    assert cancel("12@cm4") == ""
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    programs.answers("sacct", "12|COMPLETED|0:0|60|60|me|n1|None|ddp|/w\n")
    assert read_job("12@cm4") is not None
    assert programs.called("scontrol")[0] == "scontrol --clusters=cm4 --oneliner show job 12"
    assert programs.called("scancel") == ["scancel --clusters=cm4 12"]
    [asked] = programs.called("sacct")
    assert asked.startswith("sacct --clusters=cm4 ")
    assert asked.endswith(" --jobs=12")


def test_a_job_name_that_looks_like_other_fields_is_only_a_name() -> None:
    job = slurm_job(slurm(name="x UserId=root(0) JobState=COMPLETED ExitCode=0:0"), "12")
    assert (job.owner, job.phase) == ("me", "running")
    assert slurm_job(slurm(name="two\nlines"), "12").phase == "running"


def test_a_task_of_an_array_is_a_job_and_a_whole_array_is_not(programs: Programs) -> None:
    one = slurm(job_id="13 ArrayJobId=12 ArrayTaskId=1")
    assert slurm_job(one, "12_1").job_id == "12_1"
    assert slurm_job(one, "13").job_id == "13"
    for array in (slurm(job_id="12 ArrayJobId=12 ArrayTaskId=0-2"), one + one):
        programs.answers("scontrol", array)
        with pytest.raises(RequestError, match="job 12 is a job array; give the ID of one of its jobs"):
            read_job("12")


# Slurm 22.05 and 26.05 with slurmdbd: tasks 3-7 have not started, and the controller has forgotten task 0.
SCONTROL_ARRAY = (
    slurm(job_id="12 ArrayJobId=12 ArrayTaskId=3-7:2%2", state="PENDING", reason="JobArrayTaskLimit")
    + slurm(job_id="15 ArrayJobId=12 ArrayTaskId=2", state="FAILED", reason="NonZeroExitCode", exit="1:0")
    + slurm(job_id="14 ArrayJobId=12 ArrayTaskId=1", state="CANCELLED")
)
SACCT_ARRAY = """\
12_0|COMPLETED|0:0|0|10|me|n1|None|arr|/w
12_1|CANCELLED by 0|0:0|16|10|me|n2|JobArrayTaskLimit|arr|/w
12_2|RUNNING|0:0|1|10|me|n1|JobArrayTaskLimit|arr|/w
12_[3-7:2%2]|PENDING|0:0|0|10|me|None assigned|JobArrayTaskLimit|arr|/w
"""


def test_the_tasks_of_an_array_are_known_to_scontrol_or_sacct(programs: Programs) -> None:
    programs.answers("scontrol", SCONTROL_ARRAY)
    programs.answers("sacct", SACCT_ARRAY)
    found = read_jobs("12")
    assert [(one.job_id, one.word, one.num_tasks) for one in found] == [
        ("12_0", "COMPLETED", 1),
        ("12_1", "CANCELLED", 1),
        ("12_2", "FAILED", 1),
        ("12_[3-7:2]", "PENDING", 3),
    ]
    assert [one.reason for one in found] == ["", "cancelled by root", "NonZeroExitCode", "JobArrayTaskLimit"]
    assert {one.array for one in found} == {"12"}
    programs.answers("sacct", "", code=1, err="Slurm accounting storage is disabled\n")
    assert [one.job_id for one in read_jobs("12")] == ["12_1", "12_2", "12_[3-7:2]"]
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    programs.answers("sacct", SACCT_ARRAY)
    assert [one.word for one in read_jobs("12")] == ["COMPLETED", "CANCELLED", "RUNNING", "PENDING"]


@pytest.mark.parametrize("stream", ["text", "err"])  # of Slurm 22.05 and 26.05
def test_a_task_that_the_controller_has_forgotten_is_read_from_sacct(programs: Programs, stream: str) -> None:
    programs.answers("scontrol", **{"text": "", stream: "Job 12_0 not found\n"}, code=1)
    programs.answers("sacct", SACCT_ARRAY.splitlines()[0] + "\n")
    job = read_job("12_0")
    assert job is not None
    assert (job.job_id, job.end) == ("12_0", "done")


@pytest.mark.parametrize(
    ("state", "reason", "kept"),
    [
        ("FAILED", "BeginTime", ""),
        ("COMPLETED", "JobArrayTaskLimit", ""),
        ("FAILED", "NonZeroExitCode", "NonZeroExitCode"),
        ("PENDING", "BeginTime", "BeginTime"),
    ],
)
def test_why_a_job_has_waited_is_not_why_it_ended(
    programs: Programs, state: str, reason: str, kept: str
) -> None:
    assert slurm_job(slurm(state=state, reason=reason)).reason == kept
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    programs.answers("sacct", f"12|{state}|1:0|0|10|me|n1|{reason}|ddp|/w\n")
    job = read_job("12")
    assert job is not None
    assert job.reason == kept


def test_a_job_that_never_started_before_its_deadline_has_not_reached_its_walltime() -> None:
    """Slurm 26.05 sets the exit code 0:1, which is not a signal."""
    job = slurm_job(slurm(state="DEADLINE", reason="DeadLine", exit="0:1", run_time="00:00:00"))
    found = examine(job, Evidence())
    assert found is not None
    assert (found.cause, found.what) == ("deadline", "its --deadline has passed")


def test_a_job_can_be_named_by_its_sluid(programs: Programs) -> None:
    programs.answers("scontrol", slurm())
    job = read_job("sBQ5M854NPVZ00")
    assert job is not None
    assert job.job_id == "12"
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    programs.answers("sacct", "12|COMPLETED|0:0|60|60|me|n1|None|ddp|/w\n")
    job = read_job("sBQ5M854NPVZ00")
    assert job is not None
    assert job.job_id == "12"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "for job 12: ''"),
        ("Segmentation fault\x1b[2J", ": 'Segmentation fault?[2J'"),
        ("JobId=12 JobName=", "for job 12:"),
        (slurm(job_id="13"), "for job 12: 'JobId=13"),
        (slurm(state="\x1b"), "for job 12: 'JobId=12"),
    ],
)
def test_invalid_output_is_an_error_that_quotes_it(text: str, said: str) -> None:
    with pytest.raises(DdpHpcError, match=r"scontrol") as error:
        slurm_job(text, "12")
    assert said in str(error.value)


@pytest.mark.parametrize("piece", ["A", " ", "A=", " A", "JobId=12 ", "\n"])
def test_megabytes_of_invalid_output_are_refused_quickly(piece: str) -> None:
    with pytest.raises(DdpHpcError):
        slurm_job(piece * (4_000_000 // len(piece)), "12")


def test_sacct_is_used_for_jobs_that_scontrol_no_longer_knows(programs: Programs) -> None:
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    lines = (
        "12|PREEMPTED|0:0|60|60|me|n1|None|ddp|/w\n"
        "12|CANCELLED by 4294967294|0:15|77|60|me|n[1-2]|None|a|b|/w\n"
    )
    programs.answers("sacct", lines)
    job = read_job("12")
    assert job is not None
    assert (job.end, job.reason, job.signal) == ("cancelled", "cancelled by 4294967294", 15)
    assert (job.elapsed_s, job.walltime_s, job.owner, job.nodes) == (77, 3600, "me", "n[1-2]")
    assert "--jobs=12" in programs.called("sacct")[0]


def test_the_user_who_cancelled_a_job_is_known_only_to_sacct(programs: Programs) -> None:
    programs.answers("scontrol", slurm(state="CANCELLED", exit="0:15"))
    job = read_job("12")
    assert job is not None
    assert job.reason == ""
    programs.answers("sacct", "12|CANCELLED by 0|0:15|77|60|me|n1|None|ddp|/w\n")
    job = read_job("12")
    assert job is not None
    assert (job.reason, job.log) == ("cancelled by root", "/w/ddp-12.out")


def test_a_job_unknown_to_scontrol_and_sacct_is_none(programs: Programs) -> None:
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    assert read_job("12") is None, "no sacct on the PATH"
    programs.answers("sacct", "", code=1, err="Slurm accounting storage is disabled\n")
    assert read_job("12") is None
    programs.answers("sacct", "")
    assert read_job("12") is None


def test_an_error_of_sacct_does_not_mean_that_the_job_is_unknown(programs: Programs) -> None:
    programs.answers("scontrol", "", code=1, err=UNKNOWN)
    programs.answers("sacct", "", code=1, err="sacct: error: Problem talking to the database\n")
    with pytest.raises(
        DdpHpcError, match=r"and sacct failed: sacct: error: Problem talking to the database. "
    ) as it:
        read_job("12")
    assert it.value.exit_code == 1
    programs.answers("scontrol", slurm(state="CANCELLED"))
    job = read_job("12")
    assert job is not None
    assert (job.end, job.reason) == ("cancelled", ""), "only the user who cancelled it is missing"
