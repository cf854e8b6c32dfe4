"""Starts the launcher of a job, which starts the ranks, and gives the ranks their variables."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base import process_control
from ddp_hpc.base.hostlist import expand_hostlist
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.discovery.node_check_request import NODE_CHECK
from ddp_hpc.launch.rank_environment import exported_names, launch_id, private_kernel_caches, short_tmpdir
from ddp_hpc.launch.resolve_launcher import resolve
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.render.launch_lines import STEP_MODULE, STEP_SCRIPT
from ddp_hpc.schedulers.deadline import REPORTED_BY
from ddp_hpc.schedulers.running_job import RunningJob
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import say
from ddp_hpc.supervisor.launcher_process import GUARD, LauncherEnd, run_launcher
from ddp_hpc.supervisor.run_files import RunFiles, array_run_dir
from ddp_hpc.supervisor.run_watch import RunWatch
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.spare_nodes import NodePool

# The final states of a run. torchrun's agents restart failed ranks, so only a complete run is final there.
_FINAL, _FINAL_WITH_TORCHRUN = State.ending_in("success", "stop", "failure"), State.ending_in("success")
# A restart takes about as long as the first start. Without a limit, srun waits for a node that has died.
_BEGIN_LEAST_S, _BEGIN_TIMES = 300.0, 3.0
# The limit for ending the ranks of a killed launcher. The step on a node that has died stays in Slurm's list
# until Slurm has noticed the loss.
_RANKS_END_S, _RANKS_OF_LOST_NODE_END_S = 20.0, 3.0


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
        self.argv, self._settings = argv, settings
        # The ranks would check the nodes instead of running the program.
        self._environ = {name: value for name, value in environ.items() if name != NODE_CHECK}
        self.job, self._clock = job, clock
        self._exported = exported_names(script)
        self.launcher = Path(argv[0]).name
        self.writes_state = decisions.writes_its_state(argv)
        # What the script has started in the background, such as a monitor, which does not end with the ranks.
        self.beside = {process.pid for process in process_control.descendants(os.getpid())}
        self._guard: subprocess.Popen[bytes] | None = None
        self._begin_limit_s: float | None = None
        self.run_dir = settings.run_dir
        if self.run_dir is not None and (index := settings.scheduler.inside_job.array_index(environ)):
            self.run_dir = array_run_dir(self.run_dir, index, script, settings.scheduler)
        self.pool: NodePool | None = None
        if (settings.spare_nodes or settings.min_nodes) and (names := self._node_names()):
            self.pool = NodePool(
                names,
                settings.spare_nodes,
                min_nodes=settings.min_nodes,
                run_dir=self.run_dir,
                ports=job.watched_ports,
                is_connected=job.scheduler_answers,
            )
        self.launch_ids: list[str] = []
        """The values of DDP_HPC_LAUNCH of all starts until now."""
        self.checks_s = 0.0
        """The seconds for which nodes have been checked before the next start."""

    def run(
        self,
        variables: Mapping[str, str],
        files: RunFiles | None,
        attempt: Attempt | None = None,
        find_hang: Callable[[], str] = str,
    ) -> LauncherEnd:
        """Runs the launcher until it ends. `files` is None if the run is not resumed by other jobs.

        `find_hang` returns why the ranks hang; empty if they do not.
        """
        settings = self._settings
        argv, environ = self.command(variables, files)
        say(f"ddp-hpc: job {self.job.job_id}: {shlex.join(argv)}")
        uses_torchrun = bool({STEP_SCRIPT, STEP_MODULE} & {*self.argv})
        watch = RunWatch(
            self._clock,
            self.launcher,
            forwards_term=self.forwards_term,
            files=files,
            attempt=attempt,
            begin_limit_s=self._begin_limit_s,
            find_lost_nodes=self._lost_nodes,
            find_hang=find_hang,
            final_states=_FINAL_WITH_TORCHRUN if uses_torchrun else _FINAL,
            signal_name=settings.signal_name,
            signal_lead_s=settings.signal_lead_s,
            say=say,
        )
        self.start_guard()
        if files is not None and attempt is not None:
            num_used = len(self.pool.nodes.used) if self.pool is not None else None
            details = {"num_used": num_used, "records_steps": self.writes_state, "checks_s": self.checks_s}
            note(files.path, attempt.key, Moment.LAUNCHER_STARTED, **details)
            self.checks_s = 0.0
        end = run_launcher(argv, environ, watch, self.beside)
        end = replace(end, may_have_left_ranks=self._may_have_left_ranks(end, watch))
        if watch.began_after_s is not None:
            self._begin_limit_s = max(_BEGIN_LEAST_S, _BEGIN_TIMES * watch.began_after_s)
        if watch.lost_nodes and self.pool is not None:
            silent_s = self.pool.silent_s(watch.lost_nodes[0])
            end = replace(end, lost_nodes=watch.lost_nodes, silent_s=silent_s)
        return replace(end, has_hung=watch.has_hung)

    def _may_have_left_ranks(self, end: LauncherEnd, watch: RunWatch) -> bool:
        """Ends ranks that the launcher may have left; returns whether they may still be running."""
        was_killed = end.was_killed or (end.was_ended and end.saw_sigkill)
        if self._clock.stopped_s is not None or not (was_killed or watch.has_hung or watch.lost_nodes):
            return False
        have_ended = self.job.end_ranks(_RANKS_OF_LOST_NODE_END_S if watch.lost_nodes else _RANKS_END_S)
        if have_ended is None:
            # On this node, `run_launcher` has ended them. A launcher that ends by itself ends its ranks.
            return was_killed and len(self.nodes) > 1
        return not have_ended and not watch.lost_nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the ranks; empty if they are not known."""
        return self._node_names() if self.pool is None else self.pool.nodes.used

    @property
    def forwards_term(self) -> str:
        """See `LauncherWatch`."""
        return self.job.forwards_term if self.launcher == "srun" else ""

    def command(
        self, variables: Mapping[str, str], files: RunFiles | None
    ) -> tuple[list[str], dict[str, str]]:
        """Returns the command line of the launcher for the nodes of the ranks, and its environment."""
        variables = {**self._variables(), **variables}
        self.launch_ids.append(variables["DDP_HPC_LAUNCH"])
        environ = {**self._environ, **variables}
        argv, own_variables = resolve(
            self.argv, environ, [*self._exported, *variables], has_queue=self._settings.scheduler.has_queue
        )
        if self.pool is not None and files is not None:
            nodes, num = self.pool.nodes.used, self.pool.num_nodes
            argv, of_nodes = self.job.on_nodes(argv, nodes, num, files.path)
            own_variables |= of_nodes
        return argv, {**environ, **own_variables}

    def start_guard(self) -> None:
        """Starts the process on another node that requeues the job if this node dies. It ends as an orphan of
        the launcher.
        """
        self._guard = None
        if self.pool is not None and (node := self.pool.node_of_guard):
            guard = [sys.executable, "-m", GUARD, self.pool.first, self.job.job_id]
            self._guard = self.job.run_beside_ranks(node, guard)

    def _node_names(self) -> tuple[str, ...]:
        names = self.job.node_names()
        return tuple(expand_hostlist(names)) if names else ()

    def _lost_nodes(self) -> list[str]:
        """Returns the nodes of the ranks that no longer answer; says once if the guard has ended."""
        guard, is_stopping = self._guard, self._clock.stopped_s is not None
        if guard is not None and guard.poll() is not None and not is_stopping:
            self._guard = None
            say(
                "ddp-hpc: warning: the srun that monitors this node from another one has exited with code "
                f"{guard.returncode}; if this node fails, the job will not be requeued: cancel it, and "
                "submit it again"
            )
        return self.pool.lost() if self.pool is not None else []

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
        if self.job.sets_long_tmpdir and "TMPDIR" not in self._exported:
            variables |= short_tmpdir(environ)
        if scheduler.has_queue:
            variables |= private_kernel_caches(environ, self._settings.local_dir)
            if not environ.get("DDP_HPC_KILL_DELAY_S") and clock.kill_delay_of_ranks_s is not None:
                variables["DDP_HPC_KILL_DELAY_S"] = f"{clock.kill_delay_of_ranks_s:g}"
            if self.run_dir is not None:
                variables["DDP_HPC_RUN_DIR"] = str(self.run_dir)
        return variables
