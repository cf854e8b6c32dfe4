"""Runs one job: starts the launcher, and requeues or resubmits the job if the run is not complete."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.jobs.submission_ledger import Attempt, is_cancelled
from ddp_hpc.launch.rank_environment import (
    exported_names,
    launch_id,
    private_kernel_caches,
    short_tmpdir,
)
from ddp_hpc.launch.resolve_launcher import resolve
from ddp_hpc.render.launch_lines import STEP_MODULE, STEP_SCRIPT
from ddp_hpc.schedulers.base import Scheduler
from ddp_hpc.schedulers.deadline import ask_once, kill_delay_variable
from ddp_hpc.schedulers.running_job import RunningJob, started_s
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.external_program_state import Progress, state_of_program
from ddp_hpc.supervisor.launcher_process import EarlySignal, LauncherEnd, run_launcher
from ddp_hpc.supervisor.run_files import RunFiles, SeenState, array_run_dir


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `python -m ddp_hpc.job`."""

    scheduler: Scheduler
    script: Path
    arguments: tuple[str, ...]
    """The arguments of the script, which another job must pass to it again."""
    run_dir: Path | None
    """None if the run is not resumed by other jobs."""
    walltime_s: float | None
    """The walltime of the directives, which is used if the scheduler does not report one."""
    max_attempts: int
    may_submit: bool
    """False if compute nodes cannot submit jobs at this site."""
    submit_line: str
    """The command that submits a script; empty for the scheduler's default command."""
    local_dir: str
    """The node-local directory for compiled kernels."""
    progress: tuple[str, ...]
    """Patterns of checkpoints. Their modification times show the progress of a program."""
    signal_name: str
    signal_lead_s: float | None
    """Send `signal_name` to the ranks this long before the deadline, and resume the run afterwards."""


def supervise(argv: list[str], settings: Settings, environ: Mapping[str, str]) -> int:
    """Runs the launch line `argv`, and returns the exit code of the job.

    Raises:
        DdpHpcError: the job cannot start, or another job must not resume the run.
    """
    run = _Run(argv, settings, environ)
    if run.run_dir is None or not settings.scheduler.has_queue:
        return run.launch({}).code
    files = RunFiles(run.run_dir)
    files.check()
    before = files.state()
    attempt = decisions.begin_attempt(
        run.job.job_id, before, files.last_attempt(), environ, settings.max_attempts
    )
    if isinstance(attempt, decisions.NothingToDo):
        _say(f"ddp-hpc: {attempt.message}")
        return attempt.code
    if attempt.number > 1:
        _say(
            f"ddp-hpc: attempt {attempt.number} of at most {settings.max_attempts}, from step "
            f"{attempt.first_step}"
        )
    if signal.SIGTERM in signal.sigpending():
        _say("ddp-hpc: the job was cancelled before its ranks started")
        return 128 + signal.SIGTERM
    progress = Progress(run.run_dir / "progress", settings.progress)
    files.begin(attempt, settings.script, without=settings.scheduler.array_directive)
    end = run.launch(
        {
            # The trainer copies this to `refused` if ranks of another attempt still use the run directory.
            "DDP_HPC_THIS_ATTEMPT": attempt.key,
            # With format 2, the trainer writes `requeue`. For scripts of version 0.1, which do not set this
            # variable, it writes `again`.
            "DDP_HPC_STATE_FORMAT": "2",
            "DDP_HPC_PROGRESS_FILE": str(progress.file),
        },
        files,
    )
    return _settle(run, end, attempt, before, files, progress)


def _settle(
    run: _Run,
    end: LauncherEnd,
    attempt: Attempt,
    before: SeenState,
    files: RunFiles,
    progress: Progress,
) -> int:
    """Requests another job if the run must be resumed, and returns the exit code of this job."""
    files.check()
    # If this node was disconnected, the scheduler may have restarted the job elsewhere. That attempt now owns
    # the run.
    if not files.is_last(attempt):
        return end.code
    after = files.state()
    if decisions.is_refusal(end.code, before, after) or files.is_refused(attempt):
        with suppress(DdpHpcError):  # the disk is full, for example
            files.withdraw()
        _say(
            "ddp-hpc: this start was refused and does not count as an attempt; nothing is submitted; the run "
            f"is at step {after.step}"
        )
        return RequestError.exit_code
    if (
        after.stamp != before.stamp and not after.state
    ):  # the file is damaged, or was written by other software
        return end.code
    if after.stamp == before.stamp:
        after = run.write_state_of_program(end, attempt, progress, files)
        if after.state != "requeue":
            return end.code
    found = decisions.outcome(end.code, attempt.first_step, after)
    return found if isinstance(found, int) else run.resume_later(found, end, attempt, files)


class _Run:
    """The job, its deadline, and its launch line."""

    def __init__(self, argv: list[str], settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._argv = argv
        self._environ = environ
        self._exported: list[str] = []
        self.job: RunningJob = settings.scheduler.running_job(environ)
        self.job.arguments = settings.arguments
        self.run_dir = settings.run_dir
        self._deadline_s = self._find_deadline_s()
        script = ""
        try:
            script = settings.script.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if not settings.scheduler.has_queue:
                return
            raise RequestError(
                f"--script {settings.script} cannot be read ({error.strerror}); "
                'give the path of the script with --script "$0"'
            ) from None
        self._exported = exported_names(script)
        if self.run_dir is not None and (index := settings.scheduler.array_index(environ)):
            self.run_dir = array_run_dir(self.run_dir, index, script, settings.scheduler)

    def _find_deadline_s(self) -> float | None:
        scheduler, walltime_s = self._settings.scheduler, self._settings.walltime_s
        if (end_s := self.job.end_s()) is not None:
            return end_s
        if self.job.is_job and (found := scheduler.read_end_s(self.job.job_id, ask_once)):
            return found[0]
        if walltime_s is None:
            return None
        if scheduler.can_requeue and self.job.is_job:
            _complain(
                f"{scheduler.title} does not report the walltime of job {self.job.job_id}; "
                f"the {walltime_s:.0f} s of the directives are used",
                kind="warning",
            )
        return started_s() + walltime_s

    def _variables(self) -> dict[str, str]:
        """Returns the variables of the ranks that the script does not set."""
        scheduler, environ = self._settings.scheduler, self._environ
        variables = {"DDP_HPC_LAUNCH": launch_id()}
        # Keep the values that the script exports, such as those of --env. Replace all others, since they may
        # come from another job.
        if self._deadline_s is not None and "DDP_HPC_DEADLINE" not in self._exported:
            variables["DDP_HPC_DEADLINE"] = str(int(self._deadline_s))
        if self.job.sets_long_tmpdir and "TMPDIR" not in self._exported:
            variables |= short_tmpdir(environ)
        if scheduler.has_queue:
            variables |= private_kernel_caches(environ, self._settings.local_dir)
            if not environ.get("DDP_HPC_KILL_DELAY_S"):
                variables |= kill_delay_variable(scheduler)
            if self.run_dir is not None:
                variables["DDP_HPC_RUN_DIR"] = str(self.run_dir)
        return variables

    def launch(self, variables: Mapping[str, str], files: RunFiles | None = None) -> LauncherEnd:
        """Runs the launcher until it ends."""
        variables = {**self._variables(), **variables}
        environ = {**self._environ, **variables}
        has_queue = self._settings.scheduler.has_queue
        argv, more = resolve(self._argv, environ, [*self._exported, *variables], has_queue=has_queue)
        environ |= more
        _say(f"ddp-hpc: job {self.job.job_id}: {shlex.join(argv)}")
        is_srun = Path(argv[0]).name == "srun"
        early = None
        if self._settings.signal_lead_s is not None and self._deadline_s is not None:
            early = EarlySignal(self._deadline_s - self._settings.signal_lead_s, self._settings.signal_name)
        return run_launcher(
            argv,
            environ,
            forwards_term=self.job.forwards_term if is_srun else "",
            is_over=_FinalState(
                files, Path(argv[0]).name, is_torchrun=bool({STEP_SCRIPT, STEP_MODULE} & {*self._argv})
            )
            if files
            else _never,
            early=early,
        )

    def write_state_of_program(
        self, end: LauncherEnd, attempt: Attempt, progress: Progress, files: RunFiles
    ) -> SeenState:
        """Writes and returns the state of a run whose program does not write a state."""
        at_deadline = end.was_signalled_early or (
            end.stopped_s is not None and not decisions.was_stopped_early(end.stopped_s, self._deadline_s)
        )
        state = state_of_program(
            end.code,
            attempt,
            progress,
            at_deadline=at_deadline and self._settings.signal_lead_s is not None,
        )
        try:
            files.write_state(state.state, state.step, state.reason)
        except DdpHpcError as error:  # for example, the disk is full
            _complain(f"{error}; the state of the run is: {state.state} {state.step} {state.reason}")
        if state.state == "failed" and end.code == EXIT_REQUEUE:
            _complain(state.reason)
        return state

    def resume_later(self, state: SeenState, end: LauncherEnd, attempt: Attempt, files: RunFiles) -> int:
        """Requeues or resubmits the job, or prints how to do that; returns the exit code of the job.

        Raises:
            DdpHpcError: the attempt made no progress.
        """
        settings = self._settings
        stopped = f"stopped at step {state.step}{f': {state.reason}' if state.reason else ''}"
        submit_line = settings.submit_line or settings.scheduler.submit_line()
        if index := settings.scheduler.array_index(self._environ):
            submit_line += f" {shlex.join(settings.scheduler.array_options(index))}"
        resume = self._resume_command(submit_line, files, settings.arguments)
        nothing = "so nothing is submitted; to resume"
        chained = self._environ.get("DDP_HPC_CHAINED", "")
        if end.stopped_s is not None and decisions.was_stopped_early(end.stopped_s, self._deadline_s):
            _say(f"ddp-hpc: {stopped}; a signal arrived before the end of the walltime, {nothing}: {resume}")
        elif is_cancelled(files.path, attempt.job_id) or (
            end.stopped_s is not None and self.job.was_cancelled()
        ):
            _say(f"ddp-hpc: {stopped}; the job was cancelled, {nothing}: {resume}")
        elif state.step <= attempt.first_step:
            raise DdpHpcError(
                f"attempt {attempt.number} made no progress: it began at step {attempt.first_step} and "
                f"{stopped}; increase its walltime, then resume: {resume}"
            )
        elif chained:
            _say(
                f"ddp-hpc: {stopped}; this was job {attempt.number} of a chain of {chained}; to resume after "
                f"the last one: {resume}"
            )
        elif attempt.number >= settings.max_attempts:
            _say(
                f"ddp-hpc: {stopped}; attempt {attempt.number} was the last (--max-attempts); to resume: "
                f"{resume}"
            )
        elif not settings.scheduler.can_requeue:
            title = settings.scheduler.title
            _say(f"ddp-hpc: {stopped}; no successor is submitted under {title}; to resume: {resume}")
        elif not settings.may_submit:
            chain = self._resume_command("ddp-hpc submit --chain N", files)
            _say(
                f"ddp-hpc: {stopped}; compute nodes cannot submit jobs at this site; to resume, run on the "
                f"login node: {chain}"
            )
        else:
            self._resubmit(stopped, resume, attempt, files)
        return EXIT_REQUEUE

    def _resume_command(self, submit: str, files: RunFiles, arguments: tuple[str, ...] = ()) -> str:
        script = shlex.join([str(files.script), *arguments])
        return f"cd {shlex.quote(str(self.job.work_dir))} && {submit} {script}"

    def _resubmit(self, stopped: str, resume: str, attempt: Attempt, files: RunFiles) -> None:
        try:
            self.job.resubmit(files.script, attempt.number + 1, _say)
        except (DdpHpcError, OSError) as error:
            _complain(f"{stopped}, and no successor could be queued: {error}; to resume: {resume}")
        else:
            _say(f"ddp-hpc: {stopped}; attempt {attempt.number + 1} resumes the run")


class _FinalState:
    """Whether the launcher still waits although the run has ended.

    srun waits forever for tasks of a disconnected node, and MPICH's mpiexec for ranks whose proxy was killed.
    Called every 30 s; the run counts as ended if its final state was written at least 30 s ago.
    """

    def __init__(self, files: RunFiles, launcher: str, *, is_torchrun: bool) -> None:
        self._files, self._launcher = files, launcher
        self._initial = self._last = files.state().stamp
        # torchrun's agents restart failed ranks.
        self._final = ("done",) if is_torchrun else ("requeue", "done", "failed")

    def __call__(self) -> bool:
        state = self._files.state()
        is_old = state.stamp == self._last and state.stamp != self._initial
        self._last = state.stamp
        if not is_old or state.state not in self._final:
            return False
        _say(
            f"ddp-hpc: terminating {self._launcher}: it still waits for ranks 30 s after the run wrote its "
            "final state"
        )
        return True


def _never() -> bool:
    return False


def _say(line: str) -> None:
    _write(1, line)


def _complain(line: str, kind: str = "error") -> None:
    _write(2, f"{kind}: {line}")


def _write(stream: int, line: str) -> None:
    # The log can be on a full disk, which must not prevent the requeue.
    with suppress(OSError):
        os.write(stream, f"{line}\n".encode("utf-8", "backslashreplace"))
