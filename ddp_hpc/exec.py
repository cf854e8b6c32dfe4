"""`python -m ddp_hpc.exec PROGRAM`: runs an unchanged program as one rank under any launcher.

It detects the world, exchanges rank 0's address with the other ranks, and replaces itself with the program.
The program gets the variables that torchrun would set, so `init_process_group()` works unchanged. It remains
as the parent of the program on rank 0, to warn if the ranks work separately, and on all ranks of a job with a
supervisor, to record how the program ends, to write its output to the log of the rank, and to report where
the program is when the run hangs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ddp_hpc.base.errors import EXIT_INTERRUPTED, DdpHpcError, ReportedElsewhereError, RequestError
from ddp_hpc.base.process_control import set_umask
from ddp_hpc.discovery.listening_ports import sockets_of
from ddp_hpc.discovery.node_check_request import run_check_if_requested
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.rank_output import open_output
from ddp_hpc.discovery.rank_program import Recording, end_like, run_as_child
from ddp_hpc.discovery.separate_ranks import SeparateRanks
from ddp_hpc.discovery.silent_rank import watch_for_silence
from ddp_hpc.discovery.visible_gpus import correct_visible_gpus
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.torchrun.environment import make_torchrun_environment
from ddp_hpc.training.process_group.flight_recorder import turn_on_flight_recorder


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the program; on an error, prints one line and exits with its code."""
    run_check_if_requested(os.environ)
    program = sys.argv[1:] if argv is None else argv
    if program[:1] == ["--"]:
        program = program[1:]
    try:
        run_program(program, dict(os.environ))
    except ReportedElsewhereError as error:
        sys.exit(error.exit_code)
    except DdpHpcError as error:
        print_once_per_node(f"[{short_hostname()}] error: {error}", os.environ)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def run_program(program: list[str], environ: dict[str, str]) -> NoReturn:
    """Runs the program, and ends with its exit code. Collective: every rank must call this.

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
    if corrected := correct_visible_gpus(environ):
        print_once_per_node(f"[{short_hostname()}] warning: {corrected}", environ)
    torchrun = make_torchrun_environment(environ)
    environ = {**environ, **torchrun.variables}
    watch = None
    if torchrun.world.rank == 0 and (port := torchrun.exchanged_port) is not None:
        # mpiexec leaves some of its sockets open.
        watch = SeparateRanks(torchrun.world.world_size, port, sockets_of(os.getpid()), environ)
    try:
        # torchrun, which needs no variables, starts failed ranks again: their ends say nothing about the job.
        recording = _recording(environ) if torchrun.variables else None
        output = open_output(environ, torchrun.world.rank)
        silence = watch_for_silence(environ, torchrun.world)
        if silence is not None:
            turn_on_flight_recorder(environ)
        if recording is not None or watch is not None or output is not None:
            end_like(run_as_child(path, program, environ, recording, watch, output, silence))
        # Python ignores these signals, and the program would inherit that.
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        os.execve(path, program, environ)  # noqa: S606 - an argv list
    except OSError as error:
        raise RequestError(
            f"cannot start {path} ({error.strerror}); check that the file is an executable program"
        ) from None


def _recording(environ: Mapping[str, str]) -> Recording | None:
    """Returns how the end of this rank is recorded; None outside a job with a supervisor."""
    attempt, run_dir = environ.get("DDP_HPC_THIS_ATTEMPT", ""), environ.get("DDP_HPC_RUN_DIR", "")
    if not attempt or not run_dir:
        return None
    return Recording(run_dir=Path(run_dir), attempt=attempt, rank=int(environ["RANK"]))


if __name__ == "__main__":
    main()
