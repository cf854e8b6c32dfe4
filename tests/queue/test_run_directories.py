"""How the run directory of a job, and the runs below a directory, are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.queue.run_directories import find_run_dir, run_dir_in, runs_in
from tests.queue.answers import slurm, slurm_job
from tests.queue.test_ledger import make_run


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('export DDP_HPC_RUN_DIR="$PWD"/runs/ddp', "/w/runs/ddp"),
        ("export DDP_HPC_RUN_DIR=\"$PWD\"/'runs/a b'", "/w/runs/a b"),
        ("export DDP_HPC_RUN_DIR=/scratch/me/run", "/scratch/me/run"),
        ("export DDP_HPC_RUN_DIR=${PWD}/x", "/w/x"),
        ("export DDP_HPC_RUN_DIR=$SCRATCH/run", None),
        ('export DDP_HPC_RUN_DIR="$(touch x)"', None),
        ("export DDP_HPC_RUN_DIR=runs/ddp", None),
        ("echo hello", None),
    ],
)
def test_the_run_directory_is_read_from_a_script(line: str, found: str | None) -> None:
    assert run_dir_in(f"#!/bin/bash\n#SBATCH -N1\n{line}\n", Path("/w")) == (Path(found) if found else None)


def test_the_run_directory_of_a_job_is_found_from_its_directory_of_submission(tmp_path: Path) -> None:
    make_run(tmp_path / "w" / "runs" / "other", "1 7 0 900")
    run = make_run(tmp_path / "w" / "runs" / "ddp", "1 12 0 1000")
    job = slurm_job(slurm(work=str(tmp_path / "w"), script=f"{tmp_path}/w/job.sh"), "12")
    assert find_run_dir("12", job, Path("/")) == run
    assert find_run_dir("12", None, tmp_path / "w") == run, "the scheduler has forgotten the job"
    assert find_run_dir("12", None, run) == run
    assert find_run_dir("13", None, tmp_path / "w") is None


def test_a_reused_job_number_is_another_job(tmp_path: Path) -> None:
    make_run(tmp_path / "here" / "runs" / "old", "1 12 0 1000")
    job = slurm_job(slurm(work=str(tmp_path / "w"), script=f"{tmp_path}/w/job.sh"), "12")
    assert find_run_dir("12", job, tmp_path / "here") is None, "Slurm reports the directory of submission"


def test_the_run_directory_of_a_waiting_job_is_read_from_its_script(tmp_path: Path) -> None:
    run = tmp_path / "far" / "run"
    run.mkdir(parents=True)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -N1\nexport DDP_HPC_RUN_DIR={run}\n")
    job = slurm_job(slurm(work=str(tmp_path), script=str(script)), "12")
    assert find_run_dir("12", job, Path("/")) == run
    script.unlink()
    assert find_run_dir("12", job, Path("/")) is None


def test_runs_are_listed_with_the_newest_one_last(tmp_path: Path) -> None:
    new = make_run(tmp_path / "runs" / "a", "1 13 0 2000")
    old = make_run(tmp_path / "runs" / "b", "1 12 0 1000")
    (tmp_path / "runs" / "notes").mkdir()
    assert runs_in(tmp_path) == [old, new]
    assert runs_in(tmp_path / "nowhere") == []


def test_an_inaccessible_directory_does_not_hide_other_runs(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    run = make_run(open_folder / "runs" / "mine", "1 12 0 1000")
    make_run(open_folder / "runs" / "closed", "1 13 0 2000").chmod(0)
    with as_nobody():
        assert runs_in(open_folder) == [run]
