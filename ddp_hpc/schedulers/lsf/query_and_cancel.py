"""Queries LSF jobs with bjobs, or with bhist after bjobs has forgotten them, and cancels them with bkill.

bjobs reports a finished job until CLEAN_PERIOD has passed, by default one hour (lsb.params.5). -json needs
LSF 10.1.0.2.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import End, JobState, Phase
from ddp_hpc.schedulers.lsf.times import limit_s, run_time_s
from ddp_hpc.text_table import printable

_UNKNOWN_JOB = re.compile(r"is not found|No matching job found", re.IGNORECASE)
_SUBMITTED = re.compile(r"Job <([0-9]{1,18})> is submitted to (?:default )?queue <.*>\.?")
# Fields of `bjobs -o` (bjobs.1).
_FIELDS = (
    "jobid stat user job_name exec_host run_time runtimelimit pend_reason kill_reason exit_reason exit_code "
    "output_file error_file exec_cwd sub_cwd"
)
# Job states of bjobs.1. UNKWN: the host of a running job cannot be reached.
_PHASES: dict[str, Phase] = {
    **dict.fromkeys(("PEND", "PSUSP", "PROV", "WAIT", "FWD_PEND"), "waiting"),
    **dict.fromkeys(("RUN", "USUSP", "SSUSP", "UNKWN"), "running"),
    **dict.fromkeys(("DONE", "EXIT", "ZOMBI"), "ended"),
}
# From IBM's page "Termination reasons displayed by bacct, bhist, and bjobs".
_ENDS: dict[str, End] = {
    **dict.fromkeys(("TERM_RUNLIMIT", "TERM_DEADLINE", "TERM_WINDOW"), "walltime"),
    **dict.fromkeys(("TERM_MEMLIMIT", "TERM_SWAP"), "memory"),
    **dict.fromkeys(("TERM_ZOMBIE", "TERM_REMOVE_HUNG_JOB"), "node"),
    **dict.fromkeys(
        ("TERM_OWNER", "TERM_ADMIN", "TERM_FORCE_OWNER", "TERM_FORCE_ADMIN", "TERM_BUCKET_KILL"), "cancelled"
    ),
    **dict.fromkeys(("TERM_PREEMPT", "TERM_REQUEUE_OWNER", "TERM_REQUEUE_ADMIN"), "preempted"),
    **dict.fromkeys(("TERM_PRE_EXEC_FAIL", "TERM_CWD_NOTEXIST", "TERM_CSM_ALLOC"), "not started"),
    "TERM_ORPHAN_SYSTEM": "dropped",
}
_SIGNALLED = 128


def read_job(job_id: str) -> JobState | None:
    """Returns the state of the job from LSF; None if there is no such job.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: LSF does not answer, or its answer is invalid.
    """
    answer = commands.ask("bjobs", "-json", "-o", _FIELDS, job_id)
    if _UNKNOWN_JOB.search(answer.out + answer.err):
        return _from_bhist(job_id)
    if answer.code:
        raise DdpHpcError(f"bjobs failed: {answer.said}. Try it manually: bjobs -l {job_id}")
    return parse_json(answer.out, job_id)


def parse_json(text: str, job_id: str) -> JobState:
    """Returns the job in the output of `bjobs -json -o`.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: the output is invalid, or is for another job.
    """
    try:
        records = json.loads(text, strict=False)["RECORDS"]
        found = [{key: str(value) for key, value in record.items()} for record in records]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = []
    number = job_id.partition("[")[0]
    if len(found) > 1 and "[" not in job_id:
        raise RequestError(
            f"job {job_id} is a job array; give the ID of one of its jobs, such as {number}[1]"
        )
    if not found or found[0].get("JOBID", "").partition("[")[0] != number:
        raise DdpHpcError(
            f"unexpected output of bjobs for job {job_id}: {printable(text[:80])!r}. Try it manually: "
            f"bjobs -l {job_id}"
        )
    return _state(job_id, found[0])


def job_id_of(answer: str) -> str | None:
    """Returns the job id in the last line of the output of bsub; None if it has none."""
    match = _SUBMITTED.fullmatch(answer)
    return match[1] if match else None


def cancel(job_id: str) -> str:
    """Cancels the job; returns the error message of LSF, empty on success."""
    answer = commands.submit("bkill", job_id)
    return answer.said if answer.code else ""


def _state(job_id: str, job: Mapping[str, str]) -> JobState:
    known = {key: "" if value == "-" else value for key, value in job.items()}
    word = known.get("STAT", "")
    if word not in _PHASES:
        raise DdpHpcError(
            f"bjobs reports the unknown state {printable(word[:40])!r} for job {job_id}. "
            f"Try it manually: bjobs -l {job_id}"
        )
    phase = _PHASES[word]
    why = known.get("EXIT_REASON", "") or known.get("KILL_REASON", "")
    code = int(known["EXIT_CODE"]) if known.get("EXIT_CODE", "").isdecimal() else None
    end = _end_of(word, why) if phase == "ended" else ""
    signalled = code is not None and code > _SIGNALLED and bool(_ENDS.get(_term(why)) or _term(why))
    work_dir = _home(known.get("EXEC_CWD", "") or known.get("SUB_CWD", ""))
    return JobState(
        job_id=job_id,
        scheduler="lsf",
        phase=phase,
        word=word,
        end=end,
        name=known.get("JOB_NAME", ""),
        owner=known.get("USER", ""),
        reason=_reason(job_id, word, known, why),
        nodes=",".join(
            dict.fromkeys(part.rpartition("*")[2] for part in known.get("EXEC_HOST", "").split(":"))
        ),
        elapsed_s=run_time_s(known.get("RUN_TIME", "")),
        walltime_s=limit_s(known.get("RUNTIMELIMIT", "").partition("/")[0]),
        exit_code=0 if word == "DONE" else None if phase != "ended" or signalled else code,
        signal=code - _SIGNALLED if phase == "ended" and signalled and code is not None else None,
        log=_log(known.get("OUTPUT_FILE", ""), job_id, work_dir),
        error_log=_log(known.get("ERROR_FILE", ""), job_id, work_dir),
        work_dir=work_dir,
    )


def _term(why: str) -> str:
    """Returns the keyword in a termination reason, such as TERM_OWNER; empty if there is none."""
    match = re.search(r"\bTERM_[A-Z_]+", why)
    return match[0] if match else ""


def _end_of(word: str, why: str) -> End:
    if word == "DONE":
        return "done"
    return "node" if word == "ZOMBI" else _ENDS.get(_term(why), "failed")


def _reason(job_id: str, word: str, known: Mapping[str, str], why: str) -> str:
    if word == "PSUSP":
        return f"it was suspended before it started; bresume {job_id} releases it"
    if word in ("USUSP", "SSUSP"):
        return "it is suspended"
    if word == "UNKWN":
        return "LSF cannot reach the host of the job"
    return known.get("PEND_REASON", "").strip("; ") if word == "PEND" else why


def _log(path: str, job_id: str, work_dir: str) -> str:
    """Returns the path of a log, with %J and %I replaced; JOBID.out if `path` is a directory (bsub -o)."""
    number, _, index = job_id.rstrip("]").partition("[")
    expanded = _home(path.replace("%J", number).replace("%I", index or "0"))
    if path.endswith("/"):
        expanded = f"{expanded}{number}.out"
    return str(Path(work_dir) / expanded) if path and path != "/dev/null" else ""


def _home(path: str) -> str:
    """Returns a path with the home directory instead of `$HOME`, which bjobs prints."""
    return str(Path.home() / path[6:]) if path.startswith("$HOME/") else path


def _from_bhist(job_id: str) -> JobState | None:
    """Returns a finished job from the event log of LSF; None if bhist does not know the job."""
    if shutil.which("bhist") is None:
        return None
    answer = commands.ask("bhist", "-l", job_id)
    if answer.code or _UNKNOWN_JOB.search(answer.out + answer.err):
        return None
    return parse_bhist(answer.out, job_id)


def parse_bhist(text: str, job_id: str) -> JobState | None:
    """Returns the finished job in the output of `bhist -l`; None if it has not ended.

    Raises:
        DdpHpcError: the output is for another job.
    """
    # bhist breaks long lines, even within words, and indents their continuation.
    joined = re.sub(r"\n {21}", "", text)
    number = job_id.partition("[")[0]
    if not re.search(rf"Job <{re.escape(number)}(?:\[\d+\])?>", joined):
        raise DdpHpcError(
            f"unexpected output of bhist for job {job_id}: {printable(text[:80])!r}. "
            f"Try it manually: bhist -l {job_id}"
        )
    ended = re.search(r": (Done successfully|Exited|Completed <(?:exit|done)>)(.*)", joined)
    if ended is None:
        return None
    is_done = ended[1] in ("Done successfully", "Completed <done>")
    field = {
        name: match[1] if (match := re.search(rf"{name} <([^>]*)>", joined)) else ""
        for name in ("Job Name", "User", "CWD", "Output File", "Error File")
    }
    code = re.search(r"Exited with exit code (\d{1,3})", joined)
    signal = re.search(r"Exited by signal (\d{1,3})", joined)
    # A termination reason can be on a separate line after the line with the exit code.
    term = re.search(r"\bTERM_[A-Z_]+: [^.;\n]*", joined)
    work_dir = _home(field["CWD"])
    return JobState(
        job_id=job_id,
        scheduler="lsf",
        phase="ended",
        word="DONE" if is_done else "EXIT",
        end=_end_of("DONE" if is_done else "EXIT", term[0] if term else ""),
        name=field["Job Name"],
        owner=field["User"],
        reason=term[0] if term and not is_done else "",
        exit_code=0 if is_done else int(code[1]) if code else None,
        signal=int(signal[1]) if signal and not is_done else None,
        log=_log(field["Output File"], job_id, work_dir),
        error_log=_log(field["Error File"], job_id, work_dir),
        work_dir=work_dir,
    )
