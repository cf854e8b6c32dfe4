"""A program that hangs in a rehearsal: the hang is named, and the ranks are started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.rehearse.conftest import Rehearse

PROGRAM = """
import os, time
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
is_first = os.environ["DDP_HPC_THIS_ATTEMPT"].startswith("1 ")
Path("checkpoint").touch()
while is_first and dist.get_rank() == 1:
    time.sleep(0.1)
dist.barrier()
print("complete", flush=True)
"""


@pytest.mark.check
def test_a_rank_that_hangs_in_a_rehearsal_is_named_and_the_run_completes(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--profile", "generic_slurm", "--nodes", "2", "--ranks-per-node", "1", "--cpus-per-node", "1"]
    options += ["--idle-timeout", "20", "--progress", "checkpoint", "-o", "job.sh"]
    options += ["--", "python", "train.py"]
    assert launch(["ddp-hpc", "render", *options], cwd=tmp_path).exit_code == 0
    done = rehearse("job.sh", timeout_s=120.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    assert "rank 1 on node2 is in train.py:10 (<module>)" in log
    assert "rank 0 on node1 waits in train.py:11 (<module>: barrier)" in log
    assert "ddp-hpc: restart 1 of 3 in this job, because attempt 1 failed: no output" in log
    assert "complete\n" in log
