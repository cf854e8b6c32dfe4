"""What a run has cost, from lines of `timeline` whose times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.queue.cost_text import cost_line
from ddp_hpc.queue.run_cost import CATEGORIES, RunCost, run_cost
from tests.queue.conftest import Programs, Run
from tests.queue.test_ledger import make_run

LOST = {"cause": "lost rank", "reason": "rank 3 on n4 was lost"}
DONE = {"cause": "done", "reason": "training complete"}
Note = Callable[..., None]


@pytest.fixture
def line(tmp_path: Path) -> Note:
    """Appends a line: the time, the moment, and its details."""

    def append(at_s: float, moment: Moment, attempt: str = "1 7", **details: object) -> None:
        note(tmp_path, attempt, moment, at_s=at_s, **details)

    return append


def job(line: Note, at_s: float, attempt: str = "1 7", num_nodes: int = 1) -> None:
    line(at_s, Moment.JOB_BEGAN, attempt, num_nodes=num_nodes)


def launch(
    line: Note,
    at_s: float,
    attempt: str = "1 7",
    *,
    num_used: int | None = None,
    records_steps: bool = True,
    checks_s: float = 0.0,
) -> None:
    details = {"num_used": num_used, "records_steps": records_steps, "checks_s": checks_s}
    line(at_s, Moment.LAUNCHER_STARTED, attempt, **details)


def steps(line: Note, at_s: float, attempt: str = "1 7", step: int = 0, restore_s: float = 0.0) -> None:
    line(at_s, Moment.STEPS_BEGAN, attempt, step=step, restore_s=restore_s)


def saved(
    line: Note, at_s: float, step: int, attempt: str = "1 7", save_s: float = 0.0, data_s: float = 0.0
) -> None:
    line(at_s, Moment.SAVED, attempt, step=step, save_s=save_s, data_s=data_s)


def complete(line: Note, at_s: float, step: int, attempt: str = "1 7", save_s: float = 0.0) -> None:
    line(at_s, Moment.STEPS_ENDED, attempt, step=step, save_s=save_s, data_s=0.0)
    line(at_s, Moment.ATTEMPT_ENDED, attempt, silent_s=0.0, **DONE)


def lost(line: Note, at_s: float, attempt: str = "1 7", silent_s: float = 0.0) -> None:
    line(at_s, Moment.ATTEMPT_ENDED, attempt, silent_s=silent_s, **LOST)


def left(line: Note, at_s: float, attempt: str = "1 7", checkpoint_s: float | None = None) -> None:
    line(at_s, Moment.LAUNCHER_ENDED, attempt, checkpoint_s=checkpoint_s)


def cost_of(run_dir: Path, *, is_running: bool = False) -> RunCost:
    cost = run_cost(run_dir, is_running=is_running)
    assert cost is not None
    assert [*cost.node_hours] == [*CATEGORIES]
    return cost


def seconds(node_hours: dict[str, float]) -> dict[str, float]:
    """The node-seconds of the categories that have any."""
    return {name: round(hours * 3600, 3) for name, hours in node_hours.items() if hours}


def test_a_restart_on_a_spare_node(line: Note, tmp_path: Path) -> None:
    """Node-seconds: the ranks use 2 of 3 nodes, so each second counts twice, and once as idle."""
    job(line, 1000, num_nodes=3)
    launch(line, 1002, num_used=2)
    steps(line, 1010)
    saved(line, 1030, 20, save_s=2, data_s=1)
    lost(line, 1050, silent_s=5)
    left(line, 1052)
    launch(line, 1056, "2 7", num_used=2, checks_s=3.0)
    steps(line, 1068, "2 7", step=20, restore_s=4)
    complete(line, 1100, 50, "2 7", save_s=1.5)
    left(line, 1101, "2 7")
    line(1103, Moment.JOB_ENDED)
    cost = cost_of(tmp_path)
    first, second = cost.attempts
    assert (first.attempt, first.job_id, first.num_nodes, first.wall_s) == (1, "7", 3, 52)
    assert (first.reason, second.reason) == ("rank 3 on n4 was lost", "training complete")
    assert seconds(first.node_hours) == {
        "useful_steps": 2 * (1030 - 1010 - 2 - 1),
        "start": 2 * 10,
        "saves": 2 * 2,
        "data": 2 * 1,
        "repeated_steps": 2 * (1045 - 1030),
        "detection": 2 * (1052 - 1045),
        "idle_nodes": 52,
    }
    assert seconds(second.node_hours) == {
        "useful_steps": 2 * (1100 - 1068 - 1.5),
        "restarts": 2 * (1068 - 1052 - 3 - 4),
        "restore": 2 * 4,
        "node_checks": 2 * 3,
        "saves": 2 * 1.5,
        "after_the_end": 2 * 3,
        "idle_nodes": 51,
    }
    assert sum(cost.node_hours.values()) * 3600 == pytest.approx(3 * 103)
    assert cost.total_node_hours * 3600 == pytest.approx(3 * 103)
    assert cost.useful_share == pytest.approx(2 * (17 + 30.5) / 309)
    assert cost_line(cost) == "5.15 node-minutes, 31 % useful; 1 restart: rank 3 on n4 was lost"


def test_a_snapshot_from_which_the_run_did_not_resume_was_lost(line: Note, tmp_path: Path) -> None:
    """The newest snapshot was damaged, so the next job resumed from the one before."""
    job(line, 0)
    launch(line, 0)
    steps(line, 0)
    saved(line, 10, 10)
    saved(line, 20, 20)
    complete(line, 30, 30)
    left(line, 31)
    line(31, Moment.JOB_ENDED)
    job(line, 100, "2 8")
    launch(line, 101, "2 8")
    steps(line, 102, "2 8", step=10)
    complete(line, 120, 30, "2 8")
    left(line, 120, "2 8")
    line(120, Moment.JOB_ENDED, "2 8")
    first, second = cost_of(tmp_path).attempts
    assert seconds(first.node_hours) == {"useful_steps": 10, "repeated_steps": 20, "detection": 1}
    assert seconds(second.node_hours) == {"start": 2, "useful_steps": 18}


def test_ranks_that_torchrun_started_again_in_the_same_attempt(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    launch(line, 1)
    steps(line, 5)
    saved(line, 15, 10)
    lost(line, 25, silent_s=2)
    steps(line, 35, step=10, restore_s=1)
    complete(line, 50, 30)
    left(line, 51)
    line(52, Moment.JOB_ENDED)
    cost = cost_of(tmp_path)
    assert seconds(cost.node_hours) == {
        "start": 5,
        "useful_steps": 10 + 15,
        "repeated_steps": 8,
        "detection": 2,
        "restarts": 9,
        "restore": 1,
        "after_the_end": 2,
    }
    assert cost.restarts == ("rank 3 on n4 was lost",)


def test_a_program_that_records_no_steps_is_useful_until_its_last_checkpoint(
    line: Note, tmp_path: Path
) -> None:
    job(line, 0)
    launch(line, 1, records_steps=False)
    line(3, Moment.PROGRAM_BEGAN)
    lost(line, 50)
    left(line, 54, checkpoint_s=40)
    launch(line, 55, "2 7", records_steps=False)
    left(line, 90, "2 7")
    line(90, Moment.ATTEMPT_ENDED, "2 7", silent_s=0.0, **DONE)
    line(92, Moment.JOB_ENDED)
    first, second = cost_of(tmp_path).attempts
    assert seconds(first.node_hours) == {
        "start": 3,
        "useful_steps": 37,
        "repeated_steps": 10,
        "detection": 4,
    }
    assert seconds(second.node_hours) == {"restarts": 1, "useful_steps": 35, "after_the_end": 2}


def test_ranks_that_failed_before_their_first_step_are_a_start(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    launch(line, 1)
    lost(line, 20, silent_s=4)
    left(line, 21)
    line(23, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 16, "detection": 5, "after_the_end": 2}


def test_a_job_whose_launcher_could_not_be_started_is_a_start(line: Note, tmp_path: Path) -> None:
    job(line, 0, num_nodes=2)
    line(3, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 6}


def test_the_steps_of_a_running_job_are_useful_until_now(
    line: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(line, 0)
    launch(line, 1)
    steps(line, 10)
    saved(line, 20, 5, save_s=2)
    monkeypatch.setattr("time.time", lambda: 100.0)
    cost = cost_of(tmp_path, is_running=True)
    assert seconds(cost.node_hours) == {"start": 10, "useful_steps": 88, "saves": 2}
    assert cost.attempts[0].reason == ""


def test_a_job_that_was_killed_counts_until_its_last_line(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    launch(line, 1)
    steps(line, 10)
    saved(line, 20, 5)
    saved(line, 30, 10)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 10, "useful_steps": 20}


def test_the_end_of_a_launcher_that_is_missing_is_unknown(line: Note, tmp_path: Path) -> None:
    """The disk was full, for example."""
    job(line, 0)
    launch(line, 1)
    steps(line, 10)
    saved(line, 20, 5)
    line(50, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 10, "useful_steps": 10, "unknown": 30}


def test_a_snapshot_after_the_last_answer_of_a_node_is_kept(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    launch(line, 1)
    steps(line, 10)
    saved(line, 30, 20)
    lost(line, 50, silent_s=22)
    left(line, 50)
    line(50, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 10, "useful_steps": 20, "detection": 20}


def test_clocks_that_differ_make_no_time_negative(line: Note, tmp_path: Path) -> None:
    job(line, 100)
    launch(line, 101)
    steps(line, 99)
    saved(line, 200, 5, save_s=500)
    lost(line, 150)
    left(line, 160)
    line(161, Moment.JOB_ENDED)
    cost = cost_of(tmp_path)
    assert min(cost.node_hours.values()) >= 0
    assert sum(cost.node_hours.values()) * 3600 == pytest.approx(61)


def test_lines_of_ranks_that_outlived_their_attempt_do_not_count(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    launch(line, 1)
    left(line, 10)
    launch(line, 11, "2 7")
    steps(line, 15, "2 7", step=20)
    saved(line, 16, 99, "1 7")
    complete(line, 30, 40, "2 7")
    left(line, 30, "2 7")
    line(30, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).attempts[1].node_hours) == {"restarts": 5, "useful_steps": 15}


def test_damaged_lines_are_skipped(line: Note, tmp_path: Path) -> None:
    good = {"at_s": 5, "attempt": "1 7", "moment": "job began", "num_nodes": 2}
    damaged = [{**good, "at_s": "x"}, {**good, "num_nodes": None}, {**good, "attempt": 3}, [good], 7, None]
    texts = [*map(json.dumps, damaged), '{"at_s": NaN}', "\0", "{", "[" * 100_000]
    job(line, 0)
    with (tmp_path / "timeline").open("a") as file:
        file.write("\n".join(texts) + "\n")
    line(4, Moment.JOB_ENDED)
    assert seconds(cost_of(tmp_path).node_hours) == {"start": 4}


def test_an_old_run_has_no_cost(tmp_path: Path) -> None:
    assert run_cost(tmp_path, is_running=False) is None


def test_a_line_that_cannot_be_written_is_lost(line: Note, tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    job(line, 0)
    assert run_cost(tmp_path, is_running=False) is None


# Texts


def test_only_the_last_restarts_are_named(line: Note, tmp_path: Path) -> None:
    job(line, 0)
    for number in range(1, 7):
        key = f"{number} 7"
        launch(line, 10 * number, key)
        reason = f"rank {number} {'x' * 200}"
        line(10 * number + 5, Moment.ATTEMPT_ENDED, key, silent_s=0.0, cause="failed", reason=reason)
        left(line, 10 * number + 6, key)
    text = cost_line(cost_of(tmp_path))
    assert "0 % useful; 5 restarts: ..., rank 3 xx" in text
    assert len(text) < 400


def test_the_report_on_a_run_directory(line: Note, work: Path, programs: Programs, run: Run) -> None:
    folder = make_run(work / "runs" / "ddp", "1 7 0 1000")
    for at_s, moment, details in (
        (1000, Moment.JOB_BEGAN, {"num_nodes": 4}),
        (1600, Moment.LAUNCHER_STARTED, {"num_used": None, "records_steps": False, "checks_s": 0.0}),
        (4600, Moment.LAUNCHER_ENDED, {"checkpoint_s": None}),
        (4600, Moment.ATTEMPT_ENDED, {"silent_s": 0.0, **DONE}),
        (4600, Moment.JOB_ENDED, {}),
    ):
        note(folder, "1 7", moment, at_s=at_s, **details)
    done = run("report", str(folder), "--json", str(work / "cost.json"))
    assert (done.code, done.out.splitlines()) == (
        0,
        [
            "              node-hours  share",
            "useful steps        3.33   83 %",
            "start              0.667   17 %",
            "total                  4  100 %",
            "",
            "attempt  job  nodes      time  node-hours  useful",
            "1          7      4  01:00:00           4    83 %",
            "",
            "attempt 1 of job 7 ended: training complete",
        ],
    )
    found = json.loads((work / "cost.json").read_text())
    assert found["name"] == "report"
    assert found["cost"]["total_node_hours"] == 4
    assert found["cost"]["attempts"][0]["node_hours"]["useful_steps"] == pytest.approx(10 / 3)
    again = run("report", str(folder), "--json", str(work / "cost.json"))
    assert again.code == 0, "an earlier report is overwritten"
    assert run("report", str(folder), "--compare", str(folder)).code == 2
    programs.answers("scontrol", "", code=1, err="scontrol: error: no controller\n")
    assert run("report", str(folder)).out == done.out, "without a scheduler that answers"


def test_the_report_on_an_old_run_directory_says_what_to_do(work: Path, programs: Programs, run: Run) -> None:
    folder = make_run(work / "runs" / "ddp", "1 7 0 1000")
    done = run("report", str(folder))
    assert done.code == 2
    assert f"{folder} has no file `timeline`" in done.err
    assert "give the --trace-dir of a training" in done.err
