"""The end of a run that failed or stopped early: one line for the whole job, and its exit code.

No torch: what goes wrong before it is imported ends here too.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ddp_hpc.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    DdpHpcError,
    RendezvousError,
    ReportedElsewhereError,
)
from ddp_hpc.training.claim import Claim
from ddp_hpc.training.stopping import SIGNALS
from ddp_hpc.world.comm import abort_mpi, finalize_mpi
from ddp_hpc.world.launch_env import present_launchers
from ddp_hpc.world.once import say_once_a_node
from ddp_hpc.world.topology import World, short_hostname

if TYPE_CHECKING:
    from ddp_hpc.training.failure import FailureWatch
    from ddp_hpc.training.heartbeat import Heartbeat
    from ddp_hpc.training.survival import Survival

_SIGTERM_EXIT = 128 + signal.SIGTERM


@dataclass
class Parts:
    """What of a run is there so far, for the words and the deeds of its end."""

    world: World | None = None
    watch: FailureWatch | None = None
    heart: Heartbeat | None = None
    survival: Survival | None = None
    in_script: bool = False
    """It is someone's own program: alone, it ends as Python programs end."""

    @property
    def is_alone(self) -> bool:
        """Whether this process has no other ranks beside it, as far as is known."""
        return self.world.world_size == 1 if self.world is not None else not present_launchers(os.environ)

    def last_words(self, text: str) -> NoReturn:
        """The end of a process that SIGKILL is about to meet. Called in a thread."""
        self._end_from_thread(text, _claim(DdpHpcError(text), self, together=False))

    def on_lost(self, text: str) -> NoReturn:
        """The end where the heartbeat has lost a rank. Called in its thread."""
        # Where rank 0 is lost the store is too: nobody can be asked who speaks.
        is_rank_0 = self.world is not None and self.world.rank == 0
        claim = _claim(DdpHpcError(text), self, together=False) if is_rank_0 else Claim.ALONE
        self._end_from_thread(text, claim)

    def is_lost(self) -> bool:
        """Whether another rank failed and this one is to end without a word."""
        return self.watch is not None and self.watch.heard

    def _end_from_thread(self, text: str, claim: Claim) -> NoReturn:
        """The end where the main thread may never return from a collective."""
        speak(claim, text, self.world)
        if self.survival is not None:
            self.survival.failed(text, again=True)
        # Several may come to this at once: whoever speaks is not to be aborted before.
        abort_mpi(EXIT_FAILED, patience_s=1.0 if claim is Claim.LATE else 0.0)
        _leave(EXIT_FAILED)


def on_signal(signum: int, frame: object) -> NoReturn:
    """The handler until the training takes signals over."""
    del frame
    # An exception, so that a half-made data file is removed on the way out.
    raise SystemExit(128 + signum)


def end_stopped(world: World) -> NoReturn:
    """Ends a process whose run stopped early on purpose, its state saved. Collective.

    torchrun would start again what ends with another code than 0: not for it.
    """
    _ignore_signals()
    finalize_mpi()
    # Launchers give the largest code, or all of them ORed. Rank 0 ends last: a launcher that ends the
    # others because of it finds nobody.
    # Hydra gives one rank's code once they have left MPI: seen with MPICH 5.0, 75 and 0 gave either.
    all_say_it = world.launcher.startswith("hydra")
    _leave(EXIT_AGAIN if world.rank == 0 or all_say_it else EXIT_DONE)


def fail(error: BaseException, parts: Parts, timeout_s: float) -> NoReturn:
    """Says once for the whole job what happened here, and ends the other ranks.

    The process ends by `os._exit`: an interpreter that is taken down calls into
    threads and communicators whose other side may be gone.

    Raises:
        BaseException: the error itself, in a script that is alone: it may be a test or a notebook.
            Errors of this package become SystemExit there.
    """
    _ignore_signals()
    # torch's handler raises wherever it is called, here too, when the workers of --workers end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code, text = verdict(error, parts, timeout_s)
    if parts.heart is not None:
        parts.heart.close()  # or the others would count this rank as gone without a word
    together = isinstance(error, DdpHpcError) and error.everywhere
    if parts.in_script and parts.is_alone:
        _end_alone(error, parts, code, text)
    claim = _claim(error, parts, together)
    if claim is Claim.LATE and code == _SIGTERM_EXIT:
        code = EXIT_FAILED  # our own watch sent that signal
    speak(claim, text, parts.world)
    if parts.survival is not None and claim is not Claim.LATE and code == EXIT_FAILED:
        parts.survival.failed(text.splitlines()[-1], again=_is_lost_contact(error, timeout_s))
    if together:
        # All ranks are here: nobody has to be torn out of a wait.
        if parts.watch is not None:
            parts.watch.close()
        finalize_mpi()
        _leave(code)
    if parts.world is not None and parts.world.launcher == "torchrun" and claim is not Claim.LATE:
        _tell_torchrun(error)
    # MPI_Finalize would wait for ranks that are stuck in a collective: they are ended instead.
    abort_mpi(code, patience_s=5.0 if claim is Claim.LATE else 0.0)
    _leave(code)


def _end_alone(error: BaseException, parts: Parts, code: int, text: str) -> NoReturn:
    if parts.survival is not None and code == EXIT_FAILED:
        parts.survival.failed(text.splitlines()[-1], again=False)
    if isinstance(error, DdpHpcError):
        speak(Claim.FIRST, text, parts.world)
        raise SystemExit(code) from error
    raise error


def speak(claim: Claim, text: str, world: World | None) -> None:
    """One line; a traceback, which has its own label, as it is."""
    worded = text if "\n" in text else f"error: {text}"
    if claim is Claim.ALONE:
        say_once_a_node(f"[{short_hostname()}] {worded}", os.environ)
    elif claim is Claim.FIRST:
        prefix = world.prefix if world is not None and world.world_size > 1 else ""
        # One write, so that lines of different ranks do not mix. A full disk does not keep it from its end.
        with contextlib.suppress(OSError, AttributeError):
            sys.stderr.write(f"{prefix}{worded}\n")
            sys.stderr.flush()


def verdict(error: BaseException, parts: Parts, timeout_s: float) -> tuple[int, str]:
    """Exit code and words for an error."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        if code - 128 in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            name = signal.Signals(code - 128).name
            return code, f"stopped by {name} (scancel, qdel, the walltime, or the launcher)"
        if isinstance(error.code, str):  # sys.exit("words") has exit code 1
            return EXIT_FAILED, error.code
        return code, f"a rank ended itself with exit code {code}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if "is killed by signal: Terminated" in str(error):
        # A worker of --workers got the job's SIGTERM a moment before this process did.
        return verdict(SystemExit(_SIGTERM_EXIT), parts, timeout_s)
    if isinstance(error, DdpHpcError):
        return error.exit_code, str(error)
    return EXIT_FAILED, _describe(error, parts, timeout_s)


def _claim(error: BaseException, parts: Parts, together: bool) -> Claim:
    """Whether this rank speaks: of several that fail, one."""
    if isinstance(error, ReportedElsewhereError):
        return Claim.LATE
    if parts.world is None:
        return Claim.ALONE
    if together or parts.world.world_size == 1:
        return Claim.FIRST
    return parts.watch.claim() if parts.watch is not None else Claim.ALONE


def _describe(error: BaseException, parts: Parts, timeout_s: float) -> str:
    """The whole traceback of an error that nobody foresaw: it is a bug, or the user's own code.

    That another rank went away is foreseen, and takes one line.
    """
    import traceback

    if "ddp_hpc.training.loader" in sys.modules:
        from ddp_hpc.training.loader import explain_lost_worker

        if text := explain_lost_worker(error):
            return text
    if parts.watch is not None:
        from ddp_hpc.training.failure import explain_lost_contact

        if text := explain_lost_contact(error, timeout_s):
            gone = parts.heart.who_is_gone() if parts.heart is not None else ""
            return f"{gone} is gone: {text}" if gone else text
    stack = _without_context_managers(error.__traceback__)
    return "".join(traceback.format_exception(error.with_traceback(stack))).rstrip()


def _without_context_managers(stack: TracebackType | None) -> TracebackType | None:
    """The traceback from the body of a `with` on, without the managers that the error passed through."""
    inner = stack
    while inner is not None and inner.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        inner = inner.tb_next
    return inner or stack


def _is_lost_contact(error: BaseException, timeout_s: float) -> bool:
    if "torch" not in sys.modules:
        return False
    from ddp_hpc.training.failure import explain_lost_contact

    return isinstance(error, RendezvousError) or bool(explain_lost_contact(error, timeout_s))


def _ignore_signals() -> None:
    """Slurm sends TERM twice at the walltime, and job scripts hand on USR1: none may cut the end short."""
    for sig in SIGNALS:
        signal.signal(sig, signal.SIG_IGN)


def _tell_torchrun(error: BaseException) -> None:
    """Puts the error where torchrun's agent looks for the root cause; else it names whoever ended first."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
