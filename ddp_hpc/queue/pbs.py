"""PBS: one job's state from qstat, which is asked for one id at a time (openpbs#2672: of two it gives one).

Its JSON is not always JSON, and turns what looks like a number into one (`-v foo=005` comes as 5); where it
cannot be read, the text form is.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.queue import commands
from ddp_hpc.queue.job_state import End, JobState, Phase, clock_s, duration_s, same_job

_TIME = "%a %b %d %H:%M:%S %Y"
_UNKNOWN_JOB = re.compile(r"Unknown Job Id", re.IGNORECASE)
_NO_HISTORY = re.compile(r"history", re.IGNORECASE)
_WORK_DIR = re.compile(r"(?:^|,)PBS_O_WORKDIR=((?:\\.|[^,\\])*)")
_PHASES: dict[str, Phase] = {
    **dict.fromkeys("QHWTM", "waiting"),
    **dict.fromkeys("RESUB", "running"),
    **dict.fromkeys("FX", "ended"),
}
# Exit_status below zero: JOB_EXEC_* of OpenPBS's job.h.
_ENDS: dict[int, End] = {
    **dict.fromkeys((-1, -2, -3, -4, -10, -13, -16, -17, -21, -22, -23, -30), "not started"),
    **dict.fromkeys((-14, -20), "node"),
    **dict.fromkeys((-26, -27, -31), "memory"),
    -19: "cancelled",
    -29: "walltime",
}
# What the end itself does not say.
_REASONS = {-25: "more CPUs were used than asked for", -28: "more CPU time was used than asked for"}
_SIGNALLED = 256


def read_job(job_id: str) -> JobState | None:
    """What PBS knows of the job; None where it knows of no such job.

    Raises:
        DdpHpcError: PBS gives no answer, or one that is none.
    """
    # A server that keeps no history refuses -x.
    for flags in ("-xf", "-f"):
        answer = commands.ask("qstat", flags, "-F", "json", job_id)
        if answer.code == 0:
            try:
                return parse_json(answer.out, job_id)
            except ValueError:
                answer = commands.ask("qstat", f"{flags}w", job_id)
                if answer.code == 0:
                    return parse_text(answer.out, job_id)
        if _UNKNOWN_JOB.search(answer.err) or (flags == "-f" and "finished" in answer.err):
            return None
        if not _NO_HISTORY.search(answer.err):
            break
    raise DdpHpcError(f"qstat says: {answer.said}; try it by hand: qstat -xf {job_id}")


def parse_json(text: str, job_id: str) -> JobState:
    """The job in the answer of `qstat -f -F json`.

    Raises:
        ValueError: it is not JSON, or JSON of something else.
        DdpHpcError: it is of another job, or lacks a state.
    """
    try:
        answer = json.loads(text, strict=False)
        jobs = answer["Jobs"]
        found = [(name, job) for name, job in jobs.items() if same_job(name, job_id)]
        if not found and jobs:
            raise _not_of(job_id, ", ".join(jobs))
        [(name, job)] = found
        flat: dict[str, str] = {}
        for key, value in job.items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat |= {f"{key}.{part}".rstrip("."): _text(one) for part, one in inner}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no answer of qstat") from error
    return _state(name, flat, flat.get("Variable_List.PBS_O_WORKDIR", ""))


def parse_text(text: str, job_id: str) -> JobState:
    """The job in the answer of `qstat -f`, with or without -w.

    Raises:
        DdpHpcError: it is none, or of another job.
    """
    lines = text.replace("\n\t", "").splitlines()
    name = lines[0].partition("Job Id:")[2].strip() if lines else ""
    if not same_job(name, job_id):
        raise _not_of(job_id, name or text[:80])
    parts = (line.strip().partition(" = ") for line in lines[1:])
    flat = {key: value for key, equals, value in parts if equals}
    found = _WORK_DIR.search(flat.get("Variable_List", ""))
    return _state(name, flat, re.sub(r"\\(.)", r"\1", found[1]) if found else "")


def job_id_of(answer: str) -> str | None:
    """The id in qsub's last line."""
    match = re.fullmatch(r"([0-9]+(?:\[\])?(?:\.[A-Za-z0-9.-]+)?)", answer)
    return match[1] if match else None


def cancel(job_id: str) -> str:
    """Ends the job; what PBS has against it, empty where it has nothing."""
    answer = commands.submit("qdel", job_id)
    return answer.said if answer.code else ""


def _not_of(job_id: str, seen: str) -> DdpHpcError:
    return DdpHpcError(
        f"qstat was asked for job {job_id} and answers {commands.plain(seen[:80])!r}; try it by hand: "
        f"qstat -xf {job_id}"
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _state(name: str, job: Mapping[str, str], work_dir: str) -> JobState:
    word = job.get("job_state", "")
    if word not in _PHASES:
        raise DdpHpcError(
            f"qstat says that job {name} is {commands.plain(word[:40])!r}, which is no state of its manual; "
            f"try it by hand: qstat -xf {name}"
        )
    if name.endswith("[]") or "[]." in name:
        raise RequestError(
            f"job {name} is an array; name one job of it, such as {name.replace('[]', '[0]', 1)}"
        )
    phase = _PHASES[word]
    status = _whole(job.get("Exit_status", "")) if phase == "ended" else None
    walltime = job.get("Resource_List.walltime", "")
    keep = job.get("Keep_Files", "")
    estimate = job.get("estimated.start_time", "") if phase == "waiting" else ""
    return JobState(
        job_id=name,
        scheduler="pbs",
        phase=phase,
        word=word,
        end=_end_of(status, "stime" in job, job.get("substate", "")) if phase == "ended" else "",
        name=job.get("Job_Name", ""),
        owner=job.get("Job_Owner", "").partition("@")[0],
        reason=_reason(job, status),
        nodes="+".join(dict.fromkeys(part.partition("/")[0] for part in job.get("exec_host", "").split("+"))),
        elapsed_s=_elapsed_s(job, phase),
        walltime_s=duration_s(walltime) or _whole(walltime),
        starts_at_s=clock_s(estimate, _TIME) or _whole(estimate),
        exit_code=status if status is not None and 0 <= status < _SIGNALLED else None,
        signal=status - _SIGNALLED if status is not None and status > _SIGNALLED else None,
        log=_log(job.get("Output_Path", ""), f"{name}.OU"),
        error_log=_log(job.get("Error_Path", ""), f"{name}.ER") if job.get("Join_Path") == "n" else "",
        # -k doe writes to the log's own place; else it is copied there when the job has ended.
        log_is_live="d" in keep and "o" in keep,
        work_dir=work_dir,
        script=_script(job.get("Submit_arguments", ""), work_dir),
    )


def _end_of(status: int | None, started: bool, substate: str) -> End:
    if status is None:
        # Deleted while it waited, by a person or because the job before it failed.
        return "failed" if started else "cancelled"
    if status == 0:
        return "done"
    if status < 0:
        return _ENDS.get(status, "failed")
    # 91: TERMINATED, by qdel.
    return "cancelled" if status > _SIGNALLED and substate == "91" else "failed"


def _reason(job: Mapping[str, str], status: int | None) -> str:
    why = _REASONS.get(status, "") if status is not None else ""
    after = job.get("depend", "") if job.get("job_state") == "H" else ""
    parts = (why, f"it waits for {after}" if after else "", job.get("comment", ""))
    return "; ".join(part for part in parts if part)


def _elapsed_s(job: Mapping[str, str], phase: Phase) -> int | None:
    # The first update of a running job comes late.
    used_s = duration_s(job.get("resources_used.walltime", ""))
    if phase != "running" or (start_s := clock_s(job.get("stime", ""), _TIME)) is None:
        return used_s
    return max(used_s or 0, int(time.time() - start_s))


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else None


def _log(text: str, name_in_folder: str) -> str:
    """The path in `host:path`; a path that ends in a slash is a folder."""
    path = text.partition(":")[2] or text
    return f"{path}{name_in_folder}" if path.endswith("/") else path


def _script(arguments: str, work_dir: str) -> str:
    """The last word of qsub's command line; empty where the script came through a pipe."""
    try:
        words = shlex.split(arguments)
    except ValueError:
        return ""
    return str(Path(work_dir) / words[-1]) if words and work_dir else ""
