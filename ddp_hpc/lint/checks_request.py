"""Checks of the walltime and the memory that a script requests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain, shown
from ddp_hpc.lint.launch_commands import requests_gpus
from ddp_hpc.lint.placeholders import has_placeholder, stands_for_value
from ddp_hpc.schedulers.script_options import whole_number

# Half a day and whole days in hours. In 33,000 public scripts, most of the 220 walltimes with two fields, and
# all but one of the numbers of minutes, are others.
_USUAL_HOURS = ("12", "24", "36", "48", "72", "96", "168")
_HOURS = re.compile(r"(\d*)[ -]?\b(?:hours?|hrs?|HH:MM)\b(?!:)", re.IGNORECASE)
# A time that is not the number of hours.
_IN_WORDS = re.compile(
    r"(?i)\bmin(?:ute)?s?\b|\b(?:an?|one|two|three|four|five|six|eight|ten|twelve|half)[ -](?:an )?hours?\b"
    r"|\b\d+ ?h ?\d\d\b"
)
_IN_MINUTES = re.compile(r"(?i)(?!.*(?:hour|HH)).*(?:\bmin(?:ute)?s?\b|MM:SS)")
_INTERPRETER = re.compile(
    r"\b(?:python[\d.]*|Rscript|(?<!-)R|julia|matlab|java|conda|nextflow|snakemake)\b|\.(?:py|R)\b"
)
_MEGABYTES = re.compile(r"(?:\b|\d)(?:mi?b|megabytes?|m)\b", re.IGNORECASE)
_WALLTIME_FORM = "HH:MM:SS, such as 01:30:00"
_MAX_CHARS = 500
_MOST_S = 7 * 86400  # longer times are no limits
_MOST_MINUTES = 20 * 1440  # few sites allow longer jobs


@check("JOB010", "note", "no walltime")
def _no_walltime(subject: Subject) -> Iterator[Problem]:
    reader, site = subject.scheduler.reader, subject.site
    directive = reader.walltime_directive
    # Without a profile, nothing is known about the default.
    if not site or not directive or subject.walltime or subject.script.value("--wrap") is not None:
        return
    flag, directives = reader.walltime_flag, subject.script.directives_of(subject.script.scheduler)
    late = [d.line for d in directives if d.late and (d.flag == flag or "walltime=" in d.value)]
    if late:
        what = "the scheduler ignores this walltime, which is below the first command"
        yield Problem(late[0], what, "move it to the other directives, above the first command")
    else:
        what = "no walltime is requested: the queue's default may be short, and some sites reject the job"
        yield Problem(1, what, f"add {directive}, or pass it on the command line")


@check("JOB011", "error", "an invalid walltime")
def _unreadable_walltime(subject: Subject) -> Iterator[Problem]:
    if subject.walltime:
        line, text = subject.walltime
        is_value = "$" not in text and not has_placeholder(text) and line not in subject.placeholder_lines
        # SLURM003 and SLURM017 report an option that has no value.
        if (
            is_value
            and text[:1] != "-"
            and text != "="
            and not subject.scheduler.reader.accepts_walltime(text)
        ):
            what = f"the scheduler does not accept the walltime {shown(text)}"
            days = re.fullmatch(r"0*(\d{1,3}):(\d\d:\d\d:\d\d)", text)
            is_slurm = subject.scheduler.reader.bare_walltime_unit_s == 60
            form = _WALLTIME_FORM + ", or D-HH:MM:SS" * is_slurm
            form = f"{days[1]}-{days[2]}" if days and is_slurm else form
            remedy = "remove the = before it" if text[:1] == "=" else f"write {form}"
            # sbatch also reads #PBS lines, and takes this for its own.
            may_be_slurm = not is_slurm and re.search(r"\$\{?SLURM_", subject.script.text)
            severity: Severity | None = "note" if may_be_slurm else None
            is_to_fill_in = not text or stands_for_value(text)
            yield Problem(line, what, remedy, severity, is_to_fill_in)


def _time_of_cpus(subject: Subject) -> Iterator[Problem]:
    """Yields a limit of CPU time (cput) without a walltime."""
    resources = subject.script.resources() if not subject.walltime else ()
    given = {name: (d.line, value) for d, name, value in resources}
    line, text = given.get("cput", (1, ""))
    chunk = re.search(r"(?:ncpus|ppn)=(\d{1,4})\b", " ".join(value for _, value in given.values()))
    limit_s = (subject.scheduler.reader.walltime_s(text) if text else 0) or 0
    if 0 < limit_s <= _MOST_S and chunk and (cpus := int(chunk[1]) * (subject.num_nodes or 1)) > 1:
        what = f"cput is the CPU time of the whole job, and {cpus} CPUs can use it up in "
        what += counted(max(1, limit_s // cpus // 60), "minute")
        yield Problem(line, what, f"write walltime={plain(text)} if this is the time of the job", "note")


@check("JOB012", "warning", "an ambiguous walltime")
def _ambiguous_walltime(subject: Subject) -> Iterator[Problem]:
    yield from _time_of_cpus(subject)
    line, text = subject.walltime or (1, "")
    comment = _comment(subject, line)
    says_hours = None if re.search(r"\bmin(?!imum)", comment) else _HOURS.search(comment)
    in_seconds = subject.scheduler.reader.bare_walltime_unit_s < 60
    if in_seconds and 0 < (whole_number(text) or 0) < 300:
        what = f"{subject.scheduler.title} reads walltime {text} as {int(text)} seconds"
        # A job can be a test of a few seconds.
        yield Problem(line, what, f"write {_WALLTIME_FORM}", None if text in _USUAL_HOURS else "note")
    elif re.fullmatch(r"[1-9]\d{0,3}", text) and (
        (text in _USUAL_HOURS[1:] or (says_hours and says_hours[1] in ("", text)))
        and not (
            (in_seconds or int(text) < 3600) and _IN_WORDS.search(comment) and f"{text} h" not in comment
        )
    ):
        unit = "seconds" if in_seconds else "minutes"
        what = f"{subject.scheduler.title} reads walltime {text} as {text} {unit}"
        # A comment such as `# Runtime in D-HH:MM` is a part of many templates.
        means_hours = text in _USUAL_HOURS or (says_hours and "HH" not in says_hours[0].upper())
        yield Problem(line, what, f"write {text}:00:00", None if means_hours else "note")
    elif subject.scheduler.reader.bare_walltime_unit_s == 60 and re.fullmatch(r"[1-9]\d{3,6}", text):
        if int(text) % 3600 == 0 and int(text) > _MOST_MINUTES:
            what = f"{subject.scheduler.title} reads walltime {text} as minutes: {int(text) / 1440:g} days"
            yield Problem(line, what, f"write {int(text) // 3600}:00:00 if these are seconds", "note")
    elif re.fullmatch(r"\d{1,9}:\d{1,2}", text) and (
        (_may_be_hours(text, comment) or (says_hours and _says_these(says_hours[1], text, comment)))
        and not _IN_MINUTES.match(comment)
    ):
        what = f"the two fields of walltime {text} are minutes and seconds"
        in_minutes = ":".join(f"{int(field):02}" for field in ("0", *text.split(":")))
        remedy = f"write {text}:00 if these are hours and minutes, or {in_minutes}"
        flags = ("--partition", "--qos", "-q")
        is_test = any(
            re.search("debug|test|devel", d.value) for d in subject.script.read() if d.flag in flags
        )
        is_sure = says_hours or (text.partition(":")[0] in _USUAL_HOURS[1:] and not is_test)
        yield Problem(line, what, remedy, None if is_sure else "note")


def _says_these(hours: str, text: str, comment: str) -> bool:
    """Returns whether hours in a comment may be those of two fields, not the limit of a queue."""
    first = int(text.partition(":")[0])
    return first <= 12 or (hours in ("", str(first)) and not _IN_WORDS.search(comment))


def _may_be_hours(text: str, comment: str) -> bool:
    return text.partition(":")[0] in _USUAL_HOURS or "HH:MM" in comment.upper()


def _comment(subject: Subject, line: int) -> str:
    """Returns the comment after a directive; empty if there is none."""
    return subject.script.lines[line - 1][:_MAX_CHARS].lstrip("#").partition("#")[2]


@check("JOB021", "warning", "memory without a unit")
def _memory_without_unit(subject: Subject) -> Iterator[Problem]:
    # Some users request few megabytes on purpose, but not for a job with a GPU or an interpreter.
    limit = 512 if requests_gpus(subject) else 256
    for line, name, value in subject.scheduler.reader.memory(subject.script):
        number = whole_number(value) or 0
        if _MEGABYTES.search(_comment(subject, line)) or any(
            not d.flag and d.line == line for d in subject.script.read()
        ):
            continue  # another check reports the word after the number
        unit = subject.scheduler.reader.bare_memory_unit
        mega, giga = ("mb", "gb") if unit == "bytes" else ("M", "G")
        if re.fullmatch(r"(?i)\d{1,2}mb?|\d{1,5}kb?", value):
            what = f"{plain(name)}={plain(value)} is less than 100 megabytes"
            yield Problem(line, what, f"write the unit that you mean, such as {plain(name)}=8{giga}", "note")
        if number and (number < limit or (unit == "bytes" and number < 10**8)):
            programs = (command.launched or command.argv for command in subject.script.commands)
            is_large = any(_INTERPRETER.search(" ".join(words[:9])) for words in programs)
            is_small = unit != "bytes" and limit == 256 and not is_large
            is_small |= "per-cpu" in name and number >= 100
            read = counted(number, unit.removesuffix("s"))
            what = f"{subject.scheduler.title} reads {plain(name)}={number} as {read}"
            meant = f"{number}{giga} or {number}{mega}" if number < limit else f"8{giga}"
            remedy = f"write the unit that you mean, such as {plain(name)}={meant}"
            yield Problem(line, what, remedy, "note" if is_small else None)
