"""Functions that start the ranks of these tests."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended, Launch

CONNECT = ("-m", "tests.mpi.connect")
# Open MPI rejects root without the first two, and more ranks than cores without the policy.
OPENMPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class ConnectRanks:
    """Runs `connect.py` as N ranks."""

    def __init__(self, launch: Launch, mpiexec: Path) -> None:
        self._launch, self._mpiexec = launch, mpiexec

    def __call__(self, num_ranks: int, timeout_s: float = 30, **env: str) -> Ended:
        argv = [self._mpiexec, "-n", str(num_ranks), sys.executable, *CONNECT]
        return self._launch(argv, env=env, timeout_s=timeout_s)


@pytest.fixture
def connect_ranks(launch: Launch, mpiexec: Path) -> ConnectRanks:
    return ConnectRanks(launch, mpiexec)


def printed(ended: Ended) -> list[dict[str, Any]]:
    """Returns the JSON object that each rank printed, in rank order."""
    assert ended.exit_code == 0, ended.stderr
    return sorted((json.loads(line) for line in ended.stdout.splitlines()), key=lambda each: each["rank"])


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.stderr.splitlines() if "error: " in line]
