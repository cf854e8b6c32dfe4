"""The progress of a run over its jobs, and the page that shows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, write_state
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.queue.cost_text import attempts_table, cost_lines
from ddp_hpc.queue.run_cost import run_cost
from ddp_hpc.queue.run_curve import run_curve
from ddp_hpc.queue.run_page import page


def report(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `ddp-hpc report`."""
    command = [sys.executable, "-m", "ddp_hpc", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose first attempt lost steps 11 to 20, and whose second one waited for data."""

    def line(at_s: float, moment: Moment, attempt: str, **details: object) -> None:
        note(tmp_path, attempt, moment, at_s=at_s, **details)

    def steps(at_s: float, step: int, attempt: str, loss: float | None, data_s: float = 0.0) -> None:
        line(at_s, Moment.STEPS, attempt, step=step, loss=loss, num_steps=10, steps_s=20, data_s=data_s)

    line(1000, Moment.JOB_BEGAN, "1 7", num_nodes=2)
    line(1001, Moment.LAUNCHER_STARTED, "1 7", num_used=None, records_steps=True, checks_s=0)
    line(1010, Moment.STEPS_BEGAN, "1 7", step=0, restore_s=0)
    steps(1030, 10, "1 7", 4.0)
    line(1031, Moment.SAVED, "1 7", step=10, save_s=1, data_s=0)
    steps(1051, 20, "1 7", 3.0)
    end = {"cause": "lost rank", "reason": "rank 3 on <n4> was lost", "silent_s": 0}
    line(1053, Moment.ATTEMPT_ENDED, "1 7", **end)
    line(1054, Moment.LAUNCHER_ENDED, "1 7", checkpoint_s=None)
    line(1060, Moment.LAUNCHER_STARTED, "2 7", num_used=None, records_steps=True, checks_s=0)
    line(1070, Moment.STEPS_BEGAN, "2 7", step=10, restore_s=2)
    steps(1090, 20, "2 7", None, data_s=5)
    line(1090, Moment.STEPS_ENDED, "2 7", step=20, save_s=0, data_s=5)
    line(1092, Moment.JOB_ENDED, "2 7")
    write_state(tmp_path, RunState(State.DONE, 20, "training complete"))
    return tmp_path


def test_the_curve_has_the_loss_the_speed_and_the_waits_for_data(run_dir: Path) -> None:
    first, lost, last = run_curve(run_dir)
    assert (first.attempt, first.step, first.loss, first.steps_per_s, first.is_kept) == (
        "1",
        10,
        4.0,
        0.5,
        True,
    )
    assert (lost.step, lost.is_kept) == (20, False)
    assert (last.attempt, last.step, last.loss, last.data_share, last.is_kept) == ("2", 20, None, 0.25, True)


def test_without_metrics_the_snapshots_show_the_speed(tmp_path: Path) -> None:
    """10 steps between the snapshots took 22 s, of which 2 s were spent on the second snapshot."""
    note(tmp_path, "1 7", Moment.JOB_BEGAN, at_s=0, num_nodes=1)
    note(tmp_path, "1 7", Moment.LAUNCHER_STARTED, at_s=0, num_used=None, records_steps=True, checks_s=0)
    note(tmp_path, "1 7", Moment.STEPS_BEGAN, at_s=10, step=0, restore_s=0)
    note(tmp_path, "1 7", Moment.SAVED, at_s=30, step=10, save_s=0, data_s=0)
    note(tmp_path, "1 7", Moment.SAVED, at_s=52, step=20, save_s=2, data_s=4)
    assert [(point.steps_per_s, point.loss) for point in run_curve(tmp_path)] == [(0.5, None), (0.5, None)]
    assert [point.data_share for point in run_curve(tmp_path)] == [0.0, 0.2]


def test_the_text_has_the_last_step_and_the_speed_of_each_attempt(run_dir: Path) -> None:
    cost = run_cost(run_dir, is_running=False)
    assert cost is not None
    table = "\n".join(cost_lines(cost, run_curve(run_dir))).split("\n\n")[1].splitlines()
    assert [line.split()[-4:] for line in table] == [
        ["for", "data", "last", "loss"],
        ["0.5", "0", "%", "3"],
        ["0.5", "25", "%", "-"],
    ]


def figure_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])["life"]


def test_the_picture_has_the_losses_and_what_the_nodes_did(run_dir: Path) -> None:
    cost, curve = run_cost(run_dir, is_running=False), run_curve(run_dir)
    assert cost is not None
    html = page(run_dir, RunState(State.DONE, 20, ""), cost, curve)
    figure = figure_of(html)
    drawn = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    assert {name: list(zip(trace["base"], trace["x"], strict=True)) for name, trace in drawn.items()} == {
        "start": [(0.0, 10.0)],
        "useful steps": [(10.0, 21.0), (70.0, 20.0)],
        "steps repeated": [(31.0, 22.0)],
        "detection": [(53.0, 1.0)],
        "restarts": [(54.0, 16.0)],
        "after the end": [(90.0, 2.0)],
    }
    assert figure["layout"]["xaxis"]["title"]["text"] == "seconds since the start of the first job"
    kept, lost = [trace for trace in figure["data"] if trace["name"] == "loss"]
    assert (kept["x"], kept["y"]) == ([30.0, None, 90.0], [4.0, None, None])
    assert (lost["x"], lost["y"]) == ([51.0], [3.0])
    assert "rank 3 on &lt;n4&gt; was lost" in html
    assert "<n4>" not in html


@pytest.mark.parametrize(
    ("losses", "scale"), [((4.0, 0.01), "log"), ((4.0, 0.1), "linear"), ((4.0, 0.0), "linear")]
)
def test_a_loss_that_becomes_very_small_has_a_logarithmic_axis(
    losses: tuple[float, float], scale: str, run_dir: Path
) -> None:
    cost, curve = run_cost(run_dir, is_running=False), run_curve(run_dir)
    assert cost is not None
    points = [replace(point, loss=loss) for point, loss in zip(curve, losses, strict=False)]
    assert figure_of(page(run_dir, None, cost, points))["layout"]["yaxis"]["type"] == scale


def test_the_command_writes_the_page_and_the_numbers(run_dir: Path, tmp_path: Path) -> None:
    ended = report(run_dir, "-o", tmp_path / "run.html", "--json", tmp_path / "n.json")
    assert ended.returncode == 0, ended.stderr
    assert "run.html: the report on 2 attempts" in ended.stderr
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert [point["loss"] for point in numbers["progress"]] == [4.0, 3.0, None]
    assert numbers["cost"]["attempts"][0]["spans"][0] == {
        "category": "start", "from_s": 1000, "until_s": 1010, "parts_s": {"node_checks": 0.0, "restore": 0.0},
    }  # fmt: skip


def test_a_run_whose_only_start_was_refused_has_a_report(tmp_path: Path) -> None:
    note(tmp_path, "1 7", Moment.JOB_BEGAN, at_s=0, num_nodes=1)
    note(tmp_path, "1 7", Moment.JOB_ENDED, at_s=5)
    ended = report(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "total" in ended.stdout


def test_the_oldest_cost_of_a_long_run_counts(tmp_path: Path) -> None:
    """With more than 4 MiB of losses."""
    note(tmp_path, "1 7", Moment.JOB_BEGAN, at_s=0, num_nodes=1)
    line = {
        "at_s": 10,
        "attempt": "1 7",
        "moment": "steps",
        "step": 1,
        "loss": 1.0,
        "num_steps": 1,
        "steps_s": 1,
    }
    with (tmp_path / "timeline").open("a") as file:
        file.write(40_000 * (json.dumps(line | {"data_s": 0}) + "\n"))
    note(tmp_path, "1 7", Moment.JOB_ENDED, at_s=3600)
    cost = run_cost(tmp_path, is_running=False)
    assert cost is not None
    assert cost.total_node_hours == 1


def test_a_run_that_began_anew_has_two_first_attempts(run_dir: Path) -> None:
    """Each has its own steps."""
    details: dict[str, object] = {"num_used": None, "records_steps": True, "checks_s": 0}
    note(run_dir, "1 8", Moment.JOB_BEGAN, at_s=2000, num_nodes=2)
    note(run_dir, "1 8", Moment.LAUNCHER_STARTED, at_s=2001, **details)
    note(run_dir, "1 8", Moment.STEPS_BEGAN, at_s=2002, step=0, restore_s=0)
    done: dict[str, object] = {"loss": 9.0, "num_steps": 5, "steps_s": 5, "data_s": 0}
    note(run_dir, "1 8", Moment.STEPS, at_s=2007, step=5, **done)
    cost = run_cost(run_dir, is_running=False)
    assert cost is not None
    rows = attempts_table(cost, run_curve(run_dir)).rows
    assert [(row["attempt"], row["job_id"], row["step"], row["loss"]) for row in rows] == [
        ("1", "7", 20, 3.0), ("2", "7", 20, None), ("1", "8", 5, 9.0),
    ]  # fmt: skip
