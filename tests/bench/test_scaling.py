"""`ddp-hpc bench scaling` on this machine: the results of points, the points that are run, and errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.bench.scaling.points import Point
from ddp_hpc.bench.scaling.results import NotMeasuredError, differences, read_point, rows
from ddp_hpc.commands.bench import scaling as bench_scaling
from tests.bench.scaling_points import SETTINGS, STEPS, WARM_UP, write_mpiexec, write_point
from tests.conftest import Launch
from tests.queue.conftest import Run, nothing_set, run, work

__all__ = ["nothing_set", "run", "work"]

SHORT = ["--steps", str(STEPS), "--warm-up", str(WARM_UP), "--batch-size", "8"]


@pytest.fixture
def here(work: Path, nothing_set: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an mpiexec that writes results without training: see STEP_S."""
    monkeypatch.setenv("DDP_HPC_MPIEXEC", str(write_mpiexec(work.parent / "mpiexec")))
    monkeypatch.setenv("STEP_S", "1=0.1 2=0.125 4=0.1")
    return work


def scaling(run: Run, *args: str) -> Any:
    return run("bench", "scaling", "--profile", "local", *SHORT, *args)


# The results of a point


def test_warm_up_steps_traced_steps_and_ends_of_epochs_are_not_counted(tmp_path: Path) -> None:
    write_point(tmp_path, 2, 8, 0.5)
    found = read_point(tmp_path, Point(2, 8), SETTINGS)
    assert found is not None
    assert (found.samples, found.steps) == (16, 3)
    assert (found.step_s, found.step_p90_s) == (0.5, 1.5)
    assert found.samples_per_s == 32
    assert found.data_share == pytest.approx(0.1)


def test_communication_is_zero_on_one_rank_and_measured_by_traces_on_others(tmp_path: Path) -> None:
    for ranks, share in ((1, 0.0), (2, None)):
        write_point(tmp_path, ranks, 8, 0.5)
        found = read_point(tmp_path, Point(ranks, 8), SETTINGS)
        assert found is not None
        assert found.comm_share == share


def test_speed_up_and_efficiency_are_relative_to_the_smallest_Point(tmp_path: Path) -> None:
    """8 samples per rank in 0.1, 0.125 and 0.2 s are 80, 128 and 160 samples/s."""
    points = [Point(1, 8), Point(2, 8), Point(4, 8)]
    found = {}
    for each, step_s in zip(points, (0.1, 0.125, 0.2), strict=True):
        write_point(tmp_path / each.folder, each.ranks, 8, step_s)
        measured = read_point(tmp_path / each.folder, each, SETTINGS)
        assert measured is not None
        found[each] = measured
    weak = rows("weak", points, found)
    assert [row["samples_per_s"] for row in weak] == pytest.approx([80, 128, 160])
    assert [row["speedup"] for row in weak] == pytest.approx([1, 1.6, 2])
    assert [row["efficiency"] for row in weak] == pytest.approx([1, 0.8, 0.5])
    # Without the first point, the speed-up is 160 / 128 on twice the ranks.
    del found[points[0]]
    weak = rows("weak", points, found)
    assert [row["base_ranks"] for row in weak] == [2, 2]
    assert [row["speedup"] for row in weak] == pytest.approx([1, 1.25])
    assert [row["efficiency"] for row in weak] == pytest.approx([1, 0.625])


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (
            {"stopped": "no time left"},
            "the run stopped early (no time left); request a longer --walltime",
        ),
        ({"world": {"world_size": 1, "num_nodes": 1}}, "the run used 1 rank; "),
        ({"data": {"samples": 16}}, "the data has 16 samples, fewer than 2 ranks need for one step"),
        ({"world": None}, "is damaged"),
    ],
)
def test_the_results_of_another_run_are_rejected(
    tmp_path: Path, summary: dict[str, Any], message: str
) -> None:
    write_point(tmp_path, 2, 8, 0.5, summary)
    batch_size = 9 if "data" in summary else 8
    with pytest.raises(NotMeasuredError) as caught:
        read_point(tmp_path, Point(2, batch_size), SETTINGS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", ""),
        ("summary.json", "[]"),
        ("metrics.jsonl", '{"step": 3, "samples": 1, "data_s": 0, "step_s": 1}\n{"st'),
        ("metrics.jsonl", '{"step": 3, "samples": 1, "data_s": 0, "step_s": 1}\n'),
    ],
)
def test_damaged_or_short_files_are_rejected(tmp_path: Path, name: str, text: str) -> None:
    write_point(tmp_path, 2, 8, 0.5)
    (tmp_path / name).write_text(text)
    with pytest.raises(NotMeasuredError):
        read_point(tmp_path, Point(2, 8), SETTINGS)


def test_points_that_differ_not_only_in_ranks_are_reported(tmp_path: Path) -> None:
    found = {}
    for ranks, threads in ((1, 2), (2, 1)):
        write_point(tmp_path, ranks, 8, 0.5, {"threads": threads})
        measured = read_point(tmp_path, Point(ranks, 8), SETTINGS)
        assert measured is not None
        found[Point(ranks, 8)] = measured
    assert differences(found) == [
        "the points differ not only in ranks, but also in threads "
        "(1 rank, batches of 8: 2; 2 ranks, batches of 8: 1)"
    ]


# Points that are run on this machine


def test_weak_and_strong_scaling_share_their_smallest_Point(here: Path, run: Run) -> None:
    done = scaling(run, "--ranks", "1,2,4", "--json", "s.json")
    assert done.code == 0, done.err
    assert done.err.count("point ") == 5
    found = json.loads((here / "s.json").read_text())
    assert [(row["name"], row["ranks"], row["batch_size"], row["global_batch"]) for row in found["rows"]] == [
        ("weak", 1, 8, 8),
        ("weak", 2, 8, 16),
        ("weak", 4, 8, 32),
        ("strong", 1, 8, 8),
        ("strong", 2, 4, 8),
        ("strong", 4, 2, 8),
    ]
    assert [row["speedup"] for row in found["rows"]] == pytest.approx([1, 1.6, 4, 1, 0.8, 1])
    assert found["machine"]["device_name"] == "Some CPU"
    assert len(done.out.splitlines()) == 7


def test_the_same_command_reruns_failed_points(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_S", "1=0.1 2=fails 4=0.1")
    done = scaling(run, "--mode", "weak", "--ranks", "1,2,4")
    assert done.code == 1
    log = "scaling/ranks2-batch8/log.txt"
    why = "[rank 1/2 n2] error: the GPU is on fire; put it out; exit code 1"
    line = f"2 ranks, batches of 8: failed, {why}; log: {log}\n"
    assert line in done.err
    assert [text.split()[:2] for text in done.out.splitlines()[1:]] == [["weak", "1"], ["weak", "4"]]
    monkeypatch.setenv("STEP_S", "2=0.125")
    second = scaling(run, "--mode", "weak", "--ranks", "1,2,4")
    assert second.code == 0, second.err
    assert "2 of 3 points are already done" in second.err
    assert second.err.count("point ") == 1
    assert len(second.out.splitlines()) == 4


def test_ranks_can_be_added_to_a_directory(here: Path, run: Run) -> None:
    scaling(run, "--ranks", "1,2", "--", "--threads", "1")
    done = scaling(run, "--ranks", "1,2,4", "--", "--threads", "1")
    assert done.code == 0, done.err
    assert "3 of 5 points are already done" in done.err
    assert done.err.count("point ") == 2


def test_a_training_that_rejects_its_options_is_run_once_and_forgotten(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_S", "1=refuses 2=0.1")
    done = scaling(run, "--ranks", "1,2", "--", "--modle", "x")
    assert done.code == 2
    assert "failed, Error: No such option: --modle; exit code 2; log: " in done.err
    assert done.err.splitlines()[-1].startswith("error: ddp_hpc.train rejected the options")
    monkeypatch.setenv("STEP_S", "1=0.1 2=0.1")
    assert scaling(run, "--ranks", "1,2", "--", "--model", "linear").code == 0


def test_ranks_get_the_same_threads_at_every_Point(here: Path, run: Run) -> None:
    done = scaling(run, "--ranks", "1,2", "--dry-run")
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.out.count(f" --threads {most} ") == done.out.count("\n") == 3
    assert not list(here.iterdir())


def test_a_dry_run_prints_commands_that_bash_can_run(here: Path, run: Run, launch: Launch) -> None:
    done = scaling(run, "--ranks", "2", "--mode", "weak", "--dry-run", "--", "--model", "it's:mine")
    ended = launch(["bash", "-c", done.out], cwd=here, env={"STEP_S": "2=0.5"})
    assert ended.exit_code == 0, ended.stderr
    assert read_point(here / "scaling" / "ranks2-batch8", Point(2, 8), SETTINGS) is not None


@pytest.mark.parametrize(
    ("args", "tasks"),
    [
        (["--nodes", "1,2"], [("1", "2"), ("2", "4")]),
        ([], [("1", "1"), ("1", "2"), ("2", "4")]),
        (["--ranks", "1,4", "--ranks-per-node", "4"], [("1", "1"), ("1", "4")]),
    ],
)
def test_in_an_allocation_nodes_are_filled_one_after_the_other(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], tasks: list[tuple[str, str]]
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}
    for name, value in {**job, "PATH": f"{here}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    (here / "srun").write_text("#!/bin/sh\n")
    (here / "srun").chmod(0o755)
    done = run("bench", "scaling", "--mode", "weak", "--dry-run", *args)
    assert done.code == 0, done.err
    assert re.findall(r"--nodes=(\d+) --ntasks=(\d+) ", done.out) == tasks


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_point_and_keeps_the_others(
    here: Path, launch: Launch, signum: signal.Signals, exit_code: int
) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "bench", "scaling", "--profile", "local", *SHORT]
    env = {"DDP_HPC_MPIEXEC": os.environ["DDP_HPC_MPIEXEC"], "STEP_S": "1=0.1 2=hangs"}
    argv += ["--mode", "weak", "--ranks", "1,2"]
    before = _processes_in(here)
    process = launch.start(argv, cwd=here, env={**env, "DDP_HPC_RUN_DIR": "directory of the surrounding job"})
    while not (here / "up").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signum)
    ended = launch.end(process)
    assert ended.exit_code == exit_code
    assert "1 finished point kept; run the same command again" in ended.stderr
    assert (here / "scaling" / "ranks1-batch8" / "summary.json").exists()
    assert not list((here / "scaling" / "ranks2-batch8").iterdir())
    end_s = time.monotonic() + 30
    while _processes_in(here) - before:  # a process that was killed can end a moment later
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _processes_in(directory: Path) -> set[str]:
    """Returns the processes whose working directory is `directory`."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if (path / "cwd").readlink() == directory:
                pids.add(path.name)
    return pids


# Invalid requests


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "2,1"], "--ranks 2,1: the numbers must be positive and increasing"),
        (["--ranks", "1,two"], "whole numbers separated by commas"),
        (["--ranks", "1,99999999999999999999"], "the numbers must not exceed 10000000"),
        (["--ranks", "1,1000000"], " ranks per node cannot run on "),
        (["--ranks", "1", "--nodes", "1"], "--ranks and --nodes cannot be combined"),
        (
            ["--ranks", "1,2", "--global-batch", "3"],
            "3 samples per step cannot be divided evenly among 2 ranks for strong scaling; use",
        ),
        (["--ranks", "1", "--", "--batch-size=4"], "put it before the --"),
        (
            ["--ranks", "1", "--", "--summary", "x"],
            "--summary cannot be given, because the benchmark sets it for each point",
        ),
        (["--ranks", "1", "--", "python", "mine.py"], "'python' after -- is not an option"),
        (["--ranks", "1", "--dir", "a_file"], "cannot write to --dir a_file (File exists)"),
        (["--ranks", "1", "--json", "precious/thesis.md"], "exists and is not JSON"),
    ],
)
def test_an_invalid_request_is_one_line_and_changes_nothing(
    here: Path, run: Run, args: list[str], message: str
) -> None:
    (here / "a_file").touch()
    (here / "precious").mkdir()
    (here / "precious" / "thesis.md").write_text("my life's work")
    options = args if "--" in args else [*args, "--"]
    done = scaling(run, *options)
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.splitlines()[-1].startswith("error: ")
    assert message in done.err.splitlines()[-1]
    assert sorted(path.name for path in here.iterdir()) == ["a_file", "precious"]


def test_results_of_other_options_are_not_mixed(here: Path, run: Run) -> None:
    assert scaling(run, "--ranks", "1").code == 0
    results = here / "scaling" / "ranks1-batch8" / "summary.json"
    before = results.read_text()
    for args in (["--env", "A=B"], ["--", "--lr", "1"]):
        done = scaling(run, "--ranks", "1", *args)
        assert (done.code, done.out) == (2, "")
        assert "scaling/ranks1-batch8 has the results of: profile=local" in done.err.splitlines()[-1]
        assert results.read_text() == before


def test_a_directory_in_use_is_not_changed(here: Path, run: Run, launch: Launch) -> None:
    (here / "scaling").mkdir()
    holder = launch.start(["flock", "scaling/.scaling.lock", "bash", "-c", "touch up; sleep 30"], cwd=here)
    while not (here / "up").exists():
        assert holder.poll() is None
        time.sleep(0.01)
    done = scaling(run, "--ranks", "1")
    assert (done.code, done.out) == (2, "")
    assert "is in use by another ddp-hpc bench scaling" in done.err


# Output


def test_the_examples_in_the_help_are_valid(run: Run) -> None:
    text = run("bench", "scaling", "--help").out
    examples = [
        shlex.split(line)[3:] for line in text.splitlines() if line.startswith("    ddp-hpc bench scaling")
    ]
    assert len(examples) >= 3
    for arguments in examples:
        bench_scaling.make_context("scaling", arguments)


# A real training


@pytest.mark.soak  # half a minute; tests/slurm/test_scaling.py has the same on two nodes
def test_a_real_run_of_one_and_two_ranks(launch: Launch, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "bench", "scaling", "--profile", "local", "--mode", "weak"]
    argv += ["--ranks", "1,2", "--steps", "4", "--warm-up", "2", "--json", "s.json"]
    argv += ["--", "--model", "linear"]
    done = launch(argv, cwd=tmp_path, timeout_s=120)
    assert done.exit_code == 0, done.stderr
    one, two = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert (one["global_batch"], two["global_batch"]) == (32, 64)
    assert (one["steps"], two["steps"]) == (4, 4)
    assert (one["speedup"], one["comm_share"]) == (1, 0)
    assert two["speedup"] == pytest.approx(64 / two["step_s"] / (32 / one["step_s"]))
    assert 0 < two["comm_share"] < 1
    folder = tmp_path / "scaling" / "ranks2-batch32"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2 + 4 + 1 + 2, (
        "traced steps are not timed"
    )
    assert len(list((folder / "trace").glob("*.json.gz"))) == 2
    assert [path.name for path in (tmp_path / "data").iterdir()] == [next((tmp_path / "data").iterdir()).name]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "scaling").rglob("*.jsonl")}
    second = launch(argv, cwd=tmp_path)
    assert second.exit_code == 0, second.stderr
    assert second.stdout == done.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "scaling").rglob("*.jsonl")} == before
