"""The cause of a job's end, from the scheduler's state and from logs of real launchers."""

from __future__ import annotations

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.run_outcomes import _STATES, Cause, State
from ddp_hpc.base.run_state import RunState
from ddp_hpc.queue.post_mortem import Evidence, PostMortem, advice_while_waiting, examine
from ddp_hpc.schedulers.job_state import End, JobState

BANNER = "ddp-hpc: job 12: srun --nodes=2 --ntasks=4 python -m ddp_hpc.train\n"
OOM = """\
srun: error: n2: task 1: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T16:12:29 ***
slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed
srun: error: n1: task 0: Terminated
"""
# The same job on Slurm 26.05.
OOM_26 = """\
[2026-11-26T21:58:50.203] error: Detected 1 oom_kill event in StepId=10.0. Some have been OOM Killed.
srun: error: n2: task 1: Out Of Memory
srun: Terminating StepId=10.0
[2026-11-26T21:58:50.226] error: *** STEP 10.0 ON n1 CANCELLED AT 2026-11-26T21:58:50 DUE TO TASK FAILURE ***
srun: error: n1: task 0: Terminated
srun: Force Terminated StepId=10.0
"""
OVER_MEMORY = (
    "[2026-11-26T21:58:50.203] error: StepId=45.0 exceeded memory limit (700416 > 204800), being killed\n"
)
# srun writes between the lines of a traceback of rank 1, and the job ends with the code of rank 0.
CUT_TRACEBACK = """\
Traceback (most recent call last):
srun: error: n2: task 1: Exited with exit code 1
  File "train.py", line 5, in <module>
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-26T21:50:35 ***
    raise ValueError("bad data on rank 1")
ValueError: bad data on rank 1
srun: error: n1: task 0: Terminated
srun: Force Terminated StepId=1.0
"""
CUT_TRACEBACK_26 = CUT_TRACEBACK.replace("srun: launch/slurm: _step_signal: ", "srun: ").replace(
    "slurmstepd-n1: ", "[2026-11-26T21:58:50.492] "
)
EXIT_3 = """\
hi from 0
hi from 1
srun: error: n2: task 1: Exited with exit code 3
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-21T16:12:29 ***
srun: error: n1: task 0: Terminated
"""
RANK_1 = AttemptEnd(cause=Cause.EXITED, exit_code=1, reason="rank 1 exited with code 1", rank=1, host="n2")
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: the data is odd
"""


def failed(
    log: str,
    state: RunState | None = None,
    next_job: str = "",
    recorded: AttemptEnd | None = None,
    **changes: object,
) -> PostMortem:
    """Returns the findings for a job that ended with exit code 1, or in the given state."""
    known: dict[str, object] = {"scheduler": "slurm", "end": "failed", "exit_code": 1, **changes}
    job = JobState(job_id="12", phase="ended", word="FAILED", walltime_s=3600, **known)  # type: ignore[arg-type]
    found = examine(job, Evidence(log=log, state=state, next_job=next_job, recorded=recorded))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("log", "rank", "host", "last"),
    [
        (
            "[rank 1/2 n2] error: data.h5: is damaged\n" + EXIT_3,
            1,
            "n2",
            "[rank 1/2 n2] error: data.h5: is damaged",
        ),
        (
            "[rank 0/2 n1] error: rank 1 on n2 is gone: its node says no more\n",
            1,
            "n2",
            "[rank 0/2 n1] error: rank 1 on n2 is gone: its node says no more",
        ),
        (f"[rank 1/2 n2] {TRACEBACK}more\n", 1, "n2", "ValueError: the data is odd"),
        ("[n2] error: torch is missing\n", None, "n2", "[n2] error: torch is missing"),
        (f"{TRACEBACK}{EXIT_3}", None, "", "ValueError: the data is odd"),
        (EXIT_3, None, "", EXIT_3.splitlines()[-1]),
        ("", None, "", None),
    ],
)
def test_the_first_failed_rank_is_read_from_the_log(
    log: str, rank: int | None, host: str, last: str | None
) -> None:
    found = failed(BANNER + log if log else "")
    assert (found.rank, found.host) == (rank, host)
    assert (found.lines[-1] if found.lines else None) == last


def test_errors_of_an_earlier_start_in_the_same_log_are_ignored() -> None:
    """A requeued Slurm job appends to its log, and so do ranks that torchrun restarts."""
    restart = "resuming after step 60 (epoch 1, 480 of its samples used)\n"
    assert failed(BANNER + "[rank 1/2 n2] error: lost\n" + restart + TRACEBACK).host == ""
    assert failed(BANNER + OOM + BANNER + EXIT_3).cause == "failed"
    requeued = (
        "slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-26T22:00:48 DUE TO JOB REQUEUE ***\n"
    )
    for line in (requeued, requeued.replace("slurmstepd-n1:", "[2026-11-26T21:58:49.983]")):
        assert failed(f"KeyError: 1\n{OOM}{line}{TRACEBACK}{EXIT_3}").cause == "failed"


@pytest.mark.parametrize("label", ["[rank1]: ", "1: ", "1: [rank1]: "])
def test_a_traceback_with_the_label_of_a_rank_in_each_line_is_complete(label: str) -> None:
    """torch labels the lines of tracebacks, and so does `srun --label`; ranks can write at the same time."""
    log = "".join(
        f"{label}{line}\n{label.replace('1', '0')}another line\n" for line in TRACEBACK.splitlines()
    )
    found = failed(log)
    assert found.lines == tuple(TRACEBACK.splitlines())
    assert found.rank == (1 if "rank" in label else None)


def test_the_traceback_with_the_label_of_the_failed_rank_is_shown() -> None:
    def labelled(rank: int, text: str) -> str:
        return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())

    lost = TRACEBACK.replace("the data is odd", "connection closed by peer")
    found = failed(labelled(0, lost) + labelled(1, TRACEBACK), recorded=RANK_1)
    assert (found.rank, found.lines[-2:]) == (1, ("ValueError: the data is odd", RANK_1.reason))


def test_the_middle_of_a_long_traceback_is_omitted() -> None:
    frames = "".join(f'  File "x.py", line {i}\n' for i in range(100))
    lines = failed(f"[rank 1/2 n2] Traceback (most recent call last):\n{frames}{'E' * 5000}\n").lines
    assert len(lines) == 12
    assert lines[1] == "  ..."
    assert lines[-1] == "E" * 300


@pytest.mark.parametrize("log", [CUT_TRACEBACK, CUT_TRACEBACK_26])
def test_a_traceback_is_complete_although_slurm_writes_between_its_lines(log: str) -> None:
    assert failed(log, exit_code=143).lines == (
        "Traceback (most recent call last):",
        '  File "train.py", line 5, in <module>',
        '    raise ValueError("bad data on rank 1")',
        "ValueError: bad data on rank 1",
    )


def test_the_rank_that_exec_recorded_first_is_reported() -> None:
    """The exit code of the job is that of a rank that was terminated because of this failure."""
    found = failed(TRACEBACK, recorded=RANK_1, exit_code=143)
    assert (found.what, found.rank, found.host) == ("exit code 1", 1, "n2")
    assert found.lines[-2:] == ("ValueError: the data is odd", "rank 1 exited with code 1")


def _with_record(cause: Cause, exit_code: int) -> PostMortem:
    end = AttemptEnd(cause=cause, exit_code=cause.exit_code, reason="rank 1 is stuck", rank=1, host="n2")
    return failed("", recorded=end, exit_code=exit_code)


def test_the_recorded_cause_says_what_to_do() -> None:
    found = _with_record(Cause.HANG, 1)
    assert (found.cause, found.rank, found.host) == ("hang", 1, "n2")
    assert "raise --hang-timeout" in found.remedy
    assert found.lines == ("rank 1 is stuck",)
    found = _with_record(Cause.OUT_OF_MEMORY, 78)
    assert (found.cause, found.what, found.remedy) == (
        "out of memory",
        "exit code 78",
        Cause.OUT_OF_MEMORY.advice,
    )
    assert _with_record(Cause.REFUSED, 2).remedy == "correct the request, then submit it again"


def test_the_reason_is_that_of_the_lost_rank_if_the_run_is_still_recorded_as_running() -> None:
    lost = AttemptEnd(
        cause=Cause.LOST_RANK, exit_code=1, reason="node2 does not answer", rank=1, host="node2"
    )
    running = RunState(State.RUNNING, 0, "since 2026-11-29 03:00:00")
    assert failed("", running, recorded=lost).what == "exit code 1; node2 does not answer"


def test_only_a_vague_recorded_cause_gives_way_to_the_log() -> None:
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    shown = {
        cause: failed(log, recorded=AttemptEnd(cause=cause, exit_code=1, reason="")).cause for cause in Cause
    }
    assert all(found == ("gpu memory" if cause.is_vague else cause) for cause, found in shown.items())


@pytest.mark.parametrize("state", State.ending_in("stop"))
def test_a_stop_on_purpose_is_described_by_the_state_of_the_run(state: State) -> None:
    found = failed("", RunState(state, 60, "why"), exit_code=75)
    assert (found.cause, found.what) == (state, "it saved its state and stopped on purpose; why")
    assert found.remedy == f"{state.how_to_resume()}; it resumes after step 60"


def test_what_a_user_must_do_first_stands_before_the_advice_about_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, log = RunState(State.FAILED, 60, "why"), "OSError: [Errno 28] No space left on device\n"
    remedy = failed(log, state).remedy
    row = _STATES[State.FAILED]._replace(before_resuming="look at the data")
    monkeypatch.setitem(_STATES, State.FAILED, row)
    assert failed(log, state).remedy == f"look at the data; {remedy}"


def test_no_job_resumes_a_failed_run_even_if_one_is_queued() -> None:
    state, log = RunState(State.FAILED, 60, "why"), "OSError: [Errno 28] No space left on device\n"
    assert failed(log, state, next_job="13").remedy == failed(log, state).remedy


def test_exit_code_75_without_a_checkpoint_is_a_failure() -> None:
    state = RunState(State.FAILED, 0, "no checkpoint was recorded")
    assert failed("", state, exit_code=75).what == "exit code 75; no checkpoint was recorded"
    assert failed("", state, exit_code=75).cause == "failed"


def test_a_lost_rank_is_not_reported_as_an_intended_stop() -> None:
    lost = "it lost a rank or a node after it had saved a snapshot"
    assert _with_record(Cause.LOST_RANK, 75).what == lost
    assert _with_record(Cause.STOPPED, 75).what == "it saved its state and stopped on purpose"
    assert failed("", RunState(State.RUNNING, 9, ""), exit_code=75).what == lost


@pytest.mark.parametrize(
    ("log", "end", "cause"),
    [
        (OOM, "failed", "memory"),
        (OOM_26, "failed", "memory"),
        (OVER_MEMORY, "failed", "memory"),
        ("", "memory", "memory"),
        ("=>> PBS: job killed: mem 2097152kb exceeded limit 1048576kb\n", "failed", "memory"),
        ("", "walltime", "walltime"),
        (
            "slurmstepd-n2: error: *** STEP 9.0 ON n2 CANCELLED AT 2026 DUE TO TIME LIMIT ***\n",
            "failed",
            "walltime",
        ),
        ("", "node", "node"),
        ("srun: error: Node failure on n2\n", "failed", "node"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "failed", "gpu memory"),
        ("OSError: [Errno 28] No space left on device\n", "failed", "disk"),
        (
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
            "RANK expected, but not set\n",
            "failed",
            "variables",
        ),
        ("KeyError: 'LOCAL_RANK'\n", "failed", "variables"),
        ("", "preempted", "preempted"),
        (OOM, "cancelled", "cancelled"),
        ("", "not started", "not started"),
        ("anything", "failed", "failed"),
    ],
)
def test_each_cause_has_a_remedy(log: str, end: End, cause: str) -> None:
    found = failed(log, end=end)
    assert found.cause == cause
    assert found.remedy


def test_walltime_exit_code_and_the_reason_of_the_run_are_reported() -> None:
    assert failed("", end="walltime").what == "it reached its walltime of 01:00:00"
    assert failed("", exit_code=143).what == "exit code 143 (SIGTERM)"
    assert failed("", exit_code=127).what == "exit code 127 (command not found)"
    assert failed("", exit_code=0, signal=9).what == "killed by SIGKILL"
    assert (
        failed("", end="memory", exit_code=0, signal=125).what == "it used more memory than it had requested"
    )
    assert (
        failed("", RunState(State.FAILED, 60, "loss is nan"), reason="NonZeroExitCode").what
        == "exit code 1; loss is nan"
    )


@pytest.mark.parametrize(("scheduler", "tool"), [("pbs", "pbs_tmrsh"), ("slurm", "--launcher srun")])
def test_without_ssh_the_launcher_of_the_scheduler_is_named(scheduler: str, tool: str) -> None:
    """A Hydra from PyPI on a PBS machine whose nodes have no ssh."""
    log = "ddp-hpc: job 12: mpiexec -n 2\nssh: connect to host n2 port 22: Connection refused\n"
    found = failed(log, scheduler=scheduler, exit_code=255)
    assert found.what.startswith("mpiexec could not start ranks on another node with ssh")
    assert tool in found.remedy


def test_the_remedy_depends_on_snapshots_and_on_a_successor() -> None:
    state = RunState(State.REQUEUE, 60, "rank 0 got SIGTERM")
    assert failed("", state, end="cancelled").remedy.endswith("; it resumes after step 60")
    assert failed("", state, end="walltime", next_job="13").remedy == "none: job 13 resumes the run"
    assert failed("", state, exit_code=75).cause == "requeue"
    assert failed("", state, end="cancelled", exit_code=75).cause == "cancelled"
    assert (
        failed(EXIT_3, RunState(State.RUNNING, 0, "")).remedy
        == "fix the error shown above, then submit it again"
    )
    lost = failed("srun: error: Node failure on n2\n" + EXIT_3, end="node")
    assert lost.host == "n2"
    assert "(sbatch --exclude=n2)" in lost.remedy


def test_ranks_ended_by_the_scheduler_have_not_failed() -> None:
    assert failed(TRACEBACK, end="cancelled", recorded=RANK_1).rank is None


def test_a_successful_or_running_job_has_no_post_mortem() -> None:
    job = JobState(job_id="12", scheduler="slurm", phase="ended", word="COMPLETED", end="done")
    evidence = Evidence(log=OOM)
    assert examine(job, evidence) is None
    assert examine(JobState(job_id="12", scheduler="slurm", phase="running", word="R"), evidence) is None


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("Resources", ""),
        ("Priority", ""),
        ("PartitionTimeLimit", "the job can never start"),
        (
            "Can Never Run: Insufficient amount of resource: system (aurora != polaris)",
            "the job can never start",
        ),
        ("job held, too many failed attempts to run", "check that the directory of its log exists"),
        # PBS holds and releases whole arrays only.
        ("it is held by its user", "release the job with: qrls '12[]'"),
    ],
)
def test_there_is_advice_for_waiting_jobs_that_cannot_start(reason: str, advice: str) -> None:
    job = JobState(job_id="12[3]", scheduler="pbs", phase="waiting", word="Q", reason=reason)
    assert (advice in advice_while_waiting(job)) if advice else advice_while_waiting(job) == ""
