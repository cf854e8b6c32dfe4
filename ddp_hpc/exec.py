"""`python -m ddp_hpc.exec PROGRAM`: runs an unchanged program as one rank under any launcher.

It detects the world, exchanges rank 0's address with the other ranks, and replaces itself with the program.
The program gets the variables that torchrun would set, so `init_process_group()` works unchanged. MPI is
not initialised here: under MPICH's mpiexec a process can do that only once, and the program may need it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ddp_hpc.discovery.launcher_environment import ADDED_BY_EXEC, Environ
from ddp_hpc.discovery.listening_ports import listens, sockets_of
from ddp_hpc.discovery.once_per_node import print_once_per_node
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.errors import (
    EXIT_INTERRUPTED,
    DdpHpcError,
    LaunchError,
    RendezvousError,
    ReportedElsewhereError,
    RequestError,
)
from ddp_hpc.rendezvous.address import LAUNCH_ID, LOOPBACK, read_port
from ddp_hpc.rendezvous.connect_ranks import rendezvous
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.rendezvous.torchrun_endpoint import reserve_port

_TIMEOUT = "DDP_HPC_INIT_TIMEOUT_S"
_TIMEOUT_S = 300.0
_GOODBYE_S = 10.0
# Importing torch can take several seconds, and reading a model several minutes.
_LISTEN_LIMIT_S = 300.0
_POLL_S, _POLL_LATER_S, _LATER_S = 0.2, 2.0, 30.0


def main(argv: list[str] | None = None) -> NoReturn:
    """Replaces this process with the program; on an error, prints one line and exits with its code."""
    program = sys.argv[1:] if argv is None else argv
    if program[:1] == ["--"]:
        program = program[1:]
    try:
        replace_process(program, dict(os.environ))
    except ReportedElsewhereError as error:
        sys.exit(error.exit_code)
    except DdpHpcError as error:
        print_once_per_node(f"[{short_hostname()}] error: {error}", os.environ)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def replace_process(program: list[str], environ: dict[str, str]) -> NoReturn:
    """Replaces this process with the program. Collective: every rank must call this.

    Raises:
        RequestError: the program does not exist.
        LaunchError: the rank cannot be determined, or two sources contradict each other.
        RendezvousError: the ranks could not connect to each other.
    """
    if not program:
        raise RequestError("no program was given; use: ddp-hpc exec -- python train.py")
    path = shutil.which(program[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise RequestError(f"{program[0]} was not found; use a program on the PATH, or its path")
    given = _world_variables(environ)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python and inherited by programs
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(path, program, {**environ, **given})  # noqa: S606 - an argv list
    except OSError as error:
        raise RequestError(f"cannot start {path} ({error.strerror}); check the file") from None


def _world_variables(environ: dict[str, str]) -> dict[str, str]:
    """Returns the variables that are added to the program's environment. Collective."""
    world = discover(environ, "auto", lambda *_: None)
    if world.launcher == "torchrun":
        return {}
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        host, port, hosts = environ["MASTER_ADDR"], read_port(environ), []
    elif world.world_size == 1:
        host, port, hosts = LOOPBACK, _reserved_port(), [world.hostname]
    else:
        host, port, hosts = _exchange_address(world, environ)
        if world.rank == 0:
            _warn_if_no_process_group(port, world.world_size)
    given = {
        "RANK": world.rank,
        "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": environ.get(LAUNCH_ID) or "ddp-hpc",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Rank 0 serves torch's store on MASTER_PORT.
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    node_rank, num_nodes = world.node_rank, world.num_nodes
    if hosts:
        names = list(dict.fromkeys(hosts))
        node_rank, num_nodes = names.index(world.hostname), len(names)
    if node_rank is not None:
        given |= {"GROUP_RANK": node_rank, "NODE_RANK": node_rank}
    if num_nodes is not None:
        given["GROUP_WORLD_SIZE"] = num_nodes
    # Variables that the user has set were compared during discovery, and are kept.
    added = {name: str(value) for name, value in given.items() if name not in environ}
    return {**added, ADDED_BY_EXEC: ",".join(added)}


def _exchange_address(world: World, environ: dict[str, str]) -> tuple[str, int, list[str]]:
    """Returns rank 0's address, its port for torch's store, and the host of each rank. Collective."""
    if LAUNCH_ID not in environ and not world.is_multi_node:
        # All ranks of one node have the same parent: mpiexec, or its proxy.
        environ = {**environ, LAUNCH_ID: _parent_id()}
    timeout_s = _timeout_s(environ)
    prefix = f"[rank {world.rank} {world.hostname}] "
    with time_limit(timeout_s + 30.0, prefix) as watchdog:
        try:
            endpoint = rendezvous(world, environ, timeout_s, watchdog)
        except LaunchError:
            raise LaunchError(
                f"{world.launcher} started {world.world_size} ranks on several nodes, but sets no variable "
                "that identifies the launch; use ddp-hpc launch or a rendered script, or export "
                f"{LAUNCH_ID} with a unique value before mpiexec"
            ) from None
        assert endpoint is not None
        comm = StoreComm(endpoint.store, world.rank, world.world_size, timeout_s)
        hosts = comm.allgather(world.hostname)
        port = comm.bcast(_reserved_port() if world.rank == 0 else 0)
        comm.barrier("the start of the program")
        if world.rank == 0:
            with suppress(RendezvousError):
                endpoint.store.goodbye(_GOODBYE_S)
        endpoint.close()
    return endpoint.host, port, hosts


def _timeout_s(environ: Environ) -> float:
    text = environ.get(_TIMEOUT, "")
    try:
        timeout_s = float(text) if text else _TIMEOUT_S
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise RequestError(f"{_TIMEOUT}={text[:80]!r} is not a positive number of seconds; use e.g. 300")
    return timeout_s


def _reserved_port() -> int:
    """Returns a port that only torch's store can use: the program inherits the socket that reserves it."""
    reserved = reserve_port()
    reserved.set_inheritable(True)
    port: int = reserved.getsockname()[1]
    reserved.detach()
    return port


def _parent_id() -> str:
    """Returns an id of the parent process that is unique even if its process id is reused."""
    pid = os.getppid()
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return f"parent-{socket.gethostname()}-{pid}-{fields[19]}"
    return f"parent-{socket.gethostname()}-{pid}"


def _warn_if_no_process_group(port: int, num_ranks: int) -> None:
    """Starts a process that prints a warning if rank 0's program never opens a port for other ranks."""
    sys.stderr.flush()
    program = os.getpid()
    inherited = sockets_of(program)  # mpiexec leaves some of its sockets open
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():  # the program must not have a child that it did not start
        os._exit(0)
    try:
        os.closerange(3, 4096)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
        if not _listened_in_time(program, port, inherited):
            text = (
                f"[{short_hostname()}] warning: {num_ranks} ranks were started, but rank 0's program has not "
                "opened a process group, so each rank may be training alone on the same data; call "
                "torch.distributed.init_process_group() in it (RANK, WORLD_SIZE and MASTER_ADDR are set), or "
                "use --env-style none if the program needs no process group\n"
            )
            os.write(2, text.encode())
    finally:
        os._exit(0)


def _listened_in_time(program: int, port: int, inherited: set[str]) -> bool:
    """Returns whether the program or its children listened on a port before its end and the time limit."""
    try:
        ended = os.pidfd_open(program)
    except OSError:
        return False
    begin_s = time.monotonic()
    while (ran_s := time.monotonic() - begin_s) < _LISTEN_LIMIT_S:
        if listens(program, port, inherited):
            return True
        if select.select([ended], [], [], _POLL_S if ran_s < _LATER_S else _POLL_LATER_S)[0]:
            return False
    return False


if __name__ == "__main__":
    main()
