"""The table of launchers: its order, and the values that are read for one row."""

import pytest

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.discovery.launcher_environment import (
    BY_NAME,
    batch_shell_tasks,
    in_slurm_step,
    peek_rank,
    present_launchers,
    read_launcher_values,
)
from tests.environments import load


@pytest.mark.parametrize(
    ("first", "second", "case"),
    [
        ("torchrun", "slurm", "srun-torchrun-c10d"),
        ("torchrun", "manual", "torchrun-standalone"),
        ("openmpi", "slurm", "openmpi-in-slurm"),
        ("openmpi", "pmix", "openmpi-one-host"),
        ("flux", "pals", "flux-cray-pals"),
        ("flux", "pmi", "flux"),
        ("cray_shasta", "pals", "srun-cray-shasta-22"),
        ("cray_shasta", "slurm", "srun-cray-shasta-23"),
        ("pals", "pmi", "pals-cray-pmi"),
        ("pals", "pmix", "pals-pmix"),
        ("intelmpi", "hydra", "intelmpi-one-host"),
        ("hydra", "slurm", "mpich-in-slurm"),
        ("hydra", "pmi", "mpich-one-host"),
        ("hydra_port", "slurm", "mpich-pmi-port-in-slurm"),
        ("slurm", "pmi", "srun-pmi2"),
        ("slurm", "pmix", "srun-pmix"),
    ],
)
def test_of_two_launchers_the_inner_or_more_complete_one_is_selected(
    first: str, second: str, case: str
) -> None:
    names = [launcher.name for launcher in present_launchers(load(case, 0))]
    assert names[0] == first
    assert second in names


def test_an_ompi_setting_alone_does_not_identify_open_mpi() -> None:
    assert present_launchers({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_MCA_btl": "self"}) == []


def test_each_value_has_its_variable_as_source() -> None:
    reported = read_launcher_values(BY_NAME["slurm"], load("srun-uneven", 2))
    assert (reported.rank, reported.world_size, reported.local_rank, reported.local_size) == (2, 3, 0, 1)
    assert reported.sources["local_size"] == "SLURM_STEP_TASKS_PER_NODE"
    assert reported.place() == "rank 2 of 3 (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3)"


@pytest.mark.parametrize("text", ["", " ", "x", "-1", "+1", "1.0", "1_0", " 1", "0x1", "\u0663", "9" * 5000])
@pytest.mark.parametrize("variable", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"])
def test_a_value_that_is_not_a_number_is_refused_with_its_variable(variable: str, text: str) -> None:
    with pytest.raises(LaunchError, match=rf"^{variable}='.*' is not a (rank|size); .*unset it"):
        read_launcher_values(BY_NAME["slurm"], load("srun-none", 0) | {variable: text})


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"])
def test_a_size_of_zero_is_refused(variable: str) -> None:
    with pytest.raises(LaunchError, match=f"{variable}='0' is not a size; .* at least 1"):
        read_launcher_values(BY_NAME["slurm"], load("srun-none", 0) | {variable: "0"})


def test_a_node_index_beyond_the_tasks_per_node_is_refused() -> None:
    environ = load("srun-none", 0) | {"SLURM_NODEID": "2"}
    with pytest.raises(LaunchError, match=r"SLURM_NODEID=2 is outside SLURM_STEP_TASKS_PER_NODE=2\(x2\)"):
        read_launcher_values(BY_NAME["slurm"], environ)


@pytest.mark.parametrize(
    ("step", "is_task"),
    [
        ("0", True),
        ("17", True),
        ("", False),
        ("batch", False),
        ("4294967291", False),  # batch
        ("4294967290", False),  # interactive: srun --pty in salloc
        ("4294967292", False),  # extern
        ("9" * 5000, False),
    ],
)
def test_special_slurm_steps_have_no_ranks(step: str, is_task: bool) -> None:
    environ = load("srun-none", 0) | {"SLURM_STEP_ID": step}
    assert in_slurm_step(environ) is is_task
    assert ("slurm" in [x.name for x in present_launchers(environ)]) is is_task


@pytest.mark.parametrize(
    ("environ", "num_tasks"),
    [
        ({}, 0),
        ({"SLURM_JOB_ID": "1"}, 1),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, 4),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, 0),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, 2),  # sbatch --nodes=2
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "many"}, 1),
    ],
)
def test_a_batch_shell_has_a_job_but_no_step(environ: dict[str, str], num_tasks: int) -> None:
    assert batch_shell_tasks(environ) == num_tasks


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), ({"PMI_RANK": "3"}, 3), ({"PMI_RANK": "x"}, 0), ({"PMI_RANK": "9" * 5000}, 0)],
)
def test_the_rank_for_errors_is_found_even_in_a_damaged_environment(
    environ: dict[str, str], rank: int
) -> None:
    assert peek_rank(environ) == rank
