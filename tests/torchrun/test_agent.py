"""torchrun_script.sh restarts ranks that fail, except those that refuse their request."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import rank_log
from tests.conftest import PROJECT
from tests.training.runs import run

SCRIPT = ["bash", str(PROJECT / "jobs" / "torchrun_script.sh")]


def _starts(folder: Path, code: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs a program that ends with this exit code, and returns the ranks that were started."""
    program = folder / "program.py"
    program.write_text(
        "import os, sys\n"
        "with open('starts', 'a') as file:\n"
        "    file.write(os.environ['RANK'] + '\\n')\n"
        f"sys.exit({code})\n"
    )
    env = {"DDP_HPC_RANKS_PER_NODE": "1", "DDP_HPC_MAX_RESTARTS": "1"}
    done = run([*SCRIPT, str(program)], folder, env=env)
    return done, (folder / "starts").read_text().split()


def test_a_wrong_request_is_not_restarted_and_keeps_its_exit_code(tmp_path: Path) -> None:
    done, starts = _starts(tmp_path, 2)
    assert (done.returncode, starts) == (2, ["0"])
    assert "Traceback" not in done.stderr


@pytest.mark.check
def test_a_failed_program_is_restarted(tmp_path: Path) -> None:
    done, starts = _starts(tmp_path, 1)
    assert (done.returncode, starts) == (1, ["0", "0"])


def test_ranks_with_logs_of_their_own_write_to_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    env = {"DDP_HPC_RANKS_PER_NODE": "2", "DDP_HPC_RANK_LOGS": "1"}
    env |= {"DDP_HPC_RUN_DIR": str(tmp_path / "run"), "DDP_HPC_THIS_ATTEMPT": "3 17"}
    done = run([*SCRIPT, "program.py"], tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr
    for rank in range(2):
        (path,) = (tmp_path / "run").glob(rank_log(3, "*", rank))
        assert path.read_text() == f"rank {rank}\n"
