"""Runs a batch job: starts the launcher, again after failures, and has another job resume the run."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from ddp_hpc.base import process_control
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.launch.rank_environment import (
    exported_names,
    launch_id,
    private_kernel_caches,
    short_tmpdir,
)
from ddp_hpc.launch.resolve_launcher import resolve
from ddp_hpc.queue.run_conflicts import check_program
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.render.launch_lines import STEP_MODULE, STEP_SCRIPT
from ddp_hpc.schedulers.deadline import REPORTED_BY
from ddp_hpc.schedulers.running_job import RunningJob
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.supervisor import decisions, restarts
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launcher_process import LauncherEnd, run_launcher
from ddp_hpc.supervisor.run_files import RunFiles, array_run_dir
from ddp_hpc.supervisor.run_watch import RunWatch
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.settle import (
    EndedLauncher,
    Settled,
    conclude,
    settle,
    settle_as_before,
    settle_repeated,
)

AFTER = "DDP_HPC_AFTER"
"""The job whose run this job resumes, if the scheduler does not start this job after its end."""
_AFTER_LIMIT_S, _AFTER_POLL_S = 180.0, 2.0
# The final states of a run. torchrun's agents restart failed ranks, so only a complete run is final there.
_FINAL, _FINAL_WITH_TORCHRUN = State.ending_in("success", "stop", "failure"), State.ending_in("success")


def supervise(argv: list[str], settings: Settings, environ: Mapping[str, str]) -> int:
    """Runs the launch line `argv`, and returns the exit code of the job.

    Raises:
        DdpHpcError: the job cannot start, or another job must not resume the run.
    """
    job = settings.scheduler.inside_job.running_job(environ)
    job.arguments = settings.arguments
    job.script = script = _read_script(settings)
    if "DDP_HPC_DEADLINE" not in exported_names(script):  # it may come from another job
        environ = {name: value for name, value in environ.items() if name != "DDP_HPC_DEADLINE"}
    clock = JobClock(job, settings.scheduler, settings.walltime_s, environ)
    launch = _Launch(argv, settings, environ, job, clock, script)
    if launch.run_dir is None or not settings.scheduler.has_queue:
        return launch.run({}, None).code
    _warn_about_walltime(settings, job, clock)
    _wait_for_earlier_job(settings.scheduler, environ)
    files = RunFiles(launch.run_dir)
    files.check()
    _check_program(files, script)
    before = files.state()
    attempt = decisions.begin_attempt(
        job.job_id, before, files.last_attempt(), environ, settings.max_attempts
    )
    if isinstance(attempt, decisions.NothingToDo):
        say(f"ddp-hpc: {attempt.message}")
        return attempt.code
    if attempt.number > 1:
        say(
            f"ddp-hpc: attempt {attempt.number} of at most {settings.max_attempts}"
            f"{decisions.at_step(attempt.first_step, ', from step ')}"
        )
    if signal.SIGTERM in signal.sigpending():
        say("ddp-hpc: the job was cancelled before its ranks started")
        return 128 + signal.SIGTERM
    variables = job.variables_for_successor()
    files.begin(attempt, settings.script, settings.scheduler.reader.array_directive, variables)
    ended = _run_attempts(attempt, launch, clock, files, settings)
    last = replace(ended.attempt, first_step=attempt.first_step)
    return conclude(ended.settled, last, job, clock, files, settings)


def _run_attempts(
    attempt: Attempt, launch: _Launch, clock: JobClock, files: RunFiles, settings: Settings
) -> restarts.Ended:
    """Runs the first attempt of this job, and others after failures that a restart can repair."""
    earlier: restarts.Ended | None = None
    last_saved: restarts.Ended | None = None
    for num_restarts in count():
        settled = _run_attempt(attempt, launch, clock, files, settings)
        ended = restarts.Ended(attempt, settled)
        if ended.has_progressed:
            last_saved = ended
        if ended.repeats(earlier):
            return replace(ended, settled=settle_repeated(settled, files))
        if not ended.may_restart or not settings.restarts:
            break
        why = restarts.why_no_restart(
            ended,
            earlier,
            settings,
            num_restarts=num_restarts,
            left_s=clock.ranks_left_s - (settings.signal_lead_s or 0.0),
        )
        if why:
            say(f"ddp-hpc: the ranks are not started again: {why}")
            break
        earlier, attempt = ended, decisions.next_attempt(attempt, settled.after)
        reason = f": {settled.after.reason}" if settled.after.reason else ""
        say(
            f"ddp-hpc: attempt {earlier.attempt.number} failed{reason}; restart {num_restarts + 1} of "
            f"{settings.restarts} in this job{decisions.at_step(attempt.first_step, ', from step ')}"
        )
        files.begin_again(attempt)
    before = last_saved or earlier
    if before is not None and ended.is_lost_restart:
        return replace(ended, settled=settle_as_before(before.settled, settled.stop, files))
    return ended


def _run_attempt(
    attempt: Attempt, launch: _Launch, clock: JobClock, files: RunFiles, settings: Settings
) -> Settled:
    before, progress = files.state(), Progress(files.path / "progress", settings.progress)
    end = launch.run(
        {
            # The trainer copies this to `refused` if ranks of another attempt still use the run directory.
            "DDP_HPC_THIS_ATTEMPT": attempt.key,
            "DDP_HPC_PROGRESS_FILE": str(progress.file),
        },
        files,
    )
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


def _read_script(settings: Settings) -> str:
    try:
        return settings.script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if not settings.scheduler.has_queue:
            return ""
        raise RequestError(
            f"--script {settings.script} cannot be read ({error.strerror}); "
            'give the path of the script with --script "$0"'
        ) from None


def _check_program(files: RunFiles, script: str) -> None:
    with suppress(OSError):
        check_program(
            files.path,
            files.script.read_text(encoding="utf-8", errors="replace"),
            script,
            "set DDP_HPC_RUN_DIR in the script to another directory (ddp-hpc render --name or --run-dir)",
        )


def _warn_about_walltime(settings: Settings, job: RunningJob, clock: JobClock) -> None:
    scheduler = settings.scheduler
    if (
        scheduler.inside_job.can_requeue
        and job.is_job
        and not clock.is_reported
        and settings.walltime_s is not None
    ):
        complain(
            f"{scheduler.title} does not report the walltime of job {job.job_id}; "
            f"the {settings.walltime_s:.0f} s of the directives are used",
            kind="warning",
        )


def _wait_for_earlier_job(scheduler: Scheduler, environ: Mapping[str, str]) -> None:
    """Waits for the job that has submitted this one; only needed if qsub accepts no dependency on it.

    Raises:
        DdpHpcError: that job has not ended in time.
    """
    earlier = environ.get(AFTER, "")
    end_s, was_said = time.monotonic() + _AFTER_LIMIT_S, False
    while earlier:
        with suppress(DdpHpcError):  # the server is busy, for example
            job = scheduler.commands.job_commands().read_job(earlier)
            if job is None or job.phase == "ended":
                return
        if time.monotonic() > end_s:
            raise DdpHpcError(
                f"job {earlier}, whose run this job resumes, has not ended within {_AFTER_LIMIT_S:.0f} s; "
                "when it has ended, submit the script again"
            )
        if not was_said:
            was_said = True
            say(f"ddp-hpc: waiting until job {earlier}, whose run this job resumes, has ended")
        time.sleep(_AFTER_POLL_S)


class _Launch:
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
        self.run_dir = settings.run_dir
        if self.run_dir is not None and (index := settings.scheduler.inside_job.array_index(environ)):
            self.run_dir = array_run_dir(self.run_dir, index, script, settings.scheduler)

    def run(self, variables: Mapping[str, str], files: RunFiles | None) -> LauncherEnd:
        """Runs the launcher until it ends. `files` is None if the run is not resumed by other jobs."""
        settings = self._settings
        variables = {**self._variables(), **variables}
        environ = {**self._environ, **variables}
        argv, own_variables = resolve(
            self._argv, environ, [*self._exported, *variables], has_queue=settings.scheduler.has_queue
        )
        say(f"ddp-hpc: job {self._job.job_id}: {shlex.join(argv)}")
        uses_torchrun = bool({STEP_SCRIPT, STEP_MODULE} & {*self._argv})
        watch = RunWatch(
            self._clock,
            self.launcher,
            forwards_term=self._job.forwards_term if self.launcher == "srun" else "",
            files=files,
            final_states=_FINAL_WITH_TORCHRUN if uses_torchrun else _FINAL,
            signal_name=settings.signal_name,
            signal_lead_s=settings.signal_lead_s,
            say=say,
        )
        return run_launcher(argv, {**environ, **own_variables}, watch)

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
