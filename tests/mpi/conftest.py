"""How the ranks of these tests are started."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended, Launch

MEET = ("-m", "tests.mpi.meet")
# Open MPI refuses root otherwise, and more ranks than cores without the policy.
OPENMPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Meeting:
    """Runs `meet.py` as N ranks."""

    def __init__(self, launch: Launch, mpiexec: Path) -> None:
        self._launch, self._mpiexec = launch, mpiexec

    def __call__(self, num_ranks: int, timeout_s: float = 30, **env: str) -> Ended:
        argv = [self._mpiexec, "-n", str(num_ranks), sys.executable, *MEET]
        return self._launch(argv, env=env, timeout_s=timeout_s)


@pytest.fixture
def meeting(launch: Launch, mpiexec: Path) -> Meeting:
    return Meeting(launch, mpiexec)


def told(ended: Ended) -> list[dict[str, Any]]:
    """What each rank printed, by rank."""
    assert ended.exit_code == 0, ended.stderr
    return sorted((json.loads(line) for line in ended.stdout.splitlines()), key=lambda each: each["rank"])


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.stderr.splitlines() if "error: " in line]
