"""The option `--discovery NAME`: the values that each choice uses, and its errors."""

from pathlib import Path

import pytest

from ddp_hpc.base.errors import LaunchError, RequestError
from ddp_hpc.discovery.launcher_environment import LAUNCHERS
from ddp_hpc.discovery.world import DISCOVERIES, discover
from tests.environments import cases, load

from .simulated_mpi import discover_all, environs_of, mpi_world, place


def test_every_row_of_the_table_can_be_chosen() -> None:
    assert set(DISCOVERIES) == {"auto", "mpi", "single", "device_count"} | {x.name for x in LAUNCHERS}


def test_an_unknown_choice_suggests_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"--discovery slurn: unknown.*slurm"):
        discover({}, "slurn")


@pytest.mark.parametrize("name", [launcher.name for launcher in LAUNCHERS])
def test_choosing_a_missing_launcher_is_refused_with_its_start_command(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"--discovery {name}: .* not found in the environment; start"):
        discover({}, name)


def test_choosing_slurm_in_a_batch_shell_is_refused() -> None:
    with pytest.raises(LaunchError, match="--discovery slurm: SLURM_STEP_ID not found"):
        discover(load("sbatch-shell", 0), "slurm")


def test_single_ignores_all_launcher_variables() -> None:
    (world,) = discover_all([load("srun-none", 3)], choice="single")
    assert place(world) == (0, 1, 0, 1)
    assert set(world.sources.values()) == {"--discovery single"}


def test_discovery_mpi_takes_every_value_from_mpi() -> None:
    worlds = discover_all([{}, {}, {}], mpi_world(3, 2), choice="mpi")
    assert [place(world) for world in worlds] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
    assert {world.launcher for world in worlds} == {"mpi"}
    assert worlds[2].sources["rank"] == "MPI_COMM_WORLD"


def test_a_chosen_launcher_with_all_values_needs_no_mpi() -> None:
    (world,) = discover_all([load("mpich-one-host", 2)], None, choice="hydra")
    assert place(world) == (2, 4, 2, 4)
    assert world.mpi is None


def test_pals_without_mpi_counts_each_host_of_the_node_file_once(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("x1\n" * 12 + "x2\n" * 12)
    (case,) = [case for case in cases() if case.name == "pals-cray-pmi"]
    environs = [{k: v for k, v in e.items() if k != "PMI_SIZE"} for e in environs_of(case, str(file))]
    # Otherwise PMI_RANK without a size would match another row.
    for environ in environs:
        environ.pop("PMI_RANK", None)
    monkey = discover_all(environs, mpi_world(4, 2), choice="pals")
    assert [place(world) for world in monkey] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]


@pytest.mark.usefixtures("without_mpi4py")
def test_pals_without_mpi_names_the_source_of_the_size(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("x1\n" * 12 + "x2\n" * 12)
    (case,) = [case for case in cases() if case.name == "pals-pmix"]
    worlds = discover_all(environs_of(case, str(file)), choice="pals")
    assert [world.world_size for world in worlds] == [4] * 4
    assert worlds[0].sources["world_size"] == "PALS_LOCAL_SIZE x hosts of PBS_NODEFILE (equal nodes assumed)"
    assert worlds[0].num_nodes == 2


@pytest.mark.usefixtures("without_mpi4py")
def test_pals_without_mpi_and_node_file_has_no_size() -> None:
    (error,) = discover_all([load("pals-pmix", 0) | {"PBS_NODEFILE": "/nonexistent"}], choice="pals")
    assert isinstance(error, LaunchError)
    assert "HPE PALS was detected but does not provide the world size (PMI_SIZE is not set)" in str(error)
