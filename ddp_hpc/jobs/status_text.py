"""What `ddp-hpc status` says of one job, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ddp_hpc.jobs.job_report import View
from ddp_hpc.jobs.post_mortem import PostMortem
from ddp_hpc.schedulers.run_command import plain
from ddp_hpc.units import format_walltime

_MAX_ATTEMPTS = 5


def lines_of(seen: View) -> Iterator[str]:
    """The lines: a word, then what there is to say about it; no line for what nobody knows."""
    for word, text in _facts(seen):
        if text:
            yield f"{word:<10}{plain(text)}"
    if seen.post_mortem is not None:
        yield from _ended(seen.post_mortem)


def _facts(seen: View) -> Iterator[tuple[str, str]]:
    job = seen.job
    if job is None:
        yield "job", f"{seen.job_id}: {seen.verdict}; the scheduler no longer knows it"
    else:
        named = f" ({job.name} of {job.owner})" if job.name else ""
        on = f" on {job.nodes}" if job.nodes else ""
        yield "job", f"{seen.job_id}{named}: {seen.verdict}, {job.word}{on}"
        if job.phase == "waiting":
            yield "waits", job.reason
            yield "starts", _start(job.starts_at_s)
            yield "do", seen.advice
        yield "time", _time(seen)
    if sent := seen.submission:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(sent.at_s))
        yield "sent", f"{when} by {sent.user} on {sent.host}"
    yield "step", _step(seen)
    yield "eta", _eta(seen)
    yield "state", f"{seen.state.state} {seen.state.step} {seen.state.reason}" if seen.state else ""
    yield "attempts", _attempts(seen)
    yield "next", f"job {seen.next_job}" if seen.next_job else ""
    yield "log", ", ".join(seen.logs)
    yield "run", seen.run_dir


def _start(at_s: float | None) -> str:
    if at_s is None:
        return ""
    in_s = max(0, int(at_s - time.time()))
    return f"about {time.strftime('%Y-%m-%d %H:%M', time.localtime(at_s))}, in {format_walltime(in_s)}"


def _time(seen: View) -> str:
    job = seen.job
    if job is None or job.walltime_s is None:
        return ""
    if job.elapsed_s is None or job.phase == "waiting":
        return f"{format_walltime(job.walltime_s)} asked for"
    return f"{format_walltime(job.elapsed_s)} of {format_walltime(job.walltime_s)}"


def _step(seen: View) -> str:
    progress = seen.progress
    if progress is None:
        return ""
    of = f" of {progress.num_steps}" if progress.num_steps else ""
    return f"{progress.step}{of}" + (f", loss {progress.loss:.6g}" if progress.loss is not None else "")


def _eta(seen: View) -> str:
    """When the training is done, against when the job ends."""
    job, progress = seen.job, seen.progress
    if job is None or job.phase != "running" or progress is None or progress.left_s is None:
        return ""
    left_s = max(0, progress.left_s - int(seen.log_age_s))
    text = f"{format_walltime(left_s)} to go"
    if job.walltime_s is None or job.elapsed_s is None:
        return text
    spare_s = job.walltime_s - job.elapsed_s - left_s
    if spare_s >= 0:
        return f"{text}, {format_walltime(spare_s)} before the walltime ends"
    then = "it is to go on in another job" if seen.run_dir else "it will not be done in this job"
    return f"{text}, {format_walltime(-spare_s)} more than the walltime has; {then}"


def _attempts(seen: View) -> str:
    last = seen.attempts[-_MAX_ATTEMPTS:]
    listed = ", ".join(f"{one.number} (job {one.job_id} from step {one.first_step})" for one in last)
    return f"... {listed}" if len(last) < len(seen.attempts) else listed


def _ended(found: PostMortem) -> Iterator[str]:
    yield f"{'why':<10}{found.cause}: {plain(found.what)}"
    if found.rank is not None or found.host:
        who = f"rank {found.rank}" if found.rank is not None else "a rank"
        where = f" on {plain(found.host)}" if found.host else ""
        yield f"{'first':<10}{who}{where}"
    for line in found.lines:
        yield f"  | {plain(line)}"
    yield f"{'do':<10}{plain(found.remedy)}"
