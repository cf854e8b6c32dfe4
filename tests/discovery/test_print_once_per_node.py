"""Errors before the rendezvous are printed once per node."""

import os
import signal
import sys

import pytest

SAY = (
    "import os; from ddp_hpc.discovery.print_once_per_node import print_once_per_node; "
    "print_once_per_node(TEXT, os.environ)"
)


def _say(launch, texts):
    """Starts one process per rank, as Hydra does, each with its own message."""
    for rank, text in enumerate(texts):
        env = {"PMI_RANK": str(rank), "PMI_SIZE": str(len(texts)), "MPI_LOCALRANKID": str(rank)}
        env |= {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": str(os.getpid()), "TEXT": text}
        code = SAY.replace("TEXT", "os.environ['TEXT']")
        yield launch.start([sys.executable, "-c", code], env=env)


def _errors(launch, texts):
    running = list(_say(launch, texts))
    return [launch.end(process).stderr for process in running]


def test_the_same_error_on_all_ranks_is_printed_by_rank_0_only(launch):
    texts = [f"error: rank {rank} of 3 is alone" for rank in range(3)]
    assert _errors(launch, texts) == ["error: rank 0 of 3 is alone\n", "", ""]


@pytest.mark.check
def test_different_errors_are_all_printed(launch):
    said = _errors(launch, ["error: no port", "error: no libmpi"])
    assert said == ["error: no port\n", "error: no libmpi\n"]


# Binds the socket that marks the error as already printed; listens on it if there is a second argument.
OCCUPY = """
import socket, sys, time
from ddp_hpc.discovery import print_once_per_node as once
real = socket.socket.bind
def bind(self, name):
    print(name[1:], flush=True)
    real(self, name)
    if sys.argv[1:]:
        self.listen()
    time.sleep(60)
socket.socket.bind = bind
import os
once.print_once_per_node("error: mine", os.environ)
"""


@pytest.mark.check
@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_of_another_user_does_not_suppress_errors(launch, listens):
    if listens and os.getuid() != 0:
        pytest.skip("another user's process is needed: only root can start one")
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_JOB_ID": "78", "SLURM_STEP_ID": "y"}
    # The name contains the user's id, which other users can guess.
    code = f"import os\nos.getuid = lambda: {os.getuid()}\n{OCCUPY}"
    if listens:
        code = f"import socket, ddp_hpc.discovery.print_once_per_node, os\nos.setuid(65534)\n{code}"
    stranger = launch.start([sys.executable, "-c", code, *(["listen"] if listens else [])], env=env)
    assert stranger.stdout.readline().startswith("ddp-hpc-")
    victim = launch.start([sys.executable, "-c", SAY.replace("TEXT", "'error: mine'")], env=env)
    assert launch.end(victim).stderr == "error: mine\n"
    stranger.send_signal(signal.SIGKILL)
