"""Real gloo ranks in network namespaces, of which one sends slowly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.trace.summarize_run import read_capture

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "slow_ranks.py"


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="namespaces require root and tc")
def test_the_connection_of_the_rank_that_sends_slowly_is_named_and_no_other(tmp_path):
    record = [sys.executable, PROGRAM, "record", tmp_path / "runs", "--repeat", "1"]
    subprocess.run([*record, "--scenarios", "network,none,all", "--seed", "3"], check=True, timeout=300)
    one, none, every = (read_capture(tmp_path / "runs" / name).slow_connection for name in ("00", "01", "02"))
    assert (one.sender, one.receiver) == (1, 0)
    assert (none, every) == (None, None)
