"""Submits a job script: builds the command line, creates the directories of the job, and records the job."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.process_control import umask_text
from ddp_hpc.lint.parse_script import Script, parse_script
from ddp_hpc.queue import submission_ledger as ledger
from ddp_hpc.queue.failed_nodes import failed_nodes
from ddp_hpc.queue.job_report import current_job
from ddp_hpc.queue.run_conflicts import warning_about
from ddp_hpc.queue.run_directories import run_dir_in
from ddp_hpc.render.render_script import script_bytes, write_script
from ddp_hpc.schedulers.client import send
from ddp_hpc.schedulers.registry import MONITORED, SCHEDULERS
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.site import Site

# Matches paths with patterns that only the scheduler expands, such as %j for the job ID.
_NOT_PLAIN = re.compile(r"[$~^%\0\n]")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job script that will be submitted from `work_dir`, as the file `path`.

    `is_new` means that the script was just rendered and `path` does not exist yet. `run_dir` is None if the
    script sets no run directory; the submission is then not recorded. `options` precede `path` on the command
    line of sbatch or qsub.
    """

    scheduler: Scheduler
    script: Script
    path: Path
    is_new: bool
    work_dir: Path
    run_dir: Path | None
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """The arguments of the script."""

    @property
    def content(self) -> bytes:
        """The unchanged bytes of the script."""
        return script_bytes(self.script.text)

    def argv(self) -> list[str]:
        """Returns the command line that submits the script."""
        path = str(self.path)
        umask = int(umask_text(), 8)
        options = [*self.options, *self.scheduler.commands.umask_arguments(self.script, umask)]
        not_an_option = f"./{path}" if path.startswith("-") else path
        return [*self.scheduler.commands.submit_argv(not_an_option, options), *self.arguments]


def submission_of_request(text: str, scheduler_name: str, work_dir: Path) -> Submission:
    """Returns how to submit a script that was just rendered. Its file name contains its checksum.

    Raises:
        RequestError: jobs cannot be submitted to this scheduler.
    """
    if scheduler_name not in MONITORED:
        raise RequestError(
            f"the scheduler of the profile is {scheduler_name!r}, but jobs can only be submitted to "
            f"{' or '.join(MONITORED)}; use another --profile, or write the script "
            "(ddp-hpc render -o FILE) and start it yourself"
        )
    script = parse_script(text)
    run_dir = run_dir_in(text, work_dir)
    directory = run_dir or work_dir
    name = f"job-{hashlib.sha256(script_bytes(text)).hexdigest()[:8]}.sh"
    return Submission(
        scheduler=SCHEDULERS[scheduler_name],
        script=script,
        path=directory / name,
        is_new=True,
        work_dir=work_dir,
        run_dir=run_dir,
    )


def submission_of_script(
    text: str,
    path: Path,
    work_dir: Path,
    *,
    account: str,
    arguments: tuple[str, ...],
    site: Site | None,
) -> Submission:
    """Returns how to submit an existing script file.

    Raises:
        RequestError: the script has no directives, so its scheduler is unknown, or the scheduler does not
            support arguments.
    """
    script = parse_script(text)
    if script.scheduler not in MONITORED:
        prefixes = " or ".join(known.prefix for known in MONITORED.values())
        raise RequestError(
            f"{path} is not a job script: it contains no {prefixes} lines; write a job script with "
            "ddp-hpc render -o FILE, or add directives"
        )
    scheduler = SCHEDULERS[script.scheduler]
    if arguments and not scheduler.writer.passes_arguments:
        raise RequestError(
            f"{path} cannot receive the arguments {shlex.join(arguments)}, because "
            f"{scheduler.submit_program} does not pass arguments to scripts; write them into the script"
        )
    options: list[str] = []
    if account:
        options = scheduler.commands.account_arguments(account, site.account.option if site else "")
    return Submission(
        scheduler=scheduler,
        script=script,
        path=path,
        is_new=False,
        work_dir=work_dir,
        run_dir=run_dir_in(text, work_dir),
        options=tuple(options),
        arguments=arguments,
    )


def names_account(text: str) -> bool:
    """Returns whether the directives of a script name an account."""
    script = parse_script(text)
    return script.scheduler in SCHEDULERS and SCHEDULERS[script.scheduler].reader.names_account(script)


def conflict(submission: Submission) -> str:
    """Returns a warning if the run directory contains a run that this job would not resume as intended.

    Raises:
        RequestError: the run directory contains the run of another program.
    """
    if submission.run_dir is None:
        return ""
    new = (
        "choose another --name or --run-dir" if submission.is_new else "change DDP_HPC_RUN_DIR in the script"
    )
    return warning_about(submission.run_dir, submission.script.text, new)


def unfinished_job(submission: Submission) -> str:
    """Returns a warning if a job of the run has not ended: only one job can use its directory."""
    run_dir = submission.run_dir
    jobs = ledger.job_ids(run_dir) if run_dir is not None else []
    if run_dir is None or not jobs:
        return ""
    with suppress(DdpHpcError):  # the submission then fails, too
        job_id, job = current_job(run_dir, jobs[-1])
        if job is not None and job.phase != "ended":
            return (
                f"job {job_id} of the run in {run_dir} is {job.phase}; a job that starts while another one "
                "of its run is running ends with an error"
            )
    return ""


def without_failed_nodes(submission: Submission) -> tuple[Submission, str]:
    """Returns the submission without the nodes that have failed in earlier jobs of its run, and a note about
    them; both are unchanged or empty if there are none, or if the scheduler cannot exclude nodes.
    """
    failed = failed_nodes(submission.run_dir) if submission.run_dir is not None else ()
    given = submission.script.value("--exclude")
    nodes = [*([given] if given else []), *(each.node for each in failed)]
    arguments = submission.scheduler.commands.exclude_arguments(nodes) if failed else []
    if not arguments:
        return submission, ""
    why = "; ".join(f"{each.node} is left out: {each.reason}" for each in failed)
    note = f"{why}; to use all nodes again, submit with --forget-nodes"
    return replace(submission, options=(*submission.options, *arguments)), note


def prepare(submission: Submission) -> None:
    """Creates the run directory with the script, and the directories of the logs.

    If a log cannot be written, PBS holds the job, and Slurm ends it without a message.

    Raises:
        DdpHpcError: a file or directory cannot be created.
    """
    directories = [*_log_directories(submission), *([submission.run_dir] if submission.run_dir else [])]
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DdpHpcError(
                f"{directory} cannot be created, but the job requires it; check the permissions of its "
                "parent directory"
            ) from error
    if submission.is_new:
        write_script(submission.script.text, submission.path)


def submit(submission: Submission) -> tuple[str, str]:
    """Submits the job and records it; returns its ID, and a warning if it could not be recorded.

    Raises:
        DdpHpcError: the scheduler refuses the job or cannot be reached.
    """
    job_id = send(submission.scheduler, submission.argv(), os.environ)
    if submission.run_dir is None:
        return job_id, ""
    try:
        ledger.record(
            submission.run_dir,
            ledger.SubmissionRecord(
                job_id=job_id,
                scheduler=submission.scheduler.name,
                argv=tuple(submission.argv()),
                script=str(submission.work_dir / submission.path),
                sha256=hashlib.sha256(submission.content).hexdigest(),
                work_dir=str(submission.work_dir),
            ),
        )
    except DdpHpcError as error:
        return job_id, f"job {job_id} is queued, but its submission could not be recorded: {error}"
    return job_id, ""


def _log_directories(submission: Submission) -> Iterator[Path]:
    """Yields the directories of the logs, except those with patterns that only the scheduler expands."""
    if submission.script.value("--chdir"):
        return
    for directive in submission.script.read():
        if directive.flag not in submission.scheduler.reader.log_flags:
            continue
        host, colon, path = directive.value.rpartition(":")
        if colon and host and host != socket.gethostname():
            continue
        directory = path if path.endswith("/") else path.rpartition("/")[0]
        if directory and not _NOT_PLAIN.search(directory) and len(directory) < 1000:
            yield submission.work_dir / directory
