"""`torchrun_script.sh`: one torchrun agent per node, run with a recording `python`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_hpc.render.render_script import render_step
from ddp_hpc.torchrun.step import Rendezvous
from tests.batch.conftest import Sandbox
from tests.batch.test_scripts_run import _wait_for

# Runs the step, in which the same program replaces torchrun and the endpoint.
STEP = (
    "import os; from ddp_hpc.torchrun import step; run = step.run_step; "
    "step.run_step = lambda *args: run(*args, python=os.environ['STAND_IN']); step.main()"
)
PYTHON = f"""#!/bin/bash
case $2 in
  ddp_hpc.torchrun.step) STAND_IN=$0 exec {sys.executable} -c "{STEP}" "${{{{@:3}}}}" ;;
  ddp_hpc.torchrun.endpoint)
    printf '%s\\0' "$@" >"$RECORD.endpoint"
    {{endpoint}}
    ;;
  ddp_hpc.torchrun)
    printf '%s\\0' "$@" >"$RECORD"
    env -0 >"$RECORD.env"
    {{agent}}
    ;;
  *) exit 99 ;;
esac
"""
# Runs until its parent has ended; the /proc/PID/exe of a zombie cannot be read.
STAY = "while readlink -e /proc/$PPID/exe >/dev/null; do sleep 0.05; done"


def _answer(node_rank: int, address: str, key_file: str) -> str:
    """The line of an endpoint."""
    line = json.dumps(asdict(Rendezvous("head.fast", 45123, node_rank, address, key_file)))
    return f"echo '{line}'"


HEAD = f"{_answer(0, '10.0.0.1', '/tmp/x/key')}; {STAY}"
OTHER = _answer(1, "10.0.0.2", "/tmp/y/key")


@pytest.fixture
def step(sandbox: Sandbox) -> Sandbox:
    sandbox.program("python", PYTHON.format(endpoint=OTHER, agent=""))
    return sandbox


def program(sandbox: Sandbox) -> list[str]:
    """The program for torchrun."""
    words = sandbox.words()
    return words[next(i for i, word in enumerate(words) if word.startswith("--max-restarts")) + 1 :]


def run(sandbox: Sandbox, *args: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    path = sandbox.write(render_step(), "torchrun_script.sh")
    return subprocess.run(
        ["bash", path, *args],
        cwd=sandbox.work,
        env=sandbox.environ(**environ),
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("args", "runs"),
    [
        ([], ["-m", "ddp_hpc.train"]),
        (["--epochs", "3"], ["-m", "ddp_hpc.train", "--epochs", "3"]),
        (["-m", "my.module", "--lr", "0.1"], ["-m", "my.module", "--lr", "0.1"]),
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["bin/train", "x"], ["bin/train", "x"]),
        (["python", "-m", "my.module"], ["-m", "my.module"]),
        (["python3", "-u", "train.py", "a b"], ["train.py", "a b"]),
        (["/opt/conda/bin/python3.11", "-m", "my.module"], ["-m", "my.module"]),
        (["python"], ["-m", "ddp_hpc.train"]),
    ],
)
def test_the_arguments_name_a_program_or_belong_to_the_training(
    step: Sandbox, args: list[str], runs: list[str]
) -> None:
    done = run(step, *args)
    assert done.returncode == 0, done.stderr
    assert program(step) == runs


@pytest.mark.parametrize("args", [["python", "-c", "print()"], ["-m"], ["python", "-W", "ignore", "x.py"]])
def test_what_torchrun_cannot_run_is_refused_in_one_line(step: Sandbox, args: list[str]) -> None:
    done = run(step, *args)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: torchrun_script.sh on ")
    assert not step.record.exists()


def test_the_agents_use_the_rendezvous_of_their_endpoint(step: Sandbox) -> None:
    run(step, SLURM_STEP_NUM_NODES="2", SLURM_JOB_ID="7", SLURM_STEP_ID="3", DDP_HPC_INIT_TIMEOUT_S="60")
    words = step.words()
    assert words[:2] == ["-m", "ddp_hpc.torchrun"]
    assert {
        "--nnodes=2", "--rdzv-backend=ddp-hpc", "--rdzv-id=7.3", "--rdzv-endpoint=head.fast:45123",
        "--rdzv-conf=join_timeout=60", "--local-addr=10.0.0.2", "--max-restarts=3",
    } <= set(words)  # fmt: skip
    asked = Path(f"{step.record}.endpoint").read_text().split("\0")[2:-1]
    assert asked == ["--nodes", "2", "--rendezvous", "ddp-hpc", "--timeout-s", "60"]
    assert step.seen()["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert step.seen()["DDP_HPC_KEY_FILE"] == "/tmp/y/key"


@pytest.mark.parametrize(("helper", "is_host"), [(HEAD, "1"), (OTHER, "0")], ids=["head", "other"])
def test_torchs_own_rendezvous_can_be_requested(sandbox: Sandbox, helper: str, is_host: str) -> None:
    sandbox.program("python", PYTHON.format(endpoint=helper, agent=""))
    run(sandbox, DDP_HPC_RDZV_BACKEND="c10d")
    assert {"--rdzv-backend=c10d", f"--rdzv-conf=join_timeout=300,is_host={is_host}"} <= set(sandbox.words())


def test_the_endpoint_ends_with_the_script(sandbox: Sandbox) -> None:
    sandbox.program("python", PYTHON.format(endpoint=HEAD, agent="exit 5"))
    # capture_output waits until stderr is closed, so a remaining process would cause a timeout.
    done = run(sandbox)
    assert done.returncode == 5


def test_if_the_rendezvous_fails_nothing_is_started(sandbox: Sandbox) -> None:
    failing = "echo 'error: node b did not come' >&2; exit 1"
    sandbox.program("python", PYTHON.format(endpoint=failing, agent=""))
    done = run(sandbox)
    assert done.returncode == 1
    assert done.stderr.decode() == "error: node b did not come\n"
    assert not sandbox.record.exists()


def test_a_second_slurm_task_of_a_node_exits(step: Sandbox) -> None:
    done = run(step, SLURM_LOCALID="1")
    assert done.returncode == 0
    assert len(done.stderr.decode().splitlines()) == 1
    assert not step.record.exists()


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_several_mpi_tasks_on_a_node_are_refused_with_one_message(
    step: Sandbox, size: str, rank: str
) -> None:
    """A surplus task cannot just exit: the others would wait for it in MPI_Init."""
    ends = [run(step, **{size: "2", rank: local_rank}) for local_rank in ("0", "1")]
    assert [done.returncode for done in ends] == [2, 2]
    assert [len(done.stderr.decode().splitlines()) for done in ends] == [1, 0]
    assert "--ppn 1" in ends[0].stderr.decode()
    assert not step.record.exists()


def test_nodes_are_counted_by_name_under_pbs(step: Sandbox) -> None:
    nodefile = step.folder / "nodefile"
    nodefile.write_text("a\na\nb\nb\nc\nc\n")
    run(step, PBS_NODEFILE=str(nodefile), PBS_JOBID="53[2].pbs-srv")
    assert {"--nnodes=3", "--rdzv-id=53[2].pbs-srv"} <= set(step.words())


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, "1"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "0"}, "1"),
        ({"SLURM_GPUS_ON_NODE": "4", "DDP_HPC_RANKS_PER_NODE": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "3,2,1"}, "3"),
    ],
)
def test_ranks_per_node_default_to_the_number_of_gpus(
    step: Sandbox, environ: dict[str, str], ranks: str
) -> None:
    run(step, **environ)
    assert f"--nproc-per-node={ranks}" in step.words()


def test_usr1_to_the_whole_step_ends_neither_torchrun_nor_its_script(
    sandbox: Sandbox,
) -> None:
    agent = "kill -USR1 $PPID $$; exit 5"
    sandbox.program("python", PYTHON.format(endpoint=OTHER, agent=agent))
    assert run(sandbox).returncode == 5


def test_a_signal_is_forwarded_to_torchrun(sandbox: Sandbox) -> None:
    agent = "trap 'exit 75' TERM; touch up; while :; do sleep 0.05; done"
    sandbox.program("python", PYTHON.format(endpoint=OTHER, agent=agent))
    path = sandbox.write(render_step(), "torchrun_script.sh")
    with subprocess.Popen(["bash", path], cwd=sandbox.work, env=sandbox.environ()) as process:
        _wait_for(sandbox.work / "up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 75
