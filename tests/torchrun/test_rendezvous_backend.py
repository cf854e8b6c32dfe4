"""torchrun: the rendezvous of its agents, and ranks that end with their agent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.rendezvous.launch_secret import new_secret, write_secret
from tests.conftest import PROJECT, Launch
from tests.job_processes import command_of, is_alive, job, processes_below
from tests.training.runs import LINEAR

SCRIPT = ["bash", str(PROJECT / "jobs" / "torchrun_script.sh")]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
FOREVER = ["--epochs", "100000", "--num-samples", "64", "--batch-size", "4", *LINEAR]
STRANGERS_PROGRAM = "import time\nprint('started', flush=True)\ntime.sleep(100)\n"


def wait_for_line(job: subprocess.Popen[str], word: str) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if word in line:
            return
    pytest.fail(f"it ended before {word!r}: {job.communicate()}")


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end_s, [command_of(pid) for pid in alive]
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        pytest.param([*TORCHRUN, "-m", "ddp_hpc.train", *FOREVER], "epoch 1/", marks=pytest.mark.soak),
        ([*SCRIPT, *FOREVER], "epoch 1/"),
        ([*SCRIPT, "program.py"], "started"),
    ],
    ids=["torchrun", "torchrun_script.sh", "somebody's own program"],
)
def test_ranks_end_with_a_killed_agent(tmp_path: Path, argv: list[str], word: str) -> None:
    (tmp_path / "program.py").write_text(STRANGERS_PROGRAM)
    with job(argv, tmp_path, DDP_HPC_RANKS_PER_NODE="2") as started:
        wait_for_line(started, word)
        pids = processes_below(started.pid)
        # The agent is the parent of the ranks; under the script it is a child of the guard.
        agent = [pid for pid in pids if b"torchrun" in command_of(pid) and b".sh" not in command_of(pid)][-1]
        os.kill(agent, signal.SIGKILL)
        wait_until_gone(pids, 20)


def test_a_rendezvous_without_a_key_is_rejected_in_one_line(launch: Launch, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc.torchrun", "--nnodes=1", "--nproc-per-node=1"]
    argv += ["--rdzv-backend=ddp-hpc", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "program.py"]
    ended = launch(argv, cwd=tmp_path)
    assert ended.exit_code == 2
    (line,) = [line for line in ended.stderr.splitlines() if "W1" not in line[:3]]
    assert "--rdzv-backend ddp-hpc requires that DDP_HPC_KEY_FILE is set to the path of a file" in line
    assert "torchrun_script.sh" in line


def test_agents_of_plain_torchrun_connect_with_the_users_key(tmp_path: Path) -> None:
    """Two agents on this host; the first one serves the store."""
    write_secret(tmp_path / "job.key", new_secret())
    (tmp_path / "program.py").write_text(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [TORCHRUN[0], "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=ddp-hpc", "--rdzv-id=x"]
    argv += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "program.py"]
    env = {"DDP_HPC_KEY_FILE": str(tmp_path / "job.key")}
    with job(argv, tmp_path, **env) as one, job(argv, tmp_path, **env) as other:
        outputs = [each.communicate(timeout=90) for each in (one, other)]
        assert [one.returncode, other.returncode] == [0, 0], outputs
    assert sorted(out for out, _ in outputs) == ["0 2\n", "1 2\n"]


def test_the_backend_is_registered_as_an_entry_point_of_torchrun() -> None:
    """Loads it like torch's registry, if the package is installed."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers

    _register_out_of_tree_handlers()
    assert "ddp-hpc" in rendezvous_handler_registry._registry
