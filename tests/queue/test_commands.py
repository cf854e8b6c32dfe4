"""Commands of a scheduler that are slow, missing, busy, or print invalid output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.run_command import Answer, NoAnswerError, ask, need, submit
from tests.queue.conftest import Programs

BUSY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def fails_first(programs: Programs, name: str, num_failures: int, message: str) -> None:
    """Writes a program that fails `num_failures` times with a message, and then prints `well`."""
    fails = f'if ((${{#calls[@]}} <= {num_failures})); then echo "{message}" >&2; exit 1; fi'
    programs.program(name, f'mapfile -t calls <"{programs.calls}"; {fails}; echo well')


def test_a_program_that_does_not_answer_is_killed_with_its_children_at_the_time_limit(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "QUESTION_LIMIT_S", 0.3)
    programs.program("qstat", f'sleep 60 & echo $! >"{tmp_path}/child"; wait')
    start_s = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"qstat did not answer within 0\.3 s"):
        ask("qstat")
    assert time.monotonic() - start_s < 5
    child = (tmp_path / "child").read_text().strip()
    end_s = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not is_alive(child)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_child_that_keeps_the_output_open_is_not_awaited(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's wrapper may log in the background. Waiting for it would lose the ID of the queued job."""
    monkeypatch.setattr(commands, "DRAIN_S", 0.1)
    programs.program("qsub", "echo 77; sleep 20 & exit 0")
    start_s = time.monotonic()
    assert submit("qsub") == Answer(0, "77\n", "")
    assert time.monotonic() - start_s < 5


def test_endless_output_is_an_error(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_BYTES", 100_000)
    programs.program("qstat", "exec yes")
    with pytest.raises(NoAnswerError, match="more than 100000 bytes"):
        ask("qstat")


@pytest.mark.parametrize(
    "message",
    [
        BUSY,
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "Connection refused\nqstat: cannot connect to server pbs-srv (errno=15010)",
    ],
)
def test_a_query_is_repeated_while_the_server_is_too_busy(programs: Programs, message: str) -> None:
    fails_first(programs, "scontrol", 2, message)
    assert ask("scontrol", "show").out == "well\n"
    assert len(programs.called("scontrol")) == 3


def test_an_unreachable_server_is_reported_after_three_attempts(programs: Programs) -> None:
    programs.answers("scontrol", "", code=1, err=BUSY)
    with pytest.raises(NoAnswerError, match="scontrol failed 3 times: slurm_load_jobs error: Unable"):
        ask("scontrol")
    assert len(programs.called("scontrol")) == 3


def test_a_submission_is_repeated_only_if_it_cannot_have_reached_the_server(programs: Programs) -> None:
    fails_first(programs, "sbatch", 1, BUSY)
    assert submit("sbatch", "job.sh").out == "well\n"
    programs.answers("qsub", "", code=1, err=LOST)
    with pytest.raises(NoAnswerError, match="It is unknown whether the request was accepted"):
        submit("qsub", "job.sh")
    assert len(programs.called("qsub")) == 1, "a second submission might queue a second job"


@pytest.mark.parametrize(
    "refusal",
    ["too many jobs in partition, try again later", "your certificate timed out", "job script: end of file"],
)
def test_a_refusal_whose_text_resembles_a_lost_answer_is_a_refusal(programs: Programs, refusal: str) -> None:
    programs.answers("qsub", "", code=1, err=f"{refusal}\n")
    assert submit("qsub", "job.sh").said == refusal


def test_a_missing_program_is_named_with_a_remedy(programs: Programs) -> None:
    with pytest.raises(RequestError, match=r"qsub was not found on the PATH; why. Run this on"):
        need("qsub", "why")
    with pytest.raises(NoAnswerError, match="cannot start qsub"):
        ask("qsub")


def test_the_users_time_format_is_not_passed_to_slurm(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    programs.program("scontrol", 'echo "${SLURM_TIME_FORMAT:-none}"')
    assert ask("scontrol").out == "none\n"


def test_a_request_that_may_have_reached_the_controller_is_not_sent_again(programs: Programs) -> None:
    programs.answers("sbatch", "", code=1, err=BUSY.replace("connect failure", "receive failure"))
    with pytest.raises(NoAnswerError, match="It is unknown whether the request was accepted"):
        submit("sbatch", "job.sh")
    assert len(programs.called("sbatch")) == 1
