"""Starts the launcher, forwards signals to its ranks, and waits for its end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from ddp_hpc.base import process_control
from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers import run_command

Action = Literal["wait", "terminate", "kill"]
GUARD = "ddp_hpc.supervisor.guard"
"""The module that runs on another node beside the ranks, and requeues the job if this node dies."""
_LOOK_S = 0.5
_KILLED_S = 5.0
# A busy controller must not delay the end of the job.
_SEND_LIMIT_S = 10.0
# scancel does not reach the ranks before srun has created its step.
_STEP_STARTS_S = 3.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# SIGCONT is not handled: Slurm sends it after other signals.
_HANDLED = {*_FORWARDED, signal.SIGCHLD}


@dataclass(frozen=True)
class LauncherEnd:
    """How the launcher ended."""

    code: int
    """The exit code as a shell reports it: 128 + N if signal N ended the launcher."""
    was_signalled_early: bool = False
    """Whether the signal of `LauncherWatch.early_signal` was sent."""
    was_ended: bool = False
    """Whether this process ended the launcher, because it did not end by itself."""
    was_killed: bool = False
    """Whether something else has killed the launcher, so that its ranks may still be running."""
    may_have_left_ranks: bool = False
    """Whether ranks may still be running on other nodes."""
    lost_nodes: tuple[str, ...] = ()
    """The nodes that did not answer, because of which the launcher was ended."""
    silent_s: float = 0.0
    """The time since the last answer of the first of these nodes."""
    has_hung: bool = False
    """Whether the launcher was ended because its ranks hung."""

    @property
    def saw_sigkill(self) -> bool:
        """Whether SIGKILL has ended the launcher, or a rank or an agent of torchrun whose code it reports."""
        return self.code == 128 + signal.SIGKILL


class LauncherWatch(Protocol):
    """What the supervisor does while the launcher runs."""

    forwards_term: str
    """A command that sends a signal to the ranks. Without it, the launcher gets SIGTERM."""

    def on_stop(self) -> None:
        """Called when this process receives SIGTERM or SIGINT."""

    def early_signal(self) -> str:
        """Returns the signal that the ranks must get now, such as `USR1`; empty if none is due."""

    def action(self) -> Action:
        """Returns whether to end the launcher."""

    def orphans_s(self) -> float:
        """Returns the time in which ranks can save their state after their launcher has ended."""


def run_launcher(
    argv: Sequence[str], environ: Mapping[str, str], watch: LauncherWatch, beside: Collection[int] = ()
) -> LauncherEnd:
    """Runs the launcher until it ends, and returns how it ended. The handled signals stay blocked.

    The other descendants of this process are then ended, except the processes `beside` and what they have
    started.

    Raises:
        RequestError: the launcher cannot be started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    process_control.adopt_orphans()
    try:
        process = subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=_prepare_launcher
        )
    except OSError as error:
        raise RequestError(
            f"cannot start {argv[0]} ({error.strerror}); check the launch command in the job script"
        ) from None
    was_signalled_early = was_ended = False
    begin_s = time.monotonic()

    def send(name: str) -> None:
        if watch.forwards_term:
            time.sleep(max(0.0, begin_s + _STEP_STARTS_S - time.monotonic()))
        _send(process, name, watch.forwards_term)

    while process.poll() is None:
        received = signal.sigtimedwait(_HANDLED, _LOOK_S)
        if received is not None and received.si_signo in _FORWARDED:
            name = "USR1" if received.si_signo == signal.SIGUSR1 else "TERM"
            if name == "TERM":
                watch.on_stop()
            send(name)
        if name := watch.early_signal():
            send(name)
            was_signalled_early = True
        if (action := watch.action()) != "wait":
            was_ended = True
            if action == "terminate":
                process.terminate()
            else:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process can be unkillable
                    process.wait(_KILLED_S)
                break
    if signal.SIGTERM in signal.sigpending():  # the signal arrived after the launcher had ended
        watch.on_stop()
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    _end_orphans(watch.orphans_s(), beside)
    was_killed = code == -signal.SIGKILL and not was_ended
    return LauncherEnd(code if code >= 0 else 128 - code, was_signalled_early, was_ended, was_killed)


def _prepare_launcher() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    # Some PBS servers leave ranks running when the job's script is killed. These ranks would prevent the next
    # job from running.
    process_control.die_with_parent(signal.SIGTERM)


def _end_orphans(grace_s: float, beside: Collection[int]) -> None:
    """Ends ranks that are still running on this node after the launcher has ended, for example because it was
    killed. These ranks would keep the run directory in use, so the next job of the run could not start.
    """

    def others() -> set[int]:
        return {*beside, *run_command.running()}

    orphans = process_control.descendants(os.getpid(), without=others())
    process_control.send(signal.SIGTERM, orphans)
    killed = process_control.end_descendants(grace_s, others) if orphans else []
    # The guard ends with the launcher, but its srun waits for a node that was lost.
    killed = [line for line in killed if GUARD not in line]
    if killed:
        line = f"warning: killed processes that outlived the launcher: {', '.join(sorted(killed))[:400]}\n"
        with suppress(OSError):
            os.write(2, line.encode("utf-8", "replace"))
    # Another thread can wait for the end of a query to the scheduler, whose exit code must not be lost.
    process_control.reap_of(process.pid for process in orphans)


def _send(process: subprocess.Popen[bytes], name: str, forwards_term: str) -> None:
    if forwards_term:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                shlex.split(forwards_term.format(signal=name)),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SEND_LIMIT_S,
                check=False,
            )
    else:
        process.terminate()  # not every launcher forwards SIGUSR1 to the ranks
