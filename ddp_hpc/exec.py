"""`python -m ddp_hpc.exec PROGRAM`: runs an unchanged program as one rank under any launcher.

It detects the world, exchanges rank 0's address with the other ranks, and replaces itself with the program.
The program gets the variables that torchrun would set, so `init_process_group()` works unchanged.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from typing import NoReturn

from ddp_hpc.discovery.listening_ports import listens, sockets_of
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.world import World, short_hostname
from ddp_hpc.errors import EXIT_INTERRUPTED, DdpHpcError, ReportedElsewhereError, RequestError
from ddp_hpc.process_control import set_umask
from ddp_hpc.rendezvous.make_torchrun_environment import make_torchrun_environment

# How long to wait until the program opens a port. Importing torch can take several seconds, and reading a
# model several minutes.
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
        raise RequestError(
            f"{program[0]} was not found; give the name of a program on the PATH, or the path of a program"
        )
    set_umask(environ)
    given = make_torchrun_environment(environ, _warn_if_no_process_group)
    for ignored in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these signals, and the program would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(path, program, {**environ, **given})  # noqa: S606 - an argv list
    except OSError as error:
        raise RequestError(
            f"cannot start {path} ({error.strerror}); check that the file is an executable program"
        ) from None


def _warn_if_no_process_group(world: World, port: int) -> None:
    """Starts a process on rank 0 that prints a warning if the program of this rank does not open a port for
    the other ranks.
    """
    if world.rank:
        return
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
                f"[{short_hostname()}] warning: {world.world_size} ranks were started, but rank 0's program "
                "has not opened a process group, so each rank may be training alone on the same data; call "
                "torch.distributed.init_process_group() in the program (RANK, WORLD_SIZE and MASTER_ADDR are "
                "set), or use --env-style none if the program needs no process group\n"
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
