"""Job arrays as OpenPBS 23.06 shows them: the array, its subjobs, and subjobs of which it has no record.

The rules are those of array_func.c, req_stat.c, stat_job.c and svr_jobfunc.c.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.jobs import Attributes

BEGUN, TERMINATED, FINISHED, FAILED = 70, 91, 92, 93  # substates in job.h
_ENDS = {TERMINATED: "terminated", FINISHED: "finished", FAILED: "failed"}
# Attributes of an array that create_subjob does not copy to its subjobs.
NOT_COPIED = ("Submit_arguments", "Checkpoint")
# Attributes that qstat does not show for a subjob without a record: they follow `array` in
# master_job_attr_def.xml.
_NOT_SHARED = ("estimated", "history_timestamp", "project", "Submit_Host", "max_run_subjobs")


def subjob(array: int, index: int) -> int:
    """Returns the internal number of a subjob of an array."""
    return array * jobs.SUBJOBS + index + 1


def array_of(number: int) -> tuple[int, int]:
    """Returns the number of the array and the index of a subjob; the number is 0 for other jobs."""
    array, rest = divmod(number, jobs.SUBJOBS)
    return array, rest - 1


def is_waiting(job: Attributes) -> bool:
    """Returns whether a subjob has not been started."""
    return "_started" not in job and job["job_state"] == "Q"


def startable(root: Path, number: int, job: Attributes) -> list[int]:
    """Returns the internal numbers of the subjobs of an array that can start now."""
    if job["Hold_Types"] != "n":
        return []
    known = {subjob(number, index): one for index, one in _subjobs(root, number, job)}
    waiting = [one for one, sub in known.items() if is_waiting(sub)]
    waiting = [one for one in waiting if not jobs.delete_request(root, one).exists()]
    running = sum("_started" in sub and sub["job_state"] != "F" for sub in known.values())
    return waiting[: max(0, job["_max_running"] - running)] if job["_max_running"] else waiting


def state(root: Path, number: int, job: Attributes) -> Attributes:
    """Returns the attributes of an array: state Q before the first start, H if it is held, B, and then F.

    As in OpenPBS, Exit_status is 0, 1 or 2 according to the exit code of the subjob that ended last.
    """
    subs = dict(_subjobs(root, number, job))
    waiting = [index for index, one in subs.items() if is_waiting(one)]
    ended = [one for one in subs.values() if one["job_state"] == "F"]
    is_over = len(ended) == len(subs)
    num_queued = sum(one["job_state"] == "Q" for one in subs.values())
    num_running = len(subs) - num_queued - len(ended)
    num_expired = sum(not has_record(one) for one in ended) if is_over else len(ended)
    shown = {
        **job,
        "array_state_count": f"Queued:{num_queued} Running:{num_running} Exiting:0 Expired:{num_expired}",
        "array_indices_remaining": _ranges(waiting, job["_indices"]),
    }
    started = [one for one in subs.values() if "stime" in one]
    if started:
        first = min(started, key=lambda one: one["_started_s"])
        when = time.strftime("%a %b %d at %H:%M", time.localtime(first["_started_s"]))
        shown["stime"] = first["stime"]
        if job["Hold_Types"] == "n":
            began = f"Job Array Began at {when}"
            shown |= {"job_state": "B", "substate": BEGUN, "comment": began}
    by_end = sorted((one for one in ended if "Exit_status" in one), key=lambda one: one["_ended_s"])
    if by_end:
        code = by_end[-1]["Exit_status"]
        shown["Exit_status"] = 1 if code > 0 else 2 if code < 0 else 0
    if is_over:
        kept = [one["substate"] for one in subs.values() if has_record(one)]
        bad = [substate for substate in kept if substate in (FAILED, TERMINATED)]
        shown["job_state"] = "F"
        shown["substate"] = TERMINATED if "_terminated" in job else [*bad, FINISHED][0]
        if "comment" in shown:
            shown["comment"] += f" and {_ENDS[shown['substate']]}"
    return shown


def has_record(job: Attributes) -> bool:
    """Returns whether the server has a record of a subjob, which begins with its start.

    `qdel` of the array removes the records of the subjobs that have ended.
    """
    return "_started" in job and "_purged" not in job


def shown_subjob(root: Path, number: int, *, history: bool) -> Attributes:
    """Returns the attributes of the subjob with an internal number that qstat shows."""
    own, (array, _) = jobs.load(root, number), array_of(number)
    if not jobs.job_file(root, array).exists():  # a rehearsal
        return own
    parent = state(root, array, jobs.load(root, array))
    ended = "F" if parent["job_state"] == "F" else "X"
    is_ended = own["job_state"] == "F"
    if has_record(own) and (history or not is_ended):
        return {**own, "job_state": ended} if is_ended else own
    shared = {
        key: value for key, value in parent.items() if key not in _NOT_SHARED and not key.startswith("array")
    }
    if is_ended:
        return {**shared, "job_state": ended, "comment": "Subjob finished"}
    return {**shared, "job_state": "Q"}


def _subjobs(root: Path, number: int, job: Attributes) -> Iterator[tuple[int, Attributes]]:
    for index in job["_indices"]:
        yield index, jobs.load(root, subjob(number, index))


def _ranges(waiting: Sequence[int], indices: Sequence[int]) -> str:
    """Returns indices as range_to_str in range.c does, such as `1-5:2,9`; `-` stands for none."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    groups: list[list[int]] = []
    for index in waiting:
        if groups and index == groups[-1][-1] + step:
            groups[-1].append(index)
        else:
            groups.append([index])
    suffix = f":{step}" if step > 1 else ""
    return ",".join(f"{one[0]}-{one[-1]}{suffix}" if len(one) > 1 else str(one[0]) for one in groups) or "-"
