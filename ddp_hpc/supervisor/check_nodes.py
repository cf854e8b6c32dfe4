"""Checks the nodes before the ranks start: runs the launch line with the check in place of the program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.units import counted
from ddp_hpc.discovery.node_check_request import EARLIER_LAUNCHES, NODE_CHECK
from ddp_hpc.node_check.results import LAUNCH, RESULTS, read_results
from ddp_hpc.node_check.verdict import Verdict, judge
from ddp_hpc.queue.failed_nodes import record_failed_node
from ddp_hpc.render.launch_lines import NOT_CHECKED, runs_node_check
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launch import Launch
from ddp_hpc.supervisor.launcher_process import Action, run_launcher
from ddp_hpc.supervisor.run_files import RunFiles
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.spare_nodes import NO_ANSWER

_DIRECTORY = "node_check"
_RANKS_LEFT = "the launcher was killed, and its ranks may still be running"
# The ranks wait this long for each other; without the variable, it is that of the program, up to hours.
_INIT_TIMEOUT_S = 60
# The whole check, with the start of the launcher and of Python on a busy file system.
_LIMIT_S = 180.0
# A launcher can wait for a rank that hangs after the results have been written.
_END_S = 10.0
_KILL_S = 5.0
_ORPHANS_S = 2.0
_RANKS_END_S = 5.0


def check_nodes(
    launch: Launch, clock: JobClock, files: RunFiles, settings: Settings, *, must_end_ranks: bool = False
) -> str:
    """Checks the nodes of the ranks before a start with several nodes, and replaces bad ones by spare ones,
    which are checked, too. Returns why the ranks cannot be started, or nothing.

    The check kills processes of earlier starts. With `must_end_ranks`, such processes may exist, and the
    ranks can only be started after a complete check.
    """
    if not must_end_ranks and (settings.node_check == "off" or len(launch.nodes) < 2):
        return ""
    if must_end_ranks and not (len(launch.nodes) > 1 and runs_node_check(launch.argv)):
        return _RANKS_LEFT
    begin_s = time.monotonic()
    try:
        return _check_and_replace(launch, clock, files, settings, must_end_ranks=must_end_ranks)
    finally:
        launch.checks_s = time.monotonic() - begin_s


def _check_and_replace(
    launch: Launch, clock: JobClock, files: RunFiles, settings: Settings, *, must_end_ranks: bool
) -> str:
    if not runs_node_check(launch.argv):
        complain(NOT_CHECKED, kind="warning")
        return ""
    while True:
        begin_s = time.monotonic()
        lost, verdict = _run_check(launch, clock, files)
        if clock.stopped_s is not None:
            return ""
        if must_end_ranks and not lost and not verdict.is_complete:
            why = next(iter(verdict.common or verdict.bad.values()), "not all ranks have started")
            return f"{_RANKS_LEFT}, because the node check, which kills them, was incomplete: {why}"
        for text in verdict.common:
            complain(f"node check: {text}; no node is replaced", kind="warning")
        bad = {**dict.fromkeys(lost, NO_ANSWER), **_unhealthy(launch), **verdict.bad}
        if not bad:
            if not verdict.common:
                took_s = time.monotonic() - begin_s
                say(f"ddp-hpc: {counted(len(launch.nodes), 'node')} checked in {took_s:.0f} s")
            return ""
        if settings.node_check != "replace" or launch.pool is None:
            for node, why in bad.items():
                complain(f"node {node}: {why}", kind="warning")
        if settings.node_check != "replace" and not (must_end_ranks and lost):
            return ""
        if launch.pool is None:
            for node, why in bad.items():
                record_failed_node(files.path, node, why)
            node, why = next(iter(bad.items()))
            return f"node {node}: {why}; the job has no spare nodes"
        if why := launch.pool.replace(bad):
            return why


def _unhealthy(launch: Launch) -> dict[str, str]:
    """Returns what the site's own check says about nodes, unless it says it about all of them."""
    found = launch.job.unhealthy_nodes(launch.nodes)
    return found if len(found) < len(launch.nodes) else {}


def _run_check(launch: Launch, clock: JobClock, files: RunFiles) -> tuple[Sequence[str], Verdict]:
    """Returns the nodes that no longer answer, and the verdict on the others."""
    directory = files.path / _DIRECTORY
    variables = {
        NODE_CHECK: str(directory),
        EARLIER_LAUNCHES: " ".join(launch.launch_ids),
        "DDP_HPC_INIT_TIMEOUT_S": str(_INIT_TIMEOUT_S),
    }
    watch = _CheckWatch(launch, clock, directory)
    try:
        argv, environ = launch.command({**variables, "OMP_NUM_THREADS": "1"}, files)
        directory.mkdir(exist_ok=True)
        (directory / RESULTS).unlink(missing_ok=True)
        (directory / LAUNCH).write_text(environ["DDP_HPC_LAUNCH"], encoding="utf-8")
        launch.start_guard()
        end = run_launcher(argv, environ, watch, launch.beside)
    except (OSError, DdpHpcError) as error:  # the program cannot be started either, and says so then
        return (), Verdict(common=(f"it could not run: {error}",))
    if end.was_ended or end.was_killed:
        launch.job.end_ranks(_RANKS_END_S)
    if watch.lost_nodes:
        return watch.lost_nodes, Verdict()
    with suppress(DdpHpcError):  # a damaged file counts as none
        if (results := read_results(directory)) is not None:
            return (), judge(results, launch.nodes)
    how = f"did not end within {_LIMIT_S:.0f} s" if end.was_ended else f"exited with code {end.code}"
    return (), Verdict(common=(f"it could not run: {launch.launcher} {how} without results",))


def _has_results(directory: Path) -> bool:
    # A network file system can remember for a minute that a name did not exist, so the directory is listed.
    with suppress(OSError):
        return any(path.name == RESULTS for path in directory.iterdir())
    return False


class _CheckWatch:
    """Ends a launcher that waits for ranks that hang; see `LauncherWatch`."""

    def __init__(self, launch: Launch, clock: JobClock, directory: Path) -> None:
        self.forwards_term = launch.forwards_term
        self._pool, self._clock, self._directory = launch.pool, clock, directory
        self.lost_nodes: tuple[str, ...] = ()
        self._terminate_s = time.monotonic() + _LIMIT_S
        self._has_results = self._is_terminated = False

    def on_stop(self) -> None:
        """Asks the scheduler why SIGTERM was sent."""
        self._clock.stop()
        self._end_within(0.0)  # the rest of the time is needed to request another job

    def early_signal(self) -> str:
        """Returns nothing: there is nothing to save."""
        return ""

    def action(self) -> Action:
        """Returns whether to end the launcher."""
        if not self._has_results and _has_results(self._directory):
            self._has_results = True
            self._end_within(_END_S)
        if self._pool is not None and not self.lost_nodes and (lost := self._pool.lost()):
            self.lost_nodes = tuple(lost)
            self._end_within(0.0)
        if time.monotonic() < self._terminate_s:
            return "wait"
        action: Action = "kill" if self._is_terminated else "terminate"
        self._is_terminated = True
        self._terminate_s = time.monotonic() + _KILL_S
        return action

    def orphans_s(self) -> float:
        """Returns the time in which ranks can end after their launcher."""
        return _ORPHANS_S

    def _end_within(self, limit_s: float) -> None:
        self._terminate_s = min(self._terminate_s, time.monotonic() + limit_s)
