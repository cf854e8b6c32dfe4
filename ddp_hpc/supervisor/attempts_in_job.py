"""The attempts of one job: starts the launcher, and again after failures that a restart can repair."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

from ddp_hpc.base import process_control
from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.base.text_table import cut
from ddp_hpc.discovery.hostlist import expand_hostlist
from ddp_hpc.launch.rank_environment import (
    exported_names,
    launch_id,
    private_kernel_caches,
    short_tmpdir,
)
from ddp_hpc.launch.resolve_launcher import resolve
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.render.launch_lines import STEP_MODULE, STEP_SCRIPT
from ddp_hpc.schedulers.deadline import REPORTED_BY
from ddp_hpc.schedulers.running_job import RunningJob
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import say
from ddp_hpc.supervisor.launcher_process import LauncherEnd, run_launcher
from ddp_hpc.supervisor.restarts import Ended, why_no_restart
from ddp_hpc.supervisor.run_files import RunFiles, SeenState, array_run_dir
from ddp_hpc.supervisor.run_watch import RunWatch
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.settle import (
    EndedLauncher,
    Settled,
    settle,
    settle_as_before,
    settle_repeated,
    store,
    why_stopped,
)
from ddp_hpc.supervisor.spare_nodes import NodePool

# The final states of a run. torchrun's agents restart failed ranks, so only a complete run is final there.
_FINAL, _FINAL_WITH_TORCHRUN = State.ending_in("success", "stop", "failure"), State.ending_in("success")
# A restart takes about as long as the first start. Without a limit, srun waits for a node that has died.
_BEGIN_LEAST_S, _BEGIN_TIMES = 300.0, 3.0
# The log already contains the whole reason.
_REASON_CHARS = 120
# The limit for ending the ranks of a killed launcher.
_RANKS_END_S = 60.0
# The step on a node that has died stays in the list until Slurm has noticed the loss.
_RANKS_OF_LOST_NODE_END_S = 5.0


def run_attempts(
    attempt: Attempt, launch: Launch, clock: JobClock, files: RunFiles, settings: Settings
) -> Ended:
    """Runs the first attempt of this job, and others after failures that a restart can repair."""
    earlier: Ended | None = None
    last_saved: Ended | None = None
    for num_restarts in count():
        settled = _run_attempt(attempt, launch, clock, files, settings)
        ended = Ended(attempt, settled)
        if ended.has_progressed:
            last_saved = ended
        suspect = ended.suspected_node(earlier)
        is_replaced = bool(suspect) and launch.pool is not None and launch.pool.replace(suspect)
        if ended.repeats(earlier) and not is_replaced:
            return replace(ended, settled=settle_repeated(settled, files))
        if not ended.may_restart or not settings.restarts or not ended.has_begun_like(earlier):
            break
        why = why_no_restart(
            ended,
            earlier,
            last_saved,
            settings,
            num_restarts=num_restarts,
            left_s=clock.ranks_left_s - (settings.signal_lead_s or 0.0),
        )
        if launch.pool is not None:
            why = why or launch.pool.replace_silent()
        if stop := why_stopped(attempt, clock, files):  # the nodes were asked for some seconds
            ended = replace(ended, settled=replace(settled, stop=stop))
            break
        following = decisions.next_attempt(attempt, settled.after)
        if why := why or _why_not_recorded(following, files):
            say(f"ddp-hpc: the ranks are not started again: {why}")
            break
        earlier, attempt = ended, following
        reason = cut(settled.end.reason if settled.end is not None else settled.after.reason, _REASON_CHARS)
        begin = SeenState(State.RUNNING, following.first_step, f"attempt {following.number} begins")
        store(replace(begin, is_step_known=settled.after.is_step_known), files)
        say(
            f"ddp-hpc: restart {num_restarts + 1} of {settings.restarts} in this job"
            f"{decisions.at_step(attempt.first_step, ', from step ')}, since attempt "
            f"{earlier.attempt.number} failed{f': {reason}' if reason else ''}"
        )
    before = last_saved or earlier
    if before is None or not (ended.was_lost or not ended.has_begun_like(before)):
        return ended
    # A start that was refused is not in the list of attempts. In that of another job, nothing is changed.
    if not any(files.is_last(known.attempt) for known in (ended, earlier) if known is not None):
        return ended
    return replace(ended, settled=settle_as_before(before.settled, ended.settled.stop, files))


def _why_not_recorded(attempt: Attempt, files: RunFiles) -> str:
    """Records another attempt of this job; returns why this is not possible, or nothing."""
    try:
        files.begin_again(attempt)
    except DdpHpcError as error:  # the disk is full, for example
        return str(error)
    return ""


def _run_attempt(
    attempt: Attempt, launch: Launch, clock: JobClock, files: RunFiles, settings: Settings
) -> Settled:
    before, progress = files.state(), Progress(files.path / "progress", settings.progress)
    end = launch.run(
        {
            # The trainer copies this to `refused` if ranks of another attempt still use the run directory.
            "DDP_HPC_THIS_ATTEMPT": attempt.key,
            "DDP_HPC_PROGRESS_FILE": str(progress.file),
        },
        files,
        attempt,
    )
    if end.lost_nodes:
        host = end.lost_nodes[0]
        lost = AttemptEnd(cause=Cause.LOST_RANK, exit_code=1, reason=f"{host} does not answer", host=host)
        files.write_end(attempt, lost)
    return settle(
        EndedLauncher(
            launcher=launch.launcher,
            writes_state=launch.writes_state,
            end=end,
            attempt=attempt,
            before=before,
            progress=progress,
        ),
        clock,
        files,
        settings,
    )


class Launch:
    """The launch line of the job, and the variables of its ranks."""

    def __init__(
        self,
        argv: list[str],
        settings: Settings,
        environ: Mapping[str, str],
        job: RunningJob,
        clock: JobClock,
        script: str,
    ) -> None:
        self._argv, self._settings, self._environ = argv, settings, environ
        self._job, self._clock = job, clock
        self._exported = exported_names(script)
        self.launcher = Path(argv[0]).name
        self.writes_state = decisions.writes_its_state(argv)
        self._begin_limit_s: float | None = None
        self.pool: NodePool | None = None
        if settings.spare_nodes and (names := expand_hostlist(job.node_names())):
            self.pool = NodePool(names, settings.spare_nodes, job.watched_ports)
        self.run_dir = settings.run_dir
        if self.run_dir is not None and (index := settings.scheduler.inside_job.array_index(environ)):
            self.run_dir = array_run_dir(self.run_dir, index, script, settings.scheduler)

    def run(
        self, variables: Mapping[str, str], files: RunFiles | None, attempt: Attempt | None = None
    ) -> LauncherEnd:
        """Runs the launcher until it ends. `files` is None if the run is not resumed by other jobs."""
        settings = self._settings
        variables = {**self._variables(), **variables}
        environ = {**self._environ, **variables}
        argv, own_variables = resolve(
            self._argv, environ, [*self._exported, *variables], has_queue=settings.scheduler.has_queue
        )
        if self.pool is not None and files is not None:
            argv, of_nodes = self._job.on_nodes(argv, self.pool.nodes.used, files.path)
            own_variables |= of_nodes
        say(f"ddp-hpc: job {self._job.job_id}: {shlex.join(argv)}")
        uses_torchrun = bool({STEP_SCRIPT, STEP_MODULE} & {*self._argv})
        watch = RunWatch(
            self._clock,
            self.launcher,
            forwards_term=self._job.forwards_term if self.launcher == "srun" else "",
            files=files,
            attempt=attempt,
            begin_limit_s=self._begin_limit_s,
            find_lost_nodes=self.pool.lost if self.pool is not None else list,
            final_states=_FINAL_WITH_TORCHRUN if uses_torchrun else _FINAL,
            signal_name=settings.signal_name,
            signal_lead_s=settings.signal_lead_s,
            say=say,
        )
        self._start_guard()
        end = run_launcher(argv, {**environ, **own_variables}, watch)
        if end.was_killed and self._clock.stopped_s is None and not self._job.end_ranks(_RANKS_END_S):
            say(f"ddp-hpc: {self.launcher} was killed, and its ranks may still be running")
            end = replace(end, has_left_ranks=True)
        if watch.began_after_s is not None:
            self._begin_limit_s = max(_BEGIN_LEAST_S, _BEGIN_TIMES * watch.began_after_s)
        if watch.lost_nodes:
            self._job.end_ranks(_RANKS_OF_LOST_NODE_END_S)
        return replace(end, lost_nodes=watch.lost_nodes)

    def _start_guard(self) -> None:
        """Starts the process on another node that requeues the job if this node dies. It ends as an orphan of
        the launcher.
        """
        if self.pool is None:
            return
        first, node = self.pool.names[0], self.pool.node_of_guard
        guard = [sys.executable, "-m", "ddp_hpc.supervisor.guard", first, self._job.job_id]
        self._job.run_beside_ranks(node, guard)

    def _variables(self) -> dict[str, str]:
        """Returns the variables of the ranks that the script does not set."""
        scheduler, environ, clock = self._settings.scheduler, self._environ, self._clock
        variables = {"DDP_HPC_LAUNCH": launch_id(), process_control.UMASK: process_control.umask_text()}
        # Keep the values that the script exports, such as those of --env. Replace all others, since they may
        # come from another job.
        if clock.end_s is not None and "DDP_HPC_DEADLINE" not in environ:
            variables["DDP_HPC_DEADLINE"] = str(int(clock.end_s))
            if clock.is_reported:
                variables[REPORTED_BY] = scheduler.name
        if self._job.sets_long_tmpdir and "TMPDIR" not in self._exported:
            variables |= short_tmpdir(environ)
        if scheduler.has_queue:
            variables |= private_kernel_caches(environ, self._settings.local_dir)
            if not environ.get("DDP_HPC_KILL_DELAY_S") and clock.kill_delay_of_ranks_s is not None:
                variables["DDP_HPC_KILL_DELAY_S"] = f"{clock.kill_delay_of_ranks_s:g}"
            if self.run_dir is not None:
                variables["DDP_HPC_RUN_DIR"] = str(self.run_dir)
        return variables
