"""The record of nodes that have failed in the jobs of a run, and the jobs that leave them out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_hpc.queue.failed_nodes import (
    FAILED_NODES,
    FailedNode,
    failed_nodes,
    forget_failed_nodes,
    record_failed_node,
)
from tests.batch.conftest import Sandbox, run_cli, sandbox

__all__ = ["sandbox"]

SCRIPT = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=10\n{more}export DDP_HPC_RUN_DIR=$PWD/runs/ddp\nsrun x\n"
)


def test_each_node_is_listed_once_with_its_last_failure(tmp_path: Path) -> None:
    assert failed_nodes(tmp_path) == ()
    for node, reason in (("n1", "first"), ("n2.cluster", "GPU 1\nfailed"), ("n1", "no answer")):
        record_failed_node(tmp_path, node, reason)
    read = failed_nodes(tmp_path)
    assert [(each.node, each.reason) for each in read] == [
        ("n2.cluster", "GPU 1 failed"),
        ("n1", "no answer"),
    ]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / FAILED_NODES).write_text("\nn1\nn1 x why\nn2 12 why\n-x;y 12 why\n--x")
    assert failed_nodes(tmp_path) == (FailedNode("n2", 12, "why"),)


def test_a_record_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    record_failed_node(tmp_path / "missing", "n1", "why")


def test_nodes_can_be_forgotten(tmp_path: Path) -> None:
    forget_failed_nodes(tmp_path)
    record_failed_node(tmp_path, "n1", "why")
    forget_failed_nodes(tmp_path)
    assert failed_nodes(tmp_path) == ()


def submit(sandbox: Sandbox, *options: str, more: str = "") -> subprocess.CompletedProcess[bytes]:
    (sandbox.work / "job.sh").write_text(SCRIPT.format(more=more))
    (sandbox.work / "runs" / "ddp").mkdir(parents=True)
    record_failed_node(sandbox.work / "runs" / "ddp", "n2", "GPU 1 failed")
    sandbox.program("sbatch", "#!/bin/bash\necho 8\n")
    path = f"{sandbox.bin}:/usr/bin:/bin"
    return run_cli("submit", "--force", "job.sh", *options, cwd=sandbox.work, PATH=path)


def test_submit_leaves_failed_nodes_out_and_says_so(sandbox: Sandbox) -> None:
    done = submit(sandbox, "--dry-run")
    assert done.stderr.decode().endswith("would run: sbatch --parsable --exclude=n2 job.sh\n")
    assert (
        b"note: n2 is left out: GPU 1 failed; to use all nodes again, submit with --forget-nodes\n"
        in done.stderr
    )


def test_nodes_that_the_script_excludes_stay_excluded(sandbox: Sandbox) -> None:
    done = submit(sandbox, "--dry-run", more="#SBATCH --exclude=n[7-9]\n")
    assert b"sbatch --parsable '--exclude=n[7-9],n2' job.sh" in done.stderr


@pytest.mark.parametrize("is_dry", [True, False])
def test_with_forget_nodes_all_nodes_are_used_again(sandbox: Sandbox, is_dry: bool) -> None:
    done = submit(sandbox, "--forget-nodes", *(["--dry-run"] if is_dry else []))
    assert (done.returncode, b"n2" in done.stderr) == (0, False)
    assert bool(failed_nodes(sandbox.work / "runs" / "ddp")) == is_dry
