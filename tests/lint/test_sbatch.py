"""The labels of directives are compared with sbatch, which parses options without a controller."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lint.labelled import ACCEPTED_BY_SBATCH, REJECTED_BY_SBATCH
from tests.lint.test_labelled import script_of

SBATCH = shutil.which("sbatch")
CONFIGURATION = """ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
MessageTimeout=1
SelectType=select/cons_tres
GresTypes=gpu,nvme
NodeName=n1 CPUs=1
PartitionName=p Nodes=n1 Default=YES
"""
NO_CONTROLLER = "Unable to contact slurm controller"


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if SBATCH is None:
        pytest.skip("sbatch is not installed")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text(CONFIGURATION)
    return path


def answer_of(directives: str, configuration: Path, folder: Path) -> str:
    """Return what sbatch reports about the script."""
    assert SBATCH is not None
    script = folder / "job.sh"
    script.write_text(script_of(directives))
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_"))
    }
    done = subprocess.run(
        [SBATCH, "--test-only", str(script)],
        env={**environ, "SLURM_CONF": str(configuration), "LC_ALL": "C"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.stderr.decode()


@pytest.mark.parametrize("directives", [directives for _, directives in REJECTED_BY_SBATCH])
def test_sbatch_rejects_the_directive(directives: str, configuration: Path, tmp_path: Path) -> None:
    answer = answer_of(directives, configuration, tmp_path)
    assert answer.strip()
    assert NO_CONTROLLER not in answer


@pytest.mark.parametrize("directives", ACCEPTED_BY_SBATCH)
def test_sbatch_accepts_the_directive(directives: str, configuration: Path, tmp_path: Path) -> None:
    assert NO_CONTROLLER in answer_of(directives, configuration, tmp_path)
