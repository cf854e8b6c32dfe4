"""`python -m ddp_hpc.exec PROGRAM`: any program, as the rank that its launcher made of it.

Finds the world and meets the other ranks, then becomes the program, with the variables that torchrun
would give it: `init_process_group()` works unchanged. MPI is not started: a program under MPICH's mpiexec
may do that once, and the program may want to.
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
from ddp_hpc.rendezvous.address import LAUNCH, LOOPBACK, read_port
from ddp_hpc.rendezvous.connect_ranks import rendezvous
from ddp_hpc.rendezvous.store_comm import StoreComm
from ddp_hpc.rendezvous.torchrun_endpoint import hold_port

_TIMEOUT = "DDP_HPC_INIT_TIMEOUT_S"
_TIMEOUT_S = 300.0
_FAREWELL_S = 10.0
# torch takes some seconds to be imported, and a model some minutes to be read.
_NOTE_AFTER_S = 300.0
_POLL_S, _POLL_LATER_S, _LATER_S = 0.2, 2.0, 30.0


def main(argv: list[str] | None = None) -> NoReturn:
    """Becomes the program, or ends with one line and an exit code."""
    program = sys.argv[1:] if argv is None else argv
    if program[:1] == ["--"]:
        program = program[1:]
    try:
        become(program, dict(os.environ))
    except ReportedElsewhereError as error:
        sys.exit(error.exit_code)
    except DdpHpcError as error:
        print_once_per_node(f"[{short_hostname()}] error: {error}", os.environ)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def become(program: list[str], environ: dict[str, str]) -> NoReturn:
    """Replaces this process by the program. Collective: every rank must call this.

    Raises:
        RequestError: there is no such program.
        LaunchError: the rank cannot be told, or is told twice and differently.
        RendezvousError: the ranks did not find each other.
    """
    if not program:
        raise RequestError("no program was given; use: ddp-hpc exec -- python train.py")
    path = shutil.which(program[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise RequestError(f"{program[0]} was not found; use a program on the PATH, or its path")
    given = _world_variables(environ)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, which a program would inherit
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(path, program, {**environ, **given})  # noqa: S606 - an argv list
    except OSError as error:
        raise RequestError(f"cannot start {path} ({error.strerror}); check the file") from None


def _world_variables(environ: dict[str, str]) -> dict[str, str]:
    """What the program gets besides. Collective."""
    world = discover(environ, "auto", lambda *_: None)
    if world.launcher == "torchrun":
        return {}
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        host, port, hosts = environ["MASTER_ADDR"], read_port(environ), []
    elif world.world_size == 1:
        host, port, hosts = LOOPBACK, _held_port(), [world.hostname]
    else:
        host, port, hosts = _met(world, environ)
        if world.rank == 0:
            _watch(port, world.world_size)
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
        "TORCHELASTIC_RUN_ID": environ.get(LAUNCH) or "ddp-hpc",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Rank 0 serves torch's store at MASTER_PORT.
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
    # What the user has set by hand was compared, and stays.
    added = {name: str(value) for name, value in given.items() if name not in environ}
    return {**added, ADDED_BY_EXEC: ",".join(added)}


def _met(world: World, environ: dict[str, str]) -> tuple[str, int, list[str]]:
    """Rank 0's address, its port for torch's store, and the host of each rank. Collective."""
    if LAUNCH not in environ and not world.is_multi_node:
        # Of one node's ranks all have the same parent: mpiexec, or its proxy.
        environ = {**environ, LAUNCH: _parent()}
    timeout_s = _timeout_s(environ)
    prefix = f"[rank {world.rank} {world.hostname}] "
    with time_limit(timeout_s + 30.0, prefix) as watchdog:
        try:
            endpoint = rendezvous(world, environ, timeout_s, watchdog)
        except LaunchError:
            raise LaunchError(
                f"{world.launcher} started {world.world_size} ranks on several nodes and tells them "
                "nothing by which to meet; start them with ddp-hpc launch or a rendered script, or export "
                f"{LAUNCH} with a word that only this launch has, in front of mpiexec"
            ) from None
        assert endpoint is not None
        comm = StoreComm(endpoint.store, world.rank, world.world_size, timeout_s)
        hosts = comm.allgather(world.hostname)
        port = comm.bcast(_held_port() if world.rank == 0 else 0)
        comm.barrier("the start of the program")
        if world.rank == 0:
            with suppress(RendezvousError):
                endpoint.store.goodbye(_FAREWELL_S)
        endpoint.close()
    return endpoint.host, port, hosts


def _timeout_s(environ: Environ) -> float:
    text = environ.get(_TIMEOUT, "")
    try:
        timeout_s = float(text) if text else _TIMEOUT_S
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise RequestError(f"{_TIMEOUT}={text[:80]!r} is not a time; use seconds, such as 300")
    return timeout_s


def _held_port() -> int:
    """A port that torch's store can have, and nobody else: the program inherits the socket that holds it."""
    holder = hold_port()
    holder.set_inheritable(True)
    port: int = holder.getsockname()[1]
    holder.detach()
    return port


def _parent() -> str:
    """A name of the parent process that no other process of this machine ever had."""
    pid = os.getppid()
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return f"parent-{socket.gethostname()}-{pid}-{fields[19]}"
    return f"parent-{socket.gethostname()}-{pid}"


def _watch(port: int, num_ranks: int) -> None:
    """A process of its own says so where rank 0's program never serves anything that others could join."""
    sys.stderr.flush()
    program = os.getpid()
    inherited = sockets_of(program)  # mpiexec leaves some of its own open
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():  # the program is not to find a child that it did not start
        os._exit(0)
    try:
        os.closerange(3, 4096)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
        if not _seen_to_listen(program, port, inherited):
            text = (
                f"[{short_hostname()}] warning: {num_ranks} ranks were started, and rank 0's program has "
                "opened no process group: if it is a training, each rank trains alone, on the same data; let "
                "it call torch.distributed.init_process_group(), for which RANK, WORLD_SIZE and MASTER_ADDR "
                "are set; where none is needed: --env-style none\n"
            )
            os.write(2, text.encode())
    finally:
        os._exit(0)


def _seen_to_listen(program: int, port: int, inherited: set[str]) -> bool:
    """Whether the program, or what it started, listened for the others before its end, or within the time."""
    try:
        ended = os.pidfd_open(program)
    except OSError:
        return False
    begin_s = time.monotonic()
    while (ran_s := time.monotonic() - begin_s) < _NOTE_AFTER_S:
        if listens(program, port, inherited):
            return True
        if select.select([ended], [], [], _POLL_S if ran_s < _LATER_S else _POLL_LATER_S)[0]:
            return False
    return False


if __name__ == "__main__":
    main()
