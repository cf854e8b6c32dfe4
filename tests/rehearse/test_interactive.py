"""Scripts without directives, which a user starts in the shell of an interactive job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]
# The lines with which teaching scripts for Polaris count their nodes and ranks.
COUNTS = ("NNODES=`wc -l < $PBS_NODEFILE`", "NRANKS_PER_NODE=2", "let NRANKS=$((NNODES*$NRANKS_PER_NODE))")
MPIEXEC = 'mpiexec -n ${NRANKS} -ppn ${NRANKS_PER_NODE} -l --cpu-bind "verbose,list:0,1:8,9"'


def test_a_script_that_reads_the_node_file_runs_as_in_qsub_i(rehearse: Rehearse, script: Script) -> None:
    job = script("", *COUNTS, "echo nodes $NNODES $PBS_ENVIRONMENT $PWD", f"{MPIEXEC} bash -c 'echo rank'")
    done = rehearse(job)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert f"nodes 2 PBS_INTERACTIVE {job.parent}\n" in done.stdout
    assert done.stdout.count("rank\n") == 4
    assert (
        "rehearse: job.sh has no directives, but uses a job of PBS; it runs as in the shell of qsub -I, with "
        "2 nodes (change with --nodes)"
    ) in done.stderr


@pytest.mark.check
def test_a_script_that_starts_srun_runs_as_in_salloc(rehearse: Rehearse, script: Script) -> None:
    done = rehearse(script("", "srun bash -c 'echo task $SLURM_PROCID of $SLURM_NTASKS'"))
    assert sorted(done.stdout.splitlines()) == ["task 0 of 2", "task 1 of 2"], done.stdout + done.stderr
    assert "as in the shell of salloc, with 2 nodes" in done.stderr


def test_a_script_with_a_default_for_each_variable_of_a_job_runs_without_one(
    rehearse: Rehearse, script: Script
) -> None:
    done = rehearse(script("", 'echo "id ${PBS_JOBID:-none} ${SLURM_JOB_ID-none}"', "# $PBS_NODEFILE"))
    assert done.stdout == "id none none\n"
    assert "job local: exit code 0" in done.stderr


@pytest.mark.check
def test_with_here_an_interactive_script_finds_its_own_directory_and_leaves_no_log(
    rehearse: Rehearse, script: Script
) -> None:
    job = script("", 'cat "$(dirname "$0")/data.txt" $PBS_NODEFILE')
    (job.parent / "data.txt").write_text("found\n")
    done = rehearse(job, "--nodes", "1")
    assert done.stdout.splitlines() == ["found", "node1.rehearsal"]
    assert sorted(path.name for path in job.parent.iterdir()) == ["data.txt", "job.sh"]


@pytest.mark.check
def test_the_program_of_the_tutorial_runs_to_its_end_on_the_names_of_the_fast_network(
    rehearse: Rehearse, script: Script
) -> None:
    lesson = PROJECT / "docs/examples/lesson_mpi4py.py"
    words = "--epochs 1 --num-samples 64 --embedding 32"
    done = rehearse(script("", *COUNTS, f"{MPIEXEC} python {lesson} {words}"), "--nodes", "1", timeout_s=120)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "epoch 1 loss" in done.stdout
