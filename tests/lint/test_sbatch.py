"""The labels of directives are compared with sbatch, which parses options without a controller.

The labels are those of Slurm 22.05 and 26.05; the tests use the installed version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ddp_hpc.schedulers.versions import is_between
from tests.lint.labelled import (
    ACCEPTED_BY_SBATCH,
    REJECTED_BY_ONE_VERSION,
    REJECTED_BY_SBATCH,
)
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


@pytest.fixture
def version(configuration: Path) -> str:
    """The version of the installed sbatch, such as 22.05."""
    assert SBATCH is not None
    argv, environ = [SBATCH, "--version"], {**os.environ, "SLURM_CONF": str(configuration)}
    answer = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout
    return ".".join(answer.split()[1].split(".")[:2])


@pytest.mark.parametrize("directives", [directives for _, directives in REJECTED_BY_SBATCH])
def test_sbatch_rejects_the_directive(directives: str, configuration: Path, tmp_path: Path) -> None:
    answer = answer_of(directives, configuration, tmp_path)
    assert answer.strip()
    assert NO_CONTROLLER not in answer


@pytest.mark.parametrize("directives", ACCEPTED_BY_SBATCH)
def test_sbatch_accepts_the_directive(directives: str, configuration: Path, tmp_path: Path) -> None:
    assert NO_CONTROLLER in answer_of(directives, configuration, tmp_path)


@pytest.mark.parametrize(
    ("rejects", "changed", "directives"), [label[1:] for label in REJECTED_BY_ONE_VERSION]
)
def test_sbatch_rejects_the_directive_in_one_version(
    rejects: str, changed: str, directives: str, version: str, configuration: Path, tmp_path: Path
) -> None:
    is_new = is_between(version, changed, "")
    answer = answer_of(directives, configuration, tmp_path)
    assert (NO_CONTROLLER not in answer) == (is_new == (rejects == "26.05"))
