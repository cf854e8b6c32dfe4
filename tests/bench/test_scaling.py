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

from ddp_hpc.bench.scaling import output as scaling_output
from ddp_hpc.bench.scaling.results import NotMeasuredError, differences, read_point, rows
from ddp_hpc.commands.bench import scaling as bench_scaling
from tests.bench.scaling_points import STEPS, WARM_UP, point, settings, write_mpiexec, write_point
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
    found = read_point(tmp_path, point(2, 8), settings())
    assert found is not None
    assert (found.samples, found.steps) == (16, 3)
    assert (found.step_s, found.step_p90_s) == (0.5, 1.5)
    assert found.samples_per_s == 32
    assert found.data_share == pytest.approx(0.1)


def test_communication_is_zero_on_one_rank_and_measured_by_traces_on_others(tmp_path: Path) -> None:
    for ranks, share in ((1, 0.0), (2, None)):
        write_point(tmp_path, ranks, 8, 0.5)
        found = read_point(tmp_path, point(ranks, 8), settings())
        assert found is not None
        assert found.comm_share == share


def test_speed_up_and_efficiency_are_relative_to_the_smallest_point(tmp_path: Path) -> None:
    """8 samples per rank in 0.1, 0.125 and 0.2 s are 80, 128 and 160 samples/s."""
    points = [point(1, 8), point(2, 8), point(4, 8)]
    found = {}
    for one, step_s in zip(points, (0.1, 0.125, 0.2), strict=True):
        write_point(tmp_path / one.folder, one.size.ranks, 8, step_s)
        measured = read_point(tmp_path / one.folder, one, settings())
        assert measured is not None
        found[one] = measured
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
        read_point(tmp_path, point(2, batch_size), settings())
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
        read_point(tmp_path, point(2, 8), settings())


def test_points_that_differ_not_only_in_ranks_are_reported(tmp_path: Path) -> None:
    found = {}
    for ranks, threads in ((1, 2), (2, 1)):
        write_point(tmp_path, ranks, 8, 0.5, {"threads": threads})
        measured = read_point(tmp_path, point(ranks, 8), settings())
        assert measured is not None
        found[point(ranks, 8)] = measured
    assert differences(found) == [
        "the points differ not only in ranks, but also in threads "
        "(1 rank, batches of 8: 2; 2 ranks, batches of 8: 1)"
    ]


# Points that are run on this machine


def test_weak_and_strong_scaling_share_their_smallest_point(here: Path, run: Run) -> None:
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
    line = f"2 ranks, batches of 8: failed, [rank 1/2 n2] error: the GPU is on fire; put it out; log: {log}"
    assert f"{line}; exit code 1\n" in done.err
    assert done.err.splitlines()[-1] == line
    assert [text.split()[:2] for text in done.out.splitlines()[1:]] == [["weak", "1"], ["weak", "4"]]
    monkeypatch.setenv("STEP_S", "2=0.125")
    second = scaling(run, "--mode", "weak", "--ranks", "1,2,4")
    assert second.code == 0, second.err
    assert "2 of 3 points are already done" in second.err
    assert second.err.count("point ") == 1
    assert len(second.out.splitlines()) == 4


def test_gathering_starts_nothing(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling(run, "--mode", "weak", "--ranks", "1,2")
    (here / "scaling" / "ranks2-batch8" / "summary.json").unlink()
    (here / "scaling" / "ranks2-batch8" / "log.txt").unlink()
    done = run("bench", "scaling", "--gather")
    assert done.code == 1
    assert done.err.splitlines()[-1] == "2 ranks, batches of 8: missing, not started"
    assert len(done.out.splitlines()) == 2, "a table of one row"


def test_ranks_can_be_added_to_a_directory(here: Path, run: Run) -> None:
    scaling(run, "--ranks", "1,2", "--", "--threads", "1")
    done = scaling(run, "--ranks", "4", "--", "--threads", "1")
    assert done.code == 0, done.err
    found = [line.split()[:4] for line in done.out.splitlines()[1:]]
    assert [(mode, ranks, batch) for mode, ranks, _, batch in found] == [
        *[("weak", "1", "8"), ("weak", "2", "8"), ("weak", "4", "8")],
        *[("strong", "1", "8"), ("strong", "2", "4"), ("strong", "4", "2")],
    ]


def test_a_training_that_rejects_its_options_is_run_once_and_forgotten(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_S", "1=refuses 2=0.1")
    done = scaling(run, "--ranks", "1,2", "--", "--modle", "x")
    assert done.code == 2
    assert "failed, Error: No such option: --modle; log: " in done.err
    assert done.err.splitlines()[-1].startswith("error: ddp_hpc.train rejected the options")
    assert not (here / "scaling" / "ranks2-batch8").exists()
    monkeypatch.setenv("STEP_S", "1=0.1 2=0.1")
    assert scaling(run, "--ranks", "1,2", "--", "--model", "linear").code == 0


def test_ranks_get_the_same_threads_at_every_point(here: Path, run: Run) -> None:
    done = scaling(run, "--ranks", "1,2", "--dry-run")
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.out.count(f" --threads {most} ") == done.out.count("\n") == 3
    assert not list(here.iterdir())


def test_a_dry_run_prints_commands_that_bash_can_run(here: Path, run: Run, launch: Launch) -> None:
    done = scaling(run, "--ranks", "2", "--mode", "weak", "--dry-run", "--", "--model", "it's:mine")
    ended = launch(["bash", "-c", done.out], cwd=here, env={"STEP_S": "2=0.5"})
    assert ended.exit_code == 0, ended.stderr
    assert read_point(here / "scaling" / "ranks2-batch8", point(2, 8), settings()) is not None


def test_there_are_enough_samples_for_the_largest_step(here: Path, run: Run) -> None:
    done = scaling(run, "--ranks", "1,3", "--mode", "weak", "--dry-run", "--", "--accumulate", "200")
    assert done.out.count(" --num-samples 4800 ") == 2, "3 ranks x 8 x 200"
    done = scaling(run, "--ranks", "1,3", "--mode", "weak", "--dry-run")
    assert done.out.count(" --num-samples 2064 ") == 2, "a multiple of 24, and at least the default of 2048"


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
        (["--ranks", "1,1"], "--ranks 1,1: the numbers must be positive and increasing"),
        (["--ranks", "0,1"], "--ranks 0,1: the numbers must be positive and increasing"),
        (["--ranks", ""], "--ranks : expected whole numbers separated by commas"),
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
        (
            ["--ranks", "1", "--", "--trace-dir=x"],
            "--trace-dir cannot be given, because the benchmark sets it",
        ),
        (
            ["--ranks", "1", "--", "--snapshot-dir", "x"],
            "--snapshot-dir cannot be given, because the benchmark sets it",
        ),
        (["--ranks", "1", "--", "python", "mine.py"], "'python' after -- is not an option"),
        (["--ranks", "1,4", "--", "--num-samples", "31"], "the largest point uses 32 samples per step"),
        (["--ranks", "1", "--walltime", "10m"], "--walltime requires --submit"),
        (["--ranks", "1", "--dir", "a_file"], "cannot use --dir a_file (Not a directory)"),
        (["--ranks", "1", "--dir", "precious"], "--dir precious contains files, but not scaling.json"),
        (["--ranks", "1", "--json", "precious/thesis.md"], "exists and is not JSON"),
        (["--gather"], "--gather only reads results from --dir; omit --batch-size"),
    ],
)
def test_an_invalid_request_is_one_line_and_changes_nothing(
    here: Path, run: Run, args: list[str], message: str
) -> None:
    (here / "a_file").touch()
    (here / "precious").mkdir()
    (here / "precious" / "thesis.md").write_text("my life's work")
    options = args if "--" in args or "--gather" in args else [*args, "--"]
    done = scaling(run, *options)
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.splitlines()[-1].startswith("error: ")
    assert message in done.err.splitlines()[-1]
    assert sorted(path.name for path in here.iterdir()) == ["a_file", "precious"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch-size", "16"], "--batch-size 8 (now 16)"),
        (["--steps", "3"], "--steps 4 (now 3)"),
        (["--global-batch", "64"], "--global-batch 8 (now 64)"),
        (["--env", "A=B"], "launch options --profile local (now --profile local --env A=B)"),
        (["--", "--model", "linear"], "options after -- none (now --model linear)"),
    ],
)
def test_a_directory_with_other_points_is_rejected(
    here: Path, run: Run, args: list[str], message: str
) -> None:
    assert scaling(run, "--ranks", "1").code == 0
    before = (here / "scaling" / "scaling.json").read_text()
    done = scaling(run, "--ranks", "1", *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
    assert (here / "scaling" / "scaling.json").read_text() == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "request of ddp-hpc bench scaling"}'])
def test_a_damaged_request_is_rejected(here: Path, run: Run, text: str) -> None:
    (here / "scaling").mkdir()
    (here / "scaling" / "scaling.json").write_text(text)
    for args in (["--ranks", "1", "--profile", "local"], ["--gather"]):
        done = run("bench", "scaling", *args)
        assert (done.code, done.out) == (2, "")
        assert done.err.splitlines()[-1].startswith(
            "error: scaling/scaling.json was not written by ddp-hpc bench scaling"
        )


def test_gathering_an_empty_directory_is_an_error(work: Path, run: Run) -> None:
    done = run("bench", "scaling", "--gather")
    assert (done.code, done.out) == (2, "")
    assert "contains no scaling benchmark" in done.err
    assert not list(work.iterdir())


def test_a_directory_in_use_is_not_changed(here: Path, run: Run, launch: Launch) -> None:
    (here / "scaling").mkdir()
    holder = launch.start(["flock", "scaling/.lock", "bash", "-c", "touch up; sleep 30"], cwd=here)
    while not (here / "up").exists():
        assert holder.poll() is None
        time.sleep(0.01)
    done = scaling(run, "--ranks", "1")
    assert (done.code, done.out) == (2, "")
    assert "is in use by another ddp-hpc bench scaling" in done.err


def test_a_directory_that_is_not_writable_is_one_line(run: Run, here: Path) -> None:
    done = scaling(run, "--ranks", "1", "--dir", "/proc/scaling")
    assert done.code in (1, 2)
    assert done.err.splitlines()[-1].startswith(
        ("error: cannot write to --dir /proc/sc", "error: cannot use --dir /proc/sc")
    )


# Output


def test_the_examples_in_the_help_are_valid(run: Run) -> None:
    text = run("bench", "scaling", "--help").out
    examples = [
        shlex.split(line)[3:] for line in text.splitlines() if line.startswith("    ddp-hpc bench scaling")
    ]
    assert len(examples) >= 5
    for arguments in examples:
        bench_scaling.make_context("scaling", arguments)


def test_rates_and_times_have_three_significant_digits() -> None:
    row: dict[str, Any] = {"name": "weak", "ranks": 1, "nodes": 1, "batch_size": 1, "global_batch": 1}
    row |= {"samples_per_s": 1234567.8, "step_s": 0.000234567, "speedup": 1.0, "efficiency": 1.0}
    row |= {"comm_share": None, "data_share": 0.0}
    assert scaling_output.table({"rows": [row]}).splitlines()[1].split() == [
        *("weak", "1", "1", "1", "1", "1,234,568", "0.235", "1.00", "100%", "-", "0.0%")
    ]


# A real training


@pytest.mark.soak  # half a minute; tests/slurm/test_scaling.py has the same on two nodes
def test_a_real_run_of_one_and_two_ranks(launch: Launch, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "bench", "scaling", "--profile", "local", "--mode", "weak"]
    argv += [
        "--ranks",
        "1,2",
        "--steps",
        "4",
        "--warm-up",
        "2",
        "--json",
        "s.json",
        "--",
        "--model",
        "linear",
    ]
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
