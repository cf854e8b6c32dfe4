"""A script on its way into the queue: words of sbatch or qsub, what has to be there, the ledger's line."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.jobs import submission_ledger as ledger
from ddp_hpc.lint.parse_script import Script, parse_script
from ddp_hpc.render.render_script import script_bytes, write_script
from ddp_hpc.schedulers.base import JobCommands, Scheduler
from ddp_hpc.schedulers.client import job_commands, send
from ddp_hpc.schedulers.registry import SCHEDULERS

# What a directive means by `$`, `~` and `^` only the scheduler knows; `%j` is known once there is a job.
_NOT_PLAIN = re.compile(r"[$~^%\0\n]")
_CHAINED = "DDP_HPC_CHAINED"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A script to be queued from `work_dir`. `path` is what the scheduler is given.

    `is_new`: the script was rendered for this and `path` is not there yet. `run_dir` is
    None for a script that names no run folder; such a job has no ledger.
    """

    scheduler: Scheduler
    script: Script
    path: Path
    is_new: bool
    work_dir: Path
    run_dir: Path | None
    options: tuple[str, ...] = ()

    @property
    def content(self) -> bytes:
        """The script, byte for byte."""
        return script_bytes(self.script.text)

    def words(self, after: str = "", variables: str = "") -> list[str]:
        """The command line that queues it; on PBS after another job, and with variables of its own."""
        # A name that begins with a dash is no option.
        path = str(self.path)
        given = f"./{path}" if path.startswith("-") else path
        return self.scheduler.submit_argv(given, self.options, after, variables)


def order_request(text: str, scheduler_name: str, work_dir: Path) -> Order:
    """The order for a script that was just rendered. It is kept in its run folder, by its checksum.

    Raises:
        RequestError: there is no queue for it.
    """
    if scheduler_name not in job_commands():
        raise RequestError(
            f"the profile's scheduler is {scheduler_name!r}; jobs are submitted to "
            f"{' or '.join(job_commands())}; name another --profile, or write the script "
            "(ddp-hpc render -o FILE) and start it yourself"
        )
    script = parse_script(text)
    run_dir = ledger.run_dir_in(text, work_dir)
    folder = run_dir or work_dir
    name = f"job-{hashlib.sha256(script_bytes(text)).hexdigest()[:8]}.sh"
    return Order(
        scheduler=SCHEDULERS[scheduler_name],
        script=script,
        path=folder / name,
        is_new=True,
        work_dir=work_dir,
        run_dir=run_dir,
    )


def order_script(text: str, path: Path, account: str, account_option: str, work_dir: Path) -> Order:
    """The order for somebody's script file.

    Raises:
        RequestError: it has no directives, so no scheduler is meant.
    """
    script = parse_script(text)
    if script.scheduler not in job_commands():
        raise RequestError(
            f"{path} has neither #SBATCH nor #PBS lines, so it is no job script; write one with "
            "ddp-hpc render -o FILE, or add directives"
        )
    options: list[str] = []
    if account:
        options = SCHEDULERS[script.scheduler].account_arguments(account, account_option)
    return Order(
        scheduler=SCHEDULERS[script.scheduler],
        script=script,
        path=path,
        is_new=False,
        work_dir=work_dir,
        run_dir=ledger.run_dir_in(text, work_dir),
        options=tuple(options),
    )


def names_account(text: str) -> bool:
    """Whether a script's own directives say who pays."""
    return any(
        one.flag in ("-A", "-P", "--account") or (one.flag == "-W" and "group_list=" in one.value)
        for one in parse_script(text).read()
    )


def prepare(order: Order) -> None:
    """Makes what has to be there first: the run folder, the script in it, and the folders of the logs.

    PBS holds a job whose log cannot be written, Slurm ends it without a word.

    Raises:
        DdpHpcError: the file system refuses.
    """
    folders = [*_log_folders(order), *([order.run_dir] if order.run_dir else [])]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DdpHpcError(f"{folder}: cannot be made, and the job needs it") from error
    if order.is_new:
        write_script(order.script.text, order.path)


def send_one(order: Order) -> Iterator[tuple[str, str]]:
    """Queues the job: its id, and what went wrong afterwards, if anything did.

    Raises:
        DdpHpcError: as `scheduler.send`.
    """
    yield from _send(order, order.words(), "")


def check_chain(order: Order, num_jobs: int) -> None:
    """Raises RequestError where the script is none that can be queued as a chain."""
    if not order.scheduler.can_chain or _CHAINED not in order.script.text:
        raise RequestError(
            f"--chain {num_jobs} was given; only PBS scripts of ddp-hpc are queued as a chain; leave it out: "
            "others of ddp-hpc go on by themselves"
        )


def send_chain(order: Order, num_jobs: int) -> Iterator[tuple[str, str]]:
    """Queues so many jobs of a PBS script, each after the one before it: their ids, as `send_one`.

    Raises:
        DdpHpcError: as `scheduler.send`; those that were given are queued.
    """
    own = [directive.value for directive in order.script.read() if directive.flag == "-v"]
    after = ""
    for attempt in range(1, num_jobs + 1):
        # qsub's own -v takes the place of the directive's.
        variables = ",".join([*own, f"DDP_HPC_ATTEMPT={attempt}", f"{_CHAINED}={num_jobs}"])
        for job_id, problem in _send(order, order.words(after, variables), after):
            yield job_id, problem
            after = job_id


def _send(order: Order, words: list[str], after: str) -> Iterator[tuple[str, str]]:
    scheduler = job_commands()[order.scheduler.name]
    job_id = send(scheduler, words)
    if after and _was_dropped(scheduler, job_id):
        raise DdpHpcError(
            f"PBS has dropped job {job_id} without a message, because the server does not know job {after}, "
            "which it was to wait for. Check what became of that job, then submit again."
        )
    problem = ""
    if order.run_dir is not None:
        try:
            ledger.record(order.run_dir, _entry(order, job_id, words, after))
        except DdpHpcError as error:
            problem = f"job {job_id} is queued, and the run folder could not be told: {error}"
    yield job_id, problem


def _was_dropped(scheduler: JobCommands, job_id: str) -> bool:
    """Whether the job ended before it began because its dependency names a job that does not exist."""
    with suppress(DdpHpcError):  # a server without an answer has told its id
        job = scheduler.read_job(job_id)
        return job is None or job.end == "dropped"
    return False


def _entry(order: Order, job_id: str, words: list[str], after: str) -> ledger.Submission:
    return ledger.Submission(
        job_id=job_id,
        scheduler=order.scheduler.name,
        user=_user(),
        host=socket.gethostname(),
        at_s=int(time.time()),
        argv=tuple(words),
        script=str(order.work_dir / order.path),
        sha256=hashlib.sha256(order.content).hexdigest(),
        work_dir=str(order.work_dir),
        after=after,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        return str(os.getuid())


def _log_folders(order: Order) -> Iterator[Path]:
    """Folders that the script's directives name for logs, as far as they can be told from here."""
    if order.script.value("--chdir"):
        return
    for directive in order.script.read():
        if directive.flag not in order.scheduler.log_flags:
            continue
        host, colon, path = directive.value.rpartition(":")
        if colon and host and host != socket.gethostname():
            continue
        folder = path if path.endswith("/") else path.rpartition("/")[0]
        if folder and not _NOT_PLAIN.search(folder) and len(folder) < 1000:
            yield order.work_dir / folder
