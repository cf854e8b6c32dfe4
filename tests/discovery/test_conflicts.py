"""Contradictions between two sources, and cases that only look like one."""

from typing import Any

import pytest

from ddp_hpc.base.errors import LaunchError
from tests.environments import load

from .simulated_mpi import discover_all, environs_of, mpi_world, place, singletons


def refusal(*args: Any, **named: Any) -> str:
    """Returns the message of a launch in which every rank is refused with the same one."""
    results = discover_all(*args, **named)
    assert all(isinstance(result, LaunchError) for result in results), results
    assert {result.exit_code for result in results} == {2}
    return str(results[-1])


def test_a_contradictory_rank_is_refused_with_both_values() -> None:
    environ = load("srun-none", 1) | {"PMI_RANK": "0", "PMI_SIZE": "4"}
    text = refusal([environ])
    assert "Slurm step reports rank 1 of 4 (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4)" in text
    assert "PMI reports rank 0 of 4 (PMI_RANK=0, PMI_SIZE=4)" in text
    assert "unset the stale variables" in text
    assert "--discovery slurm or --discovery pmi" in text


def test_the_choice_suggested_in_the_error_works() -> None:
    environ = load("srun-none", 1) | {"PMI_RANK": "0", "PMI_SIZE": "4"}
    (world,) = discover_all([environ], choice="slurm")
    assert place(world) == (1, 4, 1, 2)
    assert any("PMI reports rank 0 of 4" in note for note in world.notes)


def test_an_agreeing_launcher_is_noted() -> None:
    (world,) = discover_all([load("srun-none", 1) | {"RANK": "1", "WORLD_SIZE": "4"}])
    assert world.notes == ("RANK and WORLD_SIZE set by hand agrees: rank 1 of 4 (RANK=1, WORLD_SIZE=4)",)


@pytest.mark.parametrize("case", ["mpich-one-host", "openmpi-one-host", "srun-pmi2", "srun-cray-shasta-22"])
@pytest.mark.usefixtures("with_mpi4py")
def test_n_singletons_are_refused_with_the_library_and_two_solutions(case: str) -> None:
    environs = [load(case, rank) for rank in range(4)]
    text = refusal(environs, singletons(4))
    assert "started 4 ranks" in text
    assert "but MPI reports 1: 4 singletons" in text
    assert "MPICH 5.0.2 (/opt/mpich/lib/libmpi.so.12)" in text
    assert "use its mpiexec" in text
    assert "MPI4PY_LIBMPI=" in text


@pytest.mark.usefixtures("with_mpi4py")
def test_singletons_are_refused_if_only_the_local_size_is_known() -> None:
    environs = [load("pals-pmix", rank) for rank in range(4)]
    assert "(PALS_LOCAL_SIZE), but MPI reports 1" in refusal(environs, singletons(4))


@pytest.mark.usefixtures("with_mpi4py")
def test_an_mpi_of_another_size_is_refused() -> None:
    environs = [load("mpich-one-host", rank) for rank in range(2)]
    text = refusal(environs, mpi_world(2, 2))
    assert "MPICH Hydra reports rank 0 of 4 (PMI_RANK=0, PMI_SIZE=4)" in text
    assert "MPI_COMM_WORLD reports rank 0 of 2: the size differs" in text


@pytest.mark.parametrize("case", ["sbatch-shell", "salloc-shell"])
def test_a_batch_shell_is_not_a_rank(case: str) -> None:
    text = refusal([load(case, 0)])
    assert "this is the batch shell of Slurm job" in text
    assert "not one of its 4 tasks" in text
    assert "put `srun` in front" in text


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "4", "PMI_SIZE": "4"},
        {"RANK": "7", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    ],
)
@pytest.mark.usefixtures("without_mpi4py")
def test_a_rank_beyond_the_size_is_refused(environ: dict[str, str]) -> None:
    assert "a rank must be less than the size" in refusal([environ])


def test_a_local_rank_beyond_the_local_size_is_refused() -> None:
    environs = [load("openmpi-one-host", r) | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"} for r in range(4)]
    text = refusal(environs, mpi_world(4, 4))
    assert "local rank 4 (OMPI_COMM_WORLD_LOCAL_RANK) of 4 (OMPI_COMM_WORLD_LOCAL_SIZE)" in text


def test_a_local_size_above_the_world_size_is_refused() -> None:
    text = refusal([load("torchrun-standalone", 1) | {"LOCAL_WORLD_SIZE": "8"}])
    assert "8 ranks on this node (LOCAL_WORLD_SIZE) but 4 in total (WORLD_SIZE)" in text


@pytest.mark.parametrize("case", ["srun-torchrun-c10d", "mpich-in-slurm", "openmpi-in-slurm"])
@pytest.mark.usefixtures("without_mpi4py")
def test_the_launcher_of_agents_or_proxies_is_noted_and_not_refused(case: str) -> None:
    for rank, world in enumerate(discover_all([load(case, r) for r in range(4)])):
        assert world.rank == rank
        assert any("Slurm step" in note for note in world.notes)


def test_torchrun_under_one_task_per_gpu_is_refused() -> None:
    for task in range(4):
        outer = load("srun-none", task)
        inner = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
        assert "torchrun reports rank 1 of 2" in refusal([outer | inner | group])


def test_torchrun_under_pals_with_more_tasks_than_agents_is_refused_without_a_size() -> None:
    inner = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    group = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert "HPE PALS reports rank 3 of ?" in refusal([load("pals-pmix", 3) | inner | group])
    (world,) = discover_all([load("pals-pmix", 1) | inner | group])  # its agent is rank 1 of 2 under PALS
    assert place(world) == (2, 4, 0, 2)


def test_stale_variables_of_a_single_rank_do_not_hide_a_step_of_four_nodes() -> None:
    step = load("srun-none", 1) | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    stale = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    stale |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    text = refusal([step | stale])
    assert "Open MPI reports rank 0 of 1" in text
    assert "Slurm step reports rank 1 of 4" in text


def test_a_launch_inside_a_step_of_one_task_is_accepted() -> None:
    shell = load("srun-none", 0) | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    worlds = discover_all([shell | load("mpich-one-host", rank) for rank in range(4)], mpi_world(4, 4))
    assert [place(world) for world in worlds] == [(rank, 4, rank, 4) for rank in range(4)]


@pytest.mark.usefixtures("without_mpi4py")
def test_pals_on_nodes_with_unequal_ranks_is_refused_without_mpi(tmp_path) -> None:
    from tests.environments import cases

    file = tmp_path / "nodes"
    file.write_text("x1\nx1\nx1\nx2\n")
    (case,) = [case for case in cases() if case.name == "pals-pmix"]
    last = environs_of(case, str(file))[3] | {"PALS_LOCAL_SIZE": "1", "PALS_LOCAL_RANKID": "0"}
    text = refusal([last])
    assert "rank 3 of 2" in text
    assert "equal nodes assumed" in text
    assert "a rank must be less than the size" in text
