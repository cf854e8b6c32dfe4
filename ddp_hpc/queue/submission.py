"""A script on its way into the queue: words of sbatch or qsub, what has to be there, the ledger's line."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.batch.render import script_bytes, write_script
from ddp_hpc.batch.script import Script, parse_script
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.queue import ledger
from ddp_hpc.queue.scheduler import SCHEDULERS, Scheduler, send

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
        if self.scheduler.name == "slurm":
            return ["sbatch", "--parsable", *self.options, given]
        chain = ["-W", f"depend=afterany:{after}"] if after else []
        return ["qsub", *self.options, *chain, *(["-v", variables] if variables else []), given]


def order_request(text: str, scheduler_name: str, work_dir: Path) -> Order:
    """The order for a script that was just rendered. It is kept in its run folder, by its checksum.

    Raises:
        RequestError: there is no queue for it.
    """
    if scheduler_name not in SCHEDULERS:
        raise RequestError(
            f"the profile's scheduler is {scheduler_name!r}; jobs are submitted to "
            f"{' or '.join(SCHEDULERS)}; name another --profile, or write the script "
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
    if script.scheduler not in SCHEDULERS:
        raise RequestError(
            f"{path} has neither #SBATCH nor #PBS lines, so it is no job script; write one with "
            "ddp-hpc render -o FILE, or add directives"
        )
    options: list[str] = []
    if account and script.scheduler == "slurm":
        options = [f"--account={account}"]
    elif account:
        # `-A`, `-P`, or `-W group_list=`.
        *before, last = shlex.split(account_option or "-A")
        options = [*before, f"{last}{account}"] if last.endswith("=") else [last, account]
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
    if order.scheduler.name != "pbs" or _CHAINED not in order.script.text:
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
    job_id = send(order.scheduler, words)
    problem = ""
    if order.run_dir is not None:
        try:
            ledger.record(order.run_dir, _entry(order, job_id, words, after))
        except DdpHpcError as error:
            problem = f"job {job_id} is queued, and the run folder could not be told: {error}"
    yield job_id, problem


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
    flags = ("-o", "-e") if order.scheduler.name == "pbs" else ("--output", "--error")
    if order.script.value("--chdir"):
        return
    for directive in order.script.read():
        if directive.flag not in flags:
            continue
        host, colon, path = directive.value.rpartition(":")
        if colon and host and host != socket.gethostname():
            continue
        folder = path if path.endswith("/") else path.rpartition("/")[0]
        if folder and not _NOT_PLAIN.search(folder) and len(folder) < 1000:
            yield order.work_dir / folder
