"""`python -m ddp_hpc.torchrun.step`: one torchrun agent on this node, for `torchrun_script.sh`.

The script runs once per node. Together with the other nodes, it determines the address of the
rendezvous, and then runs torchrun with the number of ranks of this node. Its environment variables
are documented in the script. This module does not import torch, because the agent is a separate process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddp_hpc.base.errors import EXIT_FAILED, EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.base.job_variables import job_id_of, read_node_file
from ddp_hpc.base.process_control import set_umask
from ddp_hpc.discovery.node_check_request import MODULE, NODE_CHECK
from ddp_hpc.discovery.rank_output import RANK_LOGS
from ddp_hpc.discovery.silence import limit_in
from ddp_hpc.discovery.visible_gpus import gpus_here
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.rendezvous.end_with_parent import keep_exit_code

_TRAINER = ["-m", "ddp_hpc.train"]
_PYTHON = re.compile(r"python([0-9].*)?")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_SURPLUS_TASKS = {
    "PALS_LOCAL_SIZE": "PALS_LOCAL_RANKID",
    "MPI_LOCALNRANKS": "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
}
"""Variables of MPI launchers: the number of tasks on this node, and the index of this one."""


@dataclass(frozen=True)
class Step:
    """The program that torchrun runs on the nodes of this step, and its settings."""

    program: list[str]
    num_nodes: int
    ranks_per_node: int
    backend: str
    max_restarts: str
    timeout_s: str


@dataclass(frozen=True)
class Rendezvous:
    """How the agent of this node finds the others. The endpoint prints it as one line of JSON."""

    host: str
    port: int
    node_rank: int
    local_addr: str
    key_file: str


def plan_step(arguments: list[str], environ: Mapping[str, str]) -> Step:
    """Returns what to run for the arguments and the environment of `torchrun_script.sh`.

    Raises:
        RequestError: torchrun cannot run the program, or a variable has an invalid value.
    """
    backend = environ.get("DDP_HPC_RDZV_BACKEND") or "ddp-hpc"
    if backend not in ("ddp-hpc", "c10d"):
        raise RequestError(
            f"DDP_HPC_RDZV_BACKEND is '{backend}'; set it to ddp-hpc or c10d, or unset it to use the default"
        )
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or str(len(read_node_file(environ)) or 1)
    numbers = {
        "num_nodes": num_nodes,
        "ranks_per_node": _ranks_per_node(environ),
    }
    for name, value in numbers.items():
        if not _NUMBER.fullmatch(value):
            raise RequestError(
                f"{name} is '{value}'; it must be a positive integer; check DDP_HPC_RANKS_PER_NODE"
            )
    program, max_restarts = _program(arguments), environ.get("DDP_HPC_MAX_RESTARTS") or "3"
    if environ.get(NODE_CHECK):
        # A rank that fails has a result, too.
        program, max_restarts = ["-m", MODULE], "0"
    return Step(
        program,
        **{name: int(value) for name, value in numbers.items()},
        backend=backend,
        max_restarts=max_restarts,
        timeout_s=environ.get("DDP_HPC_INIT_TIMEOUT_S") or "300",
    )


def run_step(step: Step, environ: Mapping[str, str], python: str = sys.executable) -> int:
    """Runs torchrun's agent of this node, and returns its exit code."""
    rendezvous = _agree(step, python)
    if rendezvous is None:
        return EXIT_FAILED  # `endpoint` has reported the reason
    variables = {
        **environ,
        # A file on this node with the secret key with which agents and ranks authenticate each other.
        "DDP_HPC_KEY_FILE": rendezvous.key_file,
        # Let the ranks create a new store after each restart. By default they share the agent's store (torch
        # 2.13), which keeps the addresses of the ranks before the restart, so ranks with gloo fail to connect
        # in every restart.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    # Slurm signals all processes of a step. These two signals would end torchrun, while the ranks handle
    # them.
    for sig in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    is_stopped, agent = False, None

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        if agent is not None:
            agent.terminate()

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, stop)
    words = _agent_command(step, rendezvous, environ, python)
    agent = subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL)
    if is_stopped:
        agent.terminate()
    code = agent.wait()
    keep_exit_code()
    return code if code >= 0 else 128 - code


def _agree(step: Step, python: str) -> Rendezvous | None:
    """Agrees with the other nodes on the rendezvous; None if that failed.

    The module `endpoint` prints one line and runs until its parent, this process, has ended: it serves or
    reserves the port, and then removes the key file. It must not be killed: under Hydra, a process that ends
    without MPI_Finalize ends the MPI job.
    """
    words = [python, "-m", "ddp_hpc.torchrun.endpoint", "--nodes", str(step.num_nodes)]
    words += ["--rendezvous", step.backend, "--timeout-s", step.timeout_s]
    endpoint = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        close_fds=False,  # MPI needs the file descriptor PMI_FD, which Hydra has opened for this process
    )
    assert endpoint.stdout is not None
    line = endpoint.stdout.readline()
    return Rendezvous(**json.loads(line)) if line else None


def _agent_command(step: Step, rendezvous: Rendezvous, environ: Mapping[str, str], python: str) -> list[str]:
    conf = f"join_timeout={step.timeout_s}"
    if step.backend == "c10d":
        conf += f",is_host={int(rendezvous.node_rank == 0)}"
    job = job_id_of(environ) or "ddp-hpc"
    number = environ.get("SLURM_STEP_ID")
    return [
        *(python, "-m", "ddp_hpc.torchrun"),
        f"--nnodes={step.num_nodes}",
        f"--nproc-per-node={step.ranks_per_node}",
        f"--rdzv-backend={step.backend}",
        f"--rdzv-id={job}{f'.{number}' if number else ''}",
        f"--rdzv-endpoint={rendezvous.host}:{rendezvous.port}",
        f"--rdzv-conf={conf}",
        f"--local-addr={rendezvous.local_addr}",
        f"--max-restarts={step.max_restarts}",
        # `ddp-hpc exec` writes the output of each rank to its file, or watches it.
        *(("-m", "ddp_hpc.exec", python) if environ.get(RANK_LOGS) == "1" or limit_in(environ) else ()),
        *step.program,
    ]


def _program(arguments: list[str]) -> list[str]:
    """Returns the module or file for torchrun, which starts Python itself, with its arguments.

    Arguments that do not name a program are options of ddp_hpc.train.
    """
    words = list(arguments)
    if words and _PYTHON.fullmatch(PurePosixPath(words[0]).name):
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
        if not words:
            return _TRAINER
        if words[0].startswith("-") and words[0] != "-m":
            raise RequestError(
                f"python {words[0]} was given; torchrun requires a module or a file; write -m MODULE or "
                "FILE.py"
            )
    elif not words or not (words[0] == "-m" or words[0].endswith(".py") or "/" in words[0]):
        return [*_TRAINER, *words]
    if words[0] == "-m" and not "".join(words[1:2]):
        raise RequestError("-m was given without a module; write -m MODULE")
    return words


def _ranks_per_node(environ: Mapping[str, str]) -> str:
    given = environ.get("DDP_HPC_RANKS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE")
    number = given or str(gpus_here(environ))
    return "1" if number == "0" else number


def _is_surplus(environ: Mapping[str, str]) -> bool:
    """Returns whether this task has nothing to do, since another task of this node starts all ranks.

    Raises:
        RequestError: an MPI launcher started several tasks on this node. A surplus task of an MPI job cannot
            just exit, since the other tasks would wait for it in MPI_Init.
    """
    local = environ.get("SLURM_LOCALID") or "0"
    if local != "0":
        # For example, `srun --nodes=2` in an allocation of 4 tasks starts 2 tasks on each node.
        sys.stderr.write(
            f"torchrun_script.sh: task SLURM_LOCALID={local} on {short_hostname()} has nothing to do: "
            "task 0 starts all ranks of the node\n"
        )
        return True
    for size, rank in _SURPLUS_TASKS.items():
        if (environ.get(size) or "1") != "1":
            if (environ.get(rank) or "0") != "0":
                sys.exit(EXIT_WRONG_REQUEST)  # task 0 of the node reports the error
            raise RequestError(
                f"{size}={environ[size]}: one torchrun agent starts all ranks of a node; "
                "run this script once per node: mpiexec -n NODES --ppn 1"
            )
    return False


def main() -> None:
    """Runs the step of this node; see the module's docstring."""
    try:
        if _is_surplus(os.environ):
            return
        set_umask(os.environ)
        step = plan_step(sys.argv[1:], os.environ)
    except RequestError as error:
        sys.stderr.write(f"error: torchrun_script.sh on {short_hostname()}: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(run_step(step, os.environ))


if __name__ == "__main__":
    main()
