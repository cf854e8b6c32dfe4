"""The check of nodes with real ranks, of which one has a fault (`faults/sitecustomize.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.node_check.results import LAUNCH, RESULTS, RankResult, Results, read_results
from ddp_hpc.node_check.verdict import judge
from tests.conftest import PROJECT
from tests.waiting import wait_until

pytestmark = pytest.mark.check

FAULTS = PROJECT / "tests" / "node_check" / "faults"
TRAIN = [sys.executable, "-m", "ddp_hpc.train", "--epochs", "1"]


def check(
    folder: Path, argv: list[str | Path], fault: str = "", rank: int = 1, **environ: str
) -> Results | None:
    """Runs a launch line with the check in place of the program; the rank has the fault."""
    environ = prepare(folder, fault, rank, **environ)
    done = subprocess.run(argv, env=environ, cwd=folder, timeout=150, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return read_results(folder)


def prepare(folder: Path, fault: str, rank: int, **environ: str) -> dict[str, str]:
    """Returns the environment of the launcher, after the supervisor's part."""
    launch = f"{folder}-{time.monotonic_ns()}"
    (folder / LAUNCH).write_text(launch)
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {
        **kept, "PATH": path, "PYTHONPATH": f"{FAULTS}:{PROJECT}", "OMP_NUM_THREADS": "1", "FAULT": fault,
        "FAULTY_RANK": str(rank), "DDP_HPC_NODE_CHECK": str(folder), "DDP_HPC_LAUNCH": launch, **environ,
    }  # fmt: skip


def with_mpiexec(mpiexec: Path) -> list[str | Path]:
    return [mpiexec, "-n", "2", *TRAIN]


def problems_of(results: Results | None) -> dict[int, list[str]]:
    assert results is not None
    return {rank.rank: [problem.text for problem in rank.problems] for rank in results.ranks}


@pytest.mark.parametrize("launcher", ["train", "exec", "torchrun"])
def test_ranks_without_a_fault_have_no_problems(launcher: str, mpiexec: Path, tmp_path: Path) -> None:
    argv: dict[str, list[str | Path]] = {
        "train": with_mpiexec(mpiexec),
        "exec": [mpiexec, "-n", "2", sys.executable, "-m", "ddp_hpc.exec", "python", "program.py"],
        "torchrun": ["bash", PROJECT / "jobs" / "torchrun_script.sh", "program.py"],
    }
    (tmp_path / "program.py").write_text("raise SystemExit('this is the program')")
    results = check(tmp_path, argv[launcher], DDP_HPC_RANKS_PER_NODE="2")
    assert problems_of(results) == {0: [], 1: []}
    assert results is not None
    for rank in results.ranks:
        assert rank.clock_s is not None
        assert rank.clock_s[0] <= 0.001
        assert rank.clock_s[1] >= -0.001
        assert (rank.local_size, rank.num_devices) == (2, 0)


@pytest.mark.parametrize("fault", ["hang", "hang with the GIL"])
def test_a_rank_that_hangs_is_named_with_what_it_does(fault: str, mpiexec: Path, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    problems = problems_of(check(tmp_path, with_mpiexec(mpiexec), fault))
    assert problems[0] == []
    [text] = problems[1]
    assert text.startswith("no answer from the CPU within ")
    assert text.endswith(" s (matrix product)")
    assert time.monotonic() - begin_s < 60


def test_under_torchrun_a_rank_that_hangs_is_named_and_not_restarted(tmp_path: Path) -> None:
    argv: list[str | Path] = ["bash", PROJECT / "jobs" / "torchrun_script.sh", "program.py"]
    problems = problems_of(check(tmp_path, argv, "hang", DDP_HPC_RANKS_PER_NODE="2"))
    assert [len(problems[rank]) for rank in (0, 1)] == [0, 1]


def test_a_process_that_is_killed_in_the_check_is_named(mpiexec: Path, tmp_path: Path) -> None:
    problems = problems_of(check(tmp_path, with_mpiexec(mpiexec), "killed"))
    assert problems == {
        0: [],
        1: ["the process that checks the device was killed by SIGKILL (matrix product)"],
    }


def test_a_wrong_product_is_named(mpiexec: Path, tmp_path: Path) -> None:
    problems = problems_of(check(tmp_path, with_mpiexec(mpiexec), "wrong product"))
    assert problems == {0: [], 1: ["the CPU computed a wrong matrix product"]}


def test_a_rank_that_does_not_start_is_missing(mpiexec: Path, tmp_path: Path) -> None:
    """The launcher waits for the rank, so that the supervisor has to end it."""
    environ = prepare(tmp_path, "does not start", 1)
    with subprocess.Popen(with_mpiexec(mpiexec), env=environ, cwd=tmp_path) as process:
        try:
            wait_until((tmp_path / RESULTS).exists, 90)
            assert process.poll() is None
        finally:
            process.terminate()
    results = read_results(tmp_path)
    assert results is not None
    assert (results.world_size, [rank.rank for rank in results.ranks]) == (2, [0])


def test_a_run_directory_that_a_node_does_not_see_is_named(mpiexec: Path, tmp_path: Path) -> None:
    [text] = problems_of(check(tmp_path, with_mpiexec(mpiexec), "no run directory"))[1]
    assert text == (
        "this node cannot read the current run directory: /nonexistent/launch (No such file or directory)"
    )


def test_a_wrong_clock_is_measured(mpiexec: Path, tmp_path: Path) -> None:
    results = check(tmp_path, with_mpiexec(mpiexec), "clock")
    assert results is not None
    # As if the ranks were on two nodes.
    ranks = [RankResult(**{**vars(rank), "host": f"n{rank.rank}"}) for rank in results.ranks]
    [(node, reason)] = judge(Results(world_size=2, ranks=tuple(ranks)), ("n0", "n1")).bad.items()
    assert node == "n1"
    assert reason.startswith(("its clock is 3600", "its clock is 3599"))
    assert reason.endswith(" s slow")
