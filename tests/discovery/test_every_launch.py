"""Discovery of every rank of every recorded or documented launch, with and without MPI."""

from pathlib import Path

import pytest

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.discovery.launcher_environment import BY_NAME, LAUNCHERS
from tests.environments import Case, cases, load

from .simulated_mpi import discover_all, environs_of, mpi_world, place

LAUNCHES = [case for case in cases() if case.launcher != "slurm_batch_shell"]
every_launch = pytest.mark.parametrize("case", LAUNCHES, ids=lambda case: case.name)
# The recordings use the same launcher name for both PMI modes of Hydra.
ROWS = {"pmi": "hydra_port"}


@pytest.fixture
def node_file(tmp_path: Path) -> str:
    """A node file as PBS writes it with mpiprocs=2: two lines per host."""
    path = tmp_path / "nodes"
    path.write_text("x1\nx1\nx2\nx2\n")
    return str(path)


def true_place(case: Case, rank: int) -> tuple[int, int, int, int]:
    """Returns rank, world size, local rank and local size, from the case's command.

    The local rank is that of the launcher if it sets one.
    """
    local_size = min(case.num_ranks - rank // case.ranks_per_node * case.ranks_per_node, case.ranks_per_node)
    variable = BY_NAME[ROWS.get(case.launcher, case.launcher)].local_rank
    local_rank = load(case.name, rank).get(variable)
    return rank, case.num_ranks, int(local_rank) if local_rank else rank % case.ranks_per_node, local_size


def test_the_recorded_launches_cover_all_launchers() -> None:
    covered = {ROWS.get(case.launcher, case.launcher) for case in LAUNCHES}
    # PMI and PMIx alone match only if no more complete row does; two rows are set by the user.
    assert {launcher.name for launcher in LAUNCHERS} - covered == {"override", "manual", "pmi", "pmix"}


@every_launch
@pytest.mark.usefixtures("with_mpi4py")
def test_each_rank_is_detected_if_mpi_agrees(case: Case, node_file: str) -> None:
    worlds = discover_all(environs_of(case, node_file), mpi_world(case.num_ranks, case.ranks_per_node))
    assert [place(world) for world in worlds] == [true_place(case, r) for r in range(case.num_ranks)]
    assert {world.launcher for world in worlds} == {ROWS.get(case.launcher, case.launcher)}
    for world in worlds:
        assert all(world.sources[name] for name in ("rank", "world_size", "local_rank", "local_size"))


@every_launch
@pytest.mark.usefixtures("without_mpi4py")
def test_each_rank_is_detected_without_mpi(case: Case, node_file: str) -> None:
    results = discover_all(environs_of(case, node_file))
    if ROWS.get(case.launcher) == "hydra_port":
        for error in results:
            assert isinstance(error, LaunchError)
            assert "does not provide the world size" in str(error)
            assert "install mpi4py" in str(error)
    else:
        assert [place(world) for world in results] == [true_place(case, r) for r in range(case.num_ranks)]


@every_launch
@pytest.mark.usefixtures("with_mpi4py")
def test_an_mpi_with_other_rank_numbers_is_refused_on_every_rank(case: Case, node_file: str) -> None:
    mpis = mpi_world(case.num_ranks, case.ranks_per_node)
    # Rank 0 agrees, as it does with stale variables of another rank 0.
    turned = [mpis[0], *reversed(mpis[1:])]
    if case.num_ranks < 3:
        turned = mpis[::-1]
    results = discover_all(environs_of(case, node_file), turned)
    if not _has_mpi(case):
        assert [place(world) for world in results] == [true_place(case, r) for r in range(case.num_ranks)]
        return
    for error in results:
        assert isinstance(error, LaunchError)
        assert "but MPI_COMM_WORLD reports rank" in str(error)
        assert "the rank differs" in str(error)
        assert error.on_all_ranks


def _has_mpi(case: Case) -> bool:
    """False for torchrun, and for a plain srun, whose tasks are not connected by MPI."""
    if case.launcher == "slurm":
        return not {"PMI_RANK", "PMIX_RANK"}.isdisjoint(load(case.name, 0))
    return case.launcher != "torchrun"


@every_launch
@pytest.mark.usefixtures("without_mpi4py")
def test_a_missing_variable_never_leads_to_a_wrong_rank(case: Case, node_file: str) -> None:
    row = BY_NAME[ROWS.get(case.launcher, case.launcher)]
    names = {row.rank, row.world_size, row.local_rank, row.local_size, "SLURM_STEP_TASKS_PER_NODE"}
    whole = environs_of(case, node_file)
    for name in sorted(names & whole[0].keys()):
        environs = [{k: v for k, v in environ.items() if k != name} for environ in whole]
        for rank, result in enumerate(discover_all(environs)):
            if isinstance(result, LaunchError):
                continue
            assert place(result) == true_place(case, rank), f"without {name}"


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        ("torchrun-standalone", "RANK"),
        ("openmpi-one-host", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("flux", "FLUX_JOB_SIZE"),
        ("pals-cray-pmi", "PALS_RANKID"),
        ("mpich-one-host", "PMI_SIZE"),
        ("srun-none", "SLURM_LOCALID"),
        ("srun-none", "SLURM_STEP_NUM_TASKS"),
    ],
)
@pytest.mark.usefixtures("without_mpi4py")
def test_a_missing_variable_is_named_with_its_launcher(case: str, missing: str) -> None:
    (error,) = discover_all([{k: v for k, v in load(case, 1).items() if k != missing}])
    assert isinstance(error, LaunchError)
    assert missing in str(error)
    assert "start the ranks with" in str(error)
    assert error.exit_code == 2


@pytest.mark.usefixtures("with_mpi4py")
def test_values_missing_under_pmi_come_from_an_mpi_split() -> None:
    environs = [{"PMI_RANK": str(rank), "PMI_SIZE": "4"} for rank in range(4)]
    worlds = discover_all(environs, mpi_world(4, 2))
    assert [place(world) for world in worlds] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    assert {world.sources["local_rank"] for world in worlds} == {"MPI Split_type(SHARED)"}
    assert [world.node_rank for world in worlds] == [0, 0, 1, 1]


@pytest.mark.usefixtures("with_mpi4py")
def test_under_pmix_all_values_except_the_rank_come_from_mpi() -> None:
    worlds = discover_all([{"PMIX_RANK": str(rank)} for rank in range(3)], mpi_world(3, 2))
    assert [place(world) for world in worlds] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_variables_set_by_the_user_are_sufficient() -> None:
    environ = {
        "DDP_HPC_RANK": "3",
        "DDP_HPC_WORLD_SIZE": "4",
        "DDP_HPC_LOCAL_RANK": "1",
        "DDP_HPC_LOCAL_SIZE": "2",
    }
    (world,) = discover_all([environ])
    assert place(world) == (3, 4, 1, 2)
    assert world.launcher == "override"


def test_an_environment_without_a_launcher_is_a_world_of_one_rank() -> None:
    (world,) = discover_all([{}])
    assert place(world) == (0, 1, 0, 1)
    assert world.launcher == "single"
    assert world.prefix.startswith("[rank 0/1 ")


def test_a_pbs_job_without_a_launcher_is_one_process_with_a_note() -> None:
    (world,) = discover_all([{"PBS_JOBID": "1.s", "PBS_NODEFILE": "/nonexistent"}])
    assert place(world) == (0, 1, 0, 1)
    assert world.notes == (
        "this job runs one rank without a launcher; to run more, put mpiexec in front of the command",
    )
