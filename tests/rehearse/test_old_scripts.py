"""Scripts that an earlier version rendered still work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.conftest import clean_environ

OLD = Path(__file__).parents[1] / "old_scripts"


@pytest.mark.parametrize(
    "name", ["generic_slurm.sbatch", pytest.param("generic_pbs_torchrun.pbs", marks=pytest.mark.soak)]
)
def test_a_job_script_of_version_0_1_still_trains(rehearse, name: str) -> None:
    done = rehearse(str(OLD / name))
    assert done.exit_code == 0, done.stderr
    assert "done: 3 steps" in done.stdout


def test_the_torchrun_script_of_version_0_1_still_trains(tmp_path: Path) -> None:
    script = shutil.copy(OLD / "torchrun_script.sh", tmp_path)
    words = ["bash", script, "--model", "linear", "--num-samples", "64", "--max-steps", "2"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = clean_environ(DDP_HPC_RANKS_PER_NODE="2", OMP_NUM_THREADS="1", PATH=path)
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout
    assert "2 ranks on 1 node (torchrun)" in done.stdout
