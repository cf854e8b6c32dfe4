"""Checks of a script's outer form, whichever scheduler reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from ddp_hpc.batch.bash_syntax import bash_complaint
from ddp_hpc.batch.checks_registry import Seen, Subject, check, plain, shown
from ddp_hpc.batch.script import MAX_CHARS, PREFIXES

_SECRET = re.compile(
    r"[A-Z0-9_]*(?:API_?KEY|SECRET|PASSWORD|PASSWD|AUTH_TOKEN|ACCESS_TOKEN|HF_TOKEN|GITHUB_TOKEN)[A-Z0-9_]*"
)
# A comment that begins like a directive: `#PSB -l`, `# SBATCH --nodes`, `#sbatch -N 2`.
_NEARLY = re.compile(r"#(#?)([ \t]*)([A-Za-z]{3,8}:?)([ \t]*)(-{1,2}[A-Za-z])")


@check("JOB001", "error", "the script is empty, or no text")
def _not_text(subject: Subject) -> Iterator[Seen]:
    text = subject.script.text
    if not text.strip():
        yield Seen(1, "the script is empty", "write a script, or let `ddp-hpc render` write one")
    elif "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        yield Seen(line, "the script holds a NUL character, which sbatch refuses", "submit a text file")
    elif len(text) >= MAX_CHARS:
        yield Seen(1, "the script is larger than the 4 MB that Slurm takes", "keep data in files beside it")


@check("JOB002", "error", "Windows line ends")
def _windows_line_ends(subject: Subject) -> Iterator[Seen]:
    text = subject.script.text
    if "\r\n" in text:
        line = text.count("\n", 0, text.index("\r\n")) + 1
        yield Seen(
            line, "the line ends in CR LF, which qsub and sbatch refuse", "run: sed -i 's/\\r$//' SCRIPT"
        )


@check("JOB003", "error", "bash does not understand the script")
def _broken_bash(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    if not re.search(r"\b(?:ba)?sh\b", script.shebang):
        return
    if found := bash_complaint(script.text.replace("\r\n", "\n")):
        line, words = found
        yield Seen(line, f"bash -n says: {plain(words)}", "close the quote or the block")


@check("JOB004", "error", "directive after the first command")
def _late_directives(subject: Subject) -> Iterator[Seen]:
    for line in dict.fromkeys(d.line for d in subject.script.directives if d.late):
        yield Seen(
            line,
            "this directive stands after the first command, where the scheduler does not read it",
            "move it up to the other directives, above set, module and cd",
        )


@check("JOB005", "error", "a comment that was meant to be a directive")
def _nearly_directives(subject: Subject) -> Iterator[Seen]:
    known = [prefix[1:] for prefix in PREFIXES.values()]
    for number, line in enumerate(subject.script.lines, start=1):
        match = _NEARLY.match(line)
        # `##PBS` is how people switch a directive off.
        if not match or match[1] or (match[3] in known and not match[2] and match[4]):
            continue
        for word in get_close_matches(match[3].rstrip(":").upper(), known, n=1, cutoff=0.6):
            yield Seen(
                number,
                f"{shown(match[0])} is a comment to the scheduler, and the option after it is not read",
                f"write #{word} at the very beginning of the line",
            )


@check("JOB006", "warning", "directives of both schedulers")
def _both_schedulers(subject: Subject) -> Iterator[Seen]:
    read = {d.scheduler: d.line for d in reversed(subject.script.directives) if not d.late}
    if len(read) == 2:
        yield Seen(
            max(read.values()),
            "the script has #PBS and #SBATCH lines; sbatch reads both, and qsub only the first kind",
            "keep one script for each scheduler, or sbatch --ignore-pbs",
        )


@check("JOB007", "warning", "the same directive twice, with two values")
def _contradictions(subject: Subject) -> Iterator[Seen]:
    seen: dict[str, str] = {}
    script = subject.script
    pairs = [(d.line, f"-l {name}", value) for d, name, value in script.resources()]
    # -W and -v may be given again and again, each with another attribute.
    pairs += [(d.line, d.flag, d.value) for d in script.read() if d.flag not in ("-l", "-W", "-v", "-m", "")]
    for line, name, value in sorted(pairs):
        if name in seen and seen[name] != value:
            yield Seen(
                line,
                f"{plain(name)} is {shown(seen[name])} further up and {shown(value)} here; the last one wins",
                "keep one of the two",
            )
        seen[name] = value


@check("JOB008", "error", "a variable or ~ in a directive")
def _unexpanded(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        # -v and --export hand values to the job, where a dollar may be meant.
        if d.flag in ("-v", "--export", "--comment", "--wrap"):
            continue
        if "$" in d.value or re.match(r"(?:[^/:]*:)?~", d.value):
            yield Seen(
                d.line,
                f"{d.flag} {shown(d.value)}: no scheduler expands variables, ~ or $( ) in a directive",
                "write the value out, or give it to qsub or sbatch on the command line",
            )


@check("JOB009", "warning", "a secret in the script")
def _secrets(subject: Subject) -> Iterator[Seen]:
    for line, name, value in subject.script.assignments:
        if _SECRET.fullmatch(name) and len(value) >= 8 and not re.search(r"[$`/]", value):
            yield Seen(
                line,
                f"{plain(name)} is written into the script; the scheduler keeps a copy that others may read",
                f"read it from a file of your own (chmod 600): export {plain(name)}=$(cat ~/.secrets/FILE)",
            )


@check("JOB010", "warning", "no walltime")
def _no_walltime(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    if script.scheduler and subject.walltime is None and script.value("--wrap") is None:
        spelled = "#PBS -l walltime=HH:MM:SS" if script.scheduler == "pbs" else "#SBATCH --time=HH:MM:SS"
        yield Seen(
            1,
            "no walltime is asked for; the queue's default may be minutes, and some sites refuse the job",
            f"add {spelled}, or name it when you submit",
        )


_TIME = {
    "pbs": re.compile(r"\d{1,9}|\d{1,9}:\d{1,2}|\d{1,6}:\d{1,2}:\d{1,2}(?:\.\d+)?"),
    "slurm": re.compile(
        r"\d{1,9}|\d{1,9}:\d{1,2}|\d{1,6}:\d{1,2}:\d{1,2}|\d{1,5}-\d{1,2}(?::\d{1,2}){0,2}|(?i:infinite|unlimited)"
    ),
}


@check("JOB011", "error", "a walltime that cannot be read")
def _unreadable_walltime(subject: Subject) -> Iterator[Seen]:
    if subject.walltime:
        line, text = subject.walltime
        if "$" not in text and not _TIME[subject.script.scheduler].fullmatch(text):
            yield Seen(
                line,
                f"walltime {shown(text)} is no time to the scheduler",
                "write HH:MM:SS, such as 01:30:00",
            )


@check("JOB012", "warning", "a walltime that means something else than it seems")
def _ambiguous_walltime(subject: Subject) -> Iterator[Seen]:
    line, text = subject.walltime or (1, "")
    if re.fullmatch(r"0*[1-9]\d{0,8}", text) and subject.script.scheduler == "pbs":
        yield Seen(line, f"walltime {text} is {int(text)} seconds to PBS", "write HH:MM:SS, such as 01:30:00")
    elif re.fullmatch(r"\d{1,9}:\d{1,2}", text) and re.search("[1-9]", text):
        minutes, seconds = text.split(":")
        yield Seen(
            line,
            f"walltime {text} is {int(minutes)} minutes and {int(seconds)} seconds: "
            "two fields are read as minutes and seconds",
            f"write {text}:00 for hours and minutes, or 00:{text}",
        )


@check("JOB013", "error", "a walltime of zero")
def _zero_walltime(subject: Subject) -> Iterator[Seen]:
    line, text = subject.walltime or (1, "")
    if re.fullmatch(r"0[0:-]{0,20}", text):
        yield Seen(
            line,
            f"walltime {text} is no time at all (on Slurm: no limit, which a partition with one refuses)",
            "write HH:MM:SS, such as 01:30:00",
        )


@check("JOB014", "note", "directives of a scheduler that is not looked at")
def _unknown_scheduler(subject: Subject) -> Iterator[Seen]:
    for number, line in enumerate(subject.script.lines, start=1):
        if match := re.match(r"#\$ -|#[ ]?flux: ?-|#BSUB -|#PJM -", line):
            name = {"#$": "Grid Engine", "#B": "LSF", "#P": "Fujitsu's scheduler"}.get(match[0][:2], "Flux")
            yield Seen(
                number,
                f"these are directives of {name}; only the body of the script is looked at",
                "nothing, unless the script is for PBS or Slurm",
            )
            return
