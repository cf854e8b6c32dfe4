"""RANK028, RANK029 and JOB039 know the MPI of a script and the containers of its ranks."""

from __future__ import annotations

import pytest

from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.site import load_site

NODES = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"
POLARIS = (
    "#!/bin/bash -l\n#PBS -l select=2:system=polaris\n#PBS -l place=scatter\n#PBS -l walltime=0:30:00\n"
    "#PBS -l filesystems=home\n#PBS -q debug\n#PBS -A name\n"
)


def _found(check: str, text: str, site: str = "") -> list[str]:
    found = lint_script(text, load_site(site) if site else None)
    return [one.severity for one in found if one.check == check]


@pytest.mark.parametrize(
    "body",
    [
        "module load gcc openmpi/4.1.2\nmpiexec -n 4 -env OMP_NUM_THREADS 4 ./simulate",
        "module load intelmpi\nmpirun --mca btl tcp -n 4 ./simulate",
        "ml impi/2021\nmpirun -n 4 -x LD_LIBRARY_PATH ./simulate",
        "module load mpi/mpich-x86_64\nmpirun --oversubscribe -n 4 ./simulate",
    ],
)
def test_an_option_of_another_mpi_is_reported(body: str) -> None:
    assert _found("RANK028", f"{NODES}{body}\n") == ["error"]


@pytest.mark.parametrize(
    "body",
    [
        "module load openmpi\nmpirun -x OMP_NUM_THREADS --map-by socket --mca btl tcp ./simulate",
        "module load impi\nmpirun -n 4 -ppn 2 -genv OMP_NUM_THREADS 4 ./simulate -x",
        "module load openmpi impi\nmpirun -genv OMP_NUM_THREADS 4 ./simulate",
        "module unload openmpi\nmpirun -ppn 2 ./simulate",
        "mpirun -ppn 2 ./simulate",
        "module load openmpi\n/opt/mpich/bin/mpirun -ppn 2 ./simulate",
    ],
)
def test_an_option_of_this_mpi_is_not_reported(body: str) -> None:
    assert _found("RANK028", f"{NODES}{body}\n") == []


def test_the_profile_names_the_mpi_and_the_threads_of_a_node() -> None:
    text = f"{POLARIS}mpiexec -n 8 --ppn 4 --depth=32 --bind-to core ./simulate\n"
    assert _found("RANK028", text, "polaris") == ["error"]
    assert _found("SITE008", text, "polaris") == ["error"]
    text = f"{POLARIS}mpiexec -n 16 --ppn 8 --depth=8 --cpu-bind depth python train.py\n"
    assert _found("RANK028", text, "polaris") == _found("SITE008", text, "polaris") == []
    assert _found("RANK003", text, "polaris") == ["note"]


@pytest.mark.parametrize(
    ("body", "severities"),
    [
        ("module load openmpi\nexport OMP_NUM_THREADS=8\nmpirun -n 2 ./simulate", ["warning"]),
        ("module load openmpi\nexport OMP_NUM_THREADS=8\nmpirun -n 2 --bind-to none ./simulate", []),
        ("module load openmpi\nexport OMP_NUM_THREADS=8\nmpirun -n 4 ./simulate", []),
        ("module load openmpi\nexport OMP_NUM_THREADS=1\nmpirun -n 2 ./simulate", []),
        ("module load impi\nexport OMP_NUM_THREADS=8\nmpirun -n 2 ./simulate", []),
    ],
)
def test_threads_that_share_a_core_are_reported(body: str, severities: list[str]) -> None:
    assert _found("RANK029", f"{NODES}{body}\n") == severities


@pytest.mark.parametrize(
    ("body", "severities"),
    [
        ("singularity exec image.sif mpirun -n 4 simulate", ["note"]),
        ("singularity exec image.sif mpirun -n 4 --host localhost simulate", []),
        ("mpirun -n 4 singularity exec image.sif simulate", []),
        ("srun apptainer exec --cleanenv image.sif simulate", ["note"]),
        ("srun -n 1 apptainer exec --cleanenv image.sif simulate", []),
        ("srun apptainer exec image.sif simulate -e", []),
        ("docker run --gpus device=0,2 image simulate", ["error"]),
        ("docker run --gpus '\"device=0,2\"' image simulate", []),
    ],
)
def test_a_container_that_does_not_fit_the_ranks_is_reported(body: str, severities: list[str]) -> None:
    assert _found("JOB039", f"{NODES}{body}\n") == severities


@pytest.mark.parametrize(("gpus", "severities"), [(1, ["note"]), (8, [])])
def test_all_gpus_of_a_node_are_reported_in_a_job_with_some(gpus: int, severities: list[str]) -> None:
    text = f"{NODES}#SBATCH --gpus-per-node={gpus}\ndocker run --gpus all image simulate\n"
    assert _found("JOB039", text) == severities
