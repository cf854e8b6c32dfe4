"""The two schedulers' stand-ins as one thing to whoever rehearses: submit, schedule, look, follow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.slurm import controller
from ddp_hpc.rehearse.slurm.stepd import log_path

_SUBMIT_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A job as it is now: `exit_code` of its script, None where it never ran or is not over."""

    name: str
    is_over: bool
    was_held: bool
    exit_code: int | None
    how: str
    logs: tuple[Path, ...]
    left_over: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Queue:
    """One scheduler's stand-in: its submit command, the start of jobs whose turn it is, and a job's state."""

    submit: tuple[str, ...]
    schedule: Callable[[Path], None]
    look: Callable[[Path, int], Seen]


def submit(queue: Queue, script: Path, folder: Path, environ: Mapping[str, str]) -> None:
    """Submits as the user does: from the folder, in a login shell that knows the stand-ins.

    Raises:
        RequestError: the scheduler refuses the script; the message has its words.
        DdpHpcError: it gives no answer.
    """
    words = ["bash", "--login", "-c", 'exec "$@"', "bash", *queue.submit, str(script)]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SUBMIT_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DdpHpcError(
            f"{queue.submit[0]} gave no answer within {_SUBMIT_LIMIT_S} s; try again"
        ) from error
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.encode("ascii", "backslashreplace").decode().splitlines()
        ]
        raise RequestError(f"the script was refused: {'; '.join(filter(None, lines))}; mend what it names")


def _look_at_pbs(root: Path, number: int) -> Seen:
    job = jobs.load(root, number)
    name, status, comment = f"{number}.{job['server']}", job.get("Exit_status"), job.get("comment", "")
    was_held = comment == server.NO_MORE_JOBS
    # A job whose log cannot be written is held by PBS, and nobody here would release it.
    is_over = job["job_state"] == "F" or (job["job_state"] == "H" and bool(comment) and not was_held)
    how = comment.rpartition(" and ")[2]
    logs = []
    for ending, key in (("OU", "Output_Path"), ("ER", "Error_Path")):
        destination = Path(job[key].partition(":")[2])
        spooled = root / "spool" / f"{name}.{ending}"
        logs.append(destination if "d" in job["Keep_Files"] or not spooled.exists() else spooled)
    return Seen(
        name=name,
        is_over=is_over,
        was_held=was_held,
        exit_code=status,
        how=how if status is None else f"Exit_status {status} ({how})",
        logs=tuple(logs if job["Join_Path"] == "n" else logs[:1]),
        left_over=tuple(job.get("left_over", ())),
    )


def _look_at_slurm(root: Path, number: int) -> Seen:
    job = jobs.load(root, number)
    state, is_over = job["state"], job["state"] in controller.OVER
    code, _, number_of_signal = job.get("exit_code", "0:0").partition(":")
    exit_code = int(code) or (128 + int(number_of_signal) if number_of_signal != "0" else 0)
    how = f"{state}, ExitCode {job.get('exit_code', '0:0')}"
    if job["runs"] > 1:
        how += f", started {job['runs']} times"
    patterns = [job["output"], job["error"]] if job["error"] else [job["output"]]
    return Seen(
        name=str(number),
        is_over=is_over,
        was_held=state == "PENDING" and job["reason"] == controller.HELD,
        exit_code=(exit_code if state in ("COMPLETED", "FAILED") else exit_code or 1) if is_over else None,
        how=how,
        logs=tuple(log_path(job, pattern) for pattern in patterns),
        left_over=(),  # Slurm ends all processes of a job
    )


QUEUES = {
    "pbs": Queue(submit=("qsub",), schedule=server.schedule, look=_look_at_pbs),
    "slurm": Queue(submit=("sbatch",), schedule=controller.schedule, look=_look_at_slurm),
}
