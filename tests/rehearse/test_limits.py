"""The limits of a launch on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.plan_rehearsal import Options, plan

LIMITS = Limits(
    ranks_per_node=2,
    num_nodes=2,
    requested_nodes=500,
    threads=1,
    trainer_arguments=("--max-steps", "3"),
    nodes=("node1", "node2"),
)


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "here"),
    [(8, 4, [2, 2]), (2, 1, [1, 1]), (1, 4, [1]), (3, 2, [2, 1]), (2000, 4, [2, 2]), (10**8, 10**6, [2, 2])],
)
def test_ranks_are_limited_to_the_simulated_nodes(num_ranks: int, per_node: int, here: list[int]) -> None:
    assert LIMITS.counts(num_ranks, per_node) == here


def test_ranks_that_are_not_started_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    LIMITS.counts(4, 2)
    assert capfd.readouterr().err == ""
    LIMITS.counts(5, 4)
    assert "starting 3 of 5 ranks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "is_trainer"),
    [
        (["/x/torchrun_script.sh"], True),
        (["/x/torchrun_script.sh", "python", "-u", "-m", "ddp_hpc.train", "--lr", "1"], True),
        (["/x/torchrun_script.sh", "-m", "my.module"], False),
        (["/x/torchrun_script.sh", "python3.11", "train.py"], False),
        (["/x/torchrun_script.sh", "./train", "--model", "ddp_hpc.train"], False),
        (["/venv/bin/ddp-hpc", "train", "--lr", "1"], True),
        (["/venv/bin/ddp-hpc", "exec", "--", "python", "train.py"], False),
        (["python", "mine.py", "ddp_hpc.train"], False),
    ],
)
def test_a_program_is_the_trainer_only_if_it_runs_it(command: list[str], is_trainer: bool) -> None:
    assert (LIMITS.command(command)[-2:] == ["--max-steps", "3"]) is is_trainer


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("node1", "127.0.0.1"),
        ("node2.hsn.site.gov", "127.0.0.1"),
        ("--rdzv-endpoint=node1:29500", "--rdzv-endpoint=127.0.0.1:29500"),
        ("tcp://node2.hsn:80", "tcp://127.0.0.1:80"),
        ("node10", "node10"),
        ("mynode1", "mynode1"),
        ("/data/node1/x", "/data/node1/x"),
    ],
)
def test_the_name_of_a_simulated_node_is_replaced_by_this_machine(word: str, here: str) -> None:
    assert LIMITS.command([word]) == [here]


def test_torchrun_agents_start_at_most_the_limited_number_of_ranks() -> None:
    found = LIMITS.environment({"DDP_HPC_RANKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "1"})
    assert (found["DDP_HPC_RANKS_PER_NODE"], found["SLURM_GPUS_ON_NODE"]) == ("2", "1")


@pytest.mark.parametrize(
    ("options", "num_nodes"),
    [((), 2), (("--spare-nodes", "1"), 3), (("--spare-nodes", "3"), 5)],
)
def test_all_spare_nodes_of_a_job_are_simulated(
    options: tuple[str, ...], num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with two cores; without them, the loss of a node could not be seen."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    render = [sys.executable, "-m", "ddp_hpc", "render", "--profile", "generic_slurm", "--nodes", "8"]
    command = ["-o", str(tmp_path / "job.sh"), "--", "python", "train.py"]
    subprocess.run([*render, "--gpus-per-node", "0", *options, *command], check=True, timeout=60)
    given = Options(
        num_nodes=None, ranks_per_node=None, walltime_s=None, steps=None, arguments=(), profile="",
        max_jobs=3, limit_s=60.0, here=True,
    )  # fmt: skip
    assert plan(tmp_path / "job.sh", given).num_nodes == num_nodes
