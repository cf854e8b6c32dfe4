"""The end of the allocation: its sources, their order, and the time limit of queries."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers import deadline
from ddp_hpc.schedulers.deadline import Deadline, current_end_s, find_deadline, kill_delay_s

Command = Callable[[str, str], Path]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts an executable on a minimal PATH; returns the file with its arguments."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(name: str, body: str) -> Path:
        asked = tmp_path / f"{name}.asked"
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$*" >>{asked}\n{body}\n')
        path.chmod(0o755)
        return asked

    return put


def _in_s(found: Deadline | None) -> float:
    assert found is not None
    return found.at_s - time.time()


def test_the_job_scripts_deadline_precedes_slurms_and_both_precede_a_query(command: Command) -> None:
    asked = command("squeue", "echo 10:00")
    environ = {"DDP_HPC_DEADLINE": "2000000000.5", "SLURM_JOB_END_TIME": "1900000000", "SLURM_JOB_ID": "7"}
    assert find_deadline(environ) == Deadline(2000000000.5, "DDP_HPC_DEADLINE")
    environ["DDP_HPC_DEADLINE"] = ""
    assert find_deadline(environ) == Deadline(1900000000.0, "SLURM_JOB_END_TIME")
    assert not asked.exists()
    del environ["SLURM_JOB_END_TIME"]
    assert _in_s(find_deadline(environ)) == pytest.approx(600, abs=5)


def test_the_scheduler_is_asked_again_only_for_a_deadline_that_it_has_reported(command: Command) -> None:
    asked = command("squeue", "echo 10:00")
    environ = {"DDP_HPC_DEADLINE": "1900000000", "SLURM_JOB_ID": "7"}
    assert current_end_s(environ) is None  # the user has set it
    assert not asked.exists()
    assert current_end_s({**environ, "DDP_HPC_DEADLINE_SOURCE": "slurm"}) == pytest.approx(
        time.time() + 600, abs=5
    )
    assert current_end_s({"DDP_HPC_DEADLINE_SOURCE": "slurm"}) is None  # outside of a job
    command("squeue", "exit 1")
    assert current_end_s({"SLURM_JOB_ID": "7"}) is None


def test_there_is_no_deadline_outside_of_a_job() -> None:
    assert find_deadline({}) is None
    assert kill_delay_s({}) is None


@pytest.mark.parametrize("text", ["abc", "-5", "nan", "1e9", "12:00:00", "2026-11-21T10:00:00", "9" * 13])
@pytest.mark.parametrize("name", ["DDP_HPC_DEADLINE", "SLURM_JOB_END_TIME"])
def test_an_invalid_time_is_refused_with_the_needed_format(name: str, text: str) -> None:
    with pytest.raises(
        RequestError, match=f"{name} must be a time in seconds since the Unix epoch.* date \\+%s"
    ):
        find_deadline({name: text})


@pytest.mark.parametrize(
    ("printed", "left_s"),
    [("1-02:03:04", 93784), ("2:03:04", 7384), ("59:30", 3570), ("0:05", 5), ("  1:00:00  ", 3600)],
)
def test_the_remaining_time_is_read_from_squeue(command: Command, printed: str, left_s: int) -> None:
    asked = command("squeue", f"echo '{printed}'")
    found = find_deadline({"SLURM_JOB_ID": "12"})
    assert _in_s(found) == pytest.approx(left_s, abs=5)
    assert found is not None
    assert found.source == "squeue"
    assert asked.read_text() == "--noheader --jobs=12 --format=%L\n"


@pytest.mark.parametrize(
    "body",
    [
        *("echo UNLIMITED", "echo INVALID", "echo NOT_SET", "echo 0:00", "echo; echo", "true"),
        "echo 10:00; echo 20:00",
        "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1",
        "echo 10:00; exit 1",
        "printf '\\377\\376'",
    ],
)
def test_squeue_without_an_end_time_is_not_an_error(command: Command, body: str) -> None:
    asked = command("squeue", body)
    assert find_deadline({"SLURM_JOB_ID": "12"}) is None
    assert asked.exists()


def _qstat_text(start_s: float, walltime: str = "01:30:00") -> str:
    """The output of OpenPBS 23, shortened."""
    stime = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(start_s))
    return f"Job Id: 12.pbs-srv\n    Resource_List.walltime = {walltime}\n    stime = {stime}\n"


def test_start_and_walltime_are_read_from_qstat(command: Command) -> None:
    asked = command("qstat", f"cat <<'END'\n{_qstat_text(time.time() - 600)}END")
    found = find_deadline({"PBS_JOBID": "12.pbs-srv"})
    assert _in_s(found) == pytest.approx(5400 - 600, abs=5)
    assert found is not None
    assert found.source == "qstat"
    assert asked.read_text() == "-f 12.pbs-srv\n"


@pytest.mark.parametrize(
    "printed",
    ["", "Job Id: 12", "    stime = soon\n    Resource_List.walltime = 01:00:00", _qstat_text(1e9, "None")],
)
def test_qstat_without_an_end_time_is_not_an_error(command: Command, printed: str) -> None:
    asked = command("qstat", f"echo '{printed}'")
    assert find_deadline({"PBS_JOBID": "12.pbs-srv"}) is None
    assert asked.exists()


@pytest.mark.parametrize(("name", "variable"), [("squeue", "SLURM_JOB_ID"), ("qstat", "PBS_JOBID")])
def test_a_scheduler_that_does_not_answer_is_abandoned_after_the_time_limit(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    asked = command(name, "sleep 5; echo 10:00")  # a child that keeps the pipe open
    monkeypatch.setattr(deadline, "_ASK_LIMIT_S", 0.2)
    began_s = time.monotonic()
    assert find_deadline({variable: "12"}) is None
    assert time.monotonic() - began_s < 3
    assert asked.exists()


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_JOBID"])
def test_missing_scheduler_commands_are_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_deadline({variable: "12"}) is None


def test_the_kill_delay_is_the_sites_or_the_schedulers_default() -> None:
    assert kill_delay_s({"PBS_JOBID": "1"}) == 10.0
    assert kill_delay_s({"SLURM_JOB_ID": "1"}) == 30.0
    assert kill_delay_s({"SLURM_JOB_ID": "1", "DDP_HPC_KILL_DELAY_S": "4.5"}) == 4.5
    assert kill_delay_s({"DDP_HPC_KILL_DELAY_S": "0"}) == 0.0
    assert kill_delay_s({"PBS_JOBID": "1", "DDP_HPC_KILL_DELAY_S": ""}) == 10.0


@pytest.mark.parametrize("text", ["abc", "-1", "inf", "1e3", "30s", "9" * 7])
def test_a_kill_delay_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="DDP_HPC_KILL_DELAY_S must be a number of seconds"):
        kill_delay_s({"DDP_HPC_KILL_DELAY_S": text})
