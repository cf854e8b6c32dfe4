"""Stand-in for `qdel JOB...`: ends running jobs with SIGTERM, and SIGKILL later; removes waiting jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import arrays, server

_RANGE = re.compile(r"([0-9]{1,6}\[)([0-9]{1,4})-([0-9]{1,4})(?::([0-9]{1,4}))?(\].*)")


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Ends the jobs.

    Raises:
        RefusedError: a job is unknown or has already finished.
    """
    server.check_running("qdel", root)
    if len(argv) > 1 and "[" in "".join(argv):
        raise RefusedError("qdel: with several operands, OpenPBS may leave subjobs; the stand-in refuses", 99)
    for word in argv:
        if "[" in word:
            _delete_of_array(root, word)
        else:
            number = server.job_number("qdel", word, root)
            job = jobs.load(root, number)
            server.refuse_finished("qdel", number, job)
            _delete(root, number, job)
    server.release(root)


def _delete(root: Path, number: int, job: jobs.Attributes) -> None:
    jobs.delete_request(root, number).touch()
    by = f"{server.USER}@{server.Settings.read(root).submit_host}"
    comment = {"comment": f"{job['comment']} and terminated by {by}"} if "comment" in job else {}
    if job["job_state"] == "H" or (comment and job["job_state"] == "Q"):
        # The job never ran, so it has neither Exit_status nor stime.
        jobs.change(root, number, **comment, job_state="F", substate=91)
    elif comment and "terminated" not in job["comment"]:
        jobs.change(root, number, **comment)  # the job can run until kill_delay is over


def _delete_of_array(root: Path, word: str) -> None:
    """Ends an array, some of its subjobs or one of them, as req_deletejob in req_delete.c does."""
    ranges = _RANGE.fullmatch(word)
    array = re.sub(r"\[.*\]", "[]", word)
    number = server.job_number("qdel", array, root)
    job = arrays.state(root, number, jobs.load(root, number))
    name = f"{word.partition('.')[0]}.{job['server']}"
    if job["job_state"] == "F":
        raise RefusedError(f"qdel: Job has finished {name}", server.FINISHED)
    indices: Iterable[int] = job["_indices"]
    if ranges:
        chosen = range(int(ranges[2]), int(ranges[3]) + 1, int(ranges[4] or 1))
        if not min(indices) <= chosen.start <= max(indices):
            raise RefusedError(f"qdel: Unknown Job Id {name}", server.UNKNOWN_JOB)
        indices = [one for one in indices if one in chosen]
    elif (single := re.search(r"\[([0-9]+)\]", word)) is not None:
        if int(single[1]) not in indices:
            raise RefusedError(f"qdel: Invalid request {name}", server.INVALID)
        indices = [int(single[1])]
        if jobs.load(root, arrays.subjob(number, indices[0]))["job_state"] == "F":
            raise RefusedError(
                f"qdel: Request invalid for finished array subjob {name}", server.FINISHED_SUBJOB
            )
    with jobs.locked(root / "release.lock"):
        was_running = [_delete_subjob(root, arrays.subjob(number, index)) for index in indices]
        if word == array and not any(was_running):
            jobs.change(root, number, _terminated=True)


def _delete_subjob(root: Path, number: int) -> bool:
    """Ends a subjob, or deletes the record of one that has ended; returns whether it was running."""
    job = jobs.load(root, number)
    if arrays.is_waiting(job):
        jobs.change(root, number, job_state="F", _purged=True)
    elif job["job_state"] == "F":
        jobs.change(root, number, _purged=True)
    else:
        _delete(root, number, job)
        return True
    return False
