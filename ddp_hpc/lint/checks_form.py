"""Checks of a script's form that do not depend on the scheduler."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches

from ddp_hpc.base.units import counted
from ddp_hpc.lint.bash_syntax import is_reached
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, is_one_edit, plain, shown
from ddp_hpc.lint.launch_commands import requests_gpus
from ddp_hpc.lint.long_options import near_option, with_two_dashes
from ddp_hpc.lint.parse_script import DIRECTIVE_PATTERNS, MAX_CHARS, Directive, Script
from ddp_hpc.lint.placeholders import has_placeholder, is_template
from ddp_hpc.schedulers.registry import MONITORED

# Words that must not be reported as misspelled directives: directives of Moab, NQS and LSF, and commands.
_NOT_MISSPELLED = ("MSUB", "QSUB", "BSUB", "BATCH:", "PBSDSH", "PBSEXEC", "BASH")
_NO_SCRIPTS = (".md", ".rst", ".log", ".out", ".html", ".ipynb", ".tex")
# A line that is only a variable or a name in braces.
_WHOLE_PLACEHOLDER = re.compile(r"\$\w+|\$?\{[A-Za-z_][\w.]*\}|@\w+@|%\(\w+\)s")
# Options of sbatch whose values are lists with commas (sbatch.1).
_LISTS = frozenset(
    (
        *("--acctg-freq", "--clusters", "--dependency", "--exclude", "--export", "--gres", "--licenses"),
        *("--mail-type", "--nodelist", "--propagate", "--tres-per-task"),
    )
)
_DEFAULTS = frozenset((f"--{of}", "1") for of in ("ntasks", "cpus-per-task", "ntasks-per-node"))
_CHANGES_JOB = re.compile("--(?:mem|time|gres|gpus|tres|nodes|ntasks|cpus|array|output|error)|-[lJtoe]$")
_REQUESTS = re.compile("--(?:mem|gres|gpus|nodes|ntasks|cpus)|-l$")
_OFTEN_DISABLED = frozenset(
    ("--account", "-A", "--partition", "-q", "--nodelist", "--exclude", "-M", "--mail-user")
)
# Options without which the job runs in the same way, and --nodelist.
_WITHOUT_EFFECT = frozenset(
    ("--nodelist", "--mail-type", "--mail-user", "-M", "-m", "--verbose", "--export", "--comment")
)
_LAST_IS_MEANT = frozenset(
    (
        *("--account", "-A", "--array", "--chdir", "--hint", "--job-name", "-N", "--partition", "-q"),
        *("--qos", "-l software"),
    )
)
_SUBMIT = re.compile(r"#+[ \t]*(?:[sqmb]sub|sbatch)\b(?=.*(?:\.\w+\b|[<|$`>&;]|\s[A-Za-z./]+\s*$))")
_INDENTED = re.compile(r"[ \t]+#SBATCH[ \t]+-")
# A comment that begins like a directive: `#PSB -l`, `# SBATCH --nodes`, `#sbatch -N 2`.
_NEARLY = re.compile(r"#(#?)([ \t]*)([A-Za-z]{3,8}:?)([ \t]*)(-{1,2}[A-Za-z][\w-]*)")


@check("JOB001", "error", "empty script, or not a text file")
def _not_text(subject: Subject) -> Iterator[Problem]:
    text, path = subject.script.text, subject.path
    if path is not None and path.suffix in _NO_SCRIPTS:
        what = f"{shown(path.name)} is a document or a log, so only job scripts in other files are checked"
        yield Problem(1, what, "check the script itself", "note")
    elif not text.strip():
        yield Problem(1, "the script is empty", "write a script, or generate one with `ddp-hpc render`")
    elif "\0" in text and subject.script.scheduler != "pbs":  # qsub and bash drop these characters
        line = text.count("\n", 0, text.index("\0")) + 1
        yield Problem(
            line, "the script contains a NUL character, which sbatch rejects", "save it as text in UTF-8"
        )
    elif len(text) >= MAX_CHARS:
        what = "the script is larger than the 4 MB that Slurm accepts"
        yield Problem(1, what, "move data to separate files")


@check("JOB027", "note", "a template")
def _template(subject: Subject) -> Iterator[Problem]:
    if template := subject.template:
        what = f"{shown(template.placeholder)} is a placeholder, so this file is a template"
        yield Problem(template.line, what, "fill it in, and check the result", is_to_fill_in=True)


@check("JOB002", "error", "Windows line endings or byte order mark")
def _of_windows(subject: Subject) -> Iterator[Problem]:
    text = subject.script.text
    if text.startswith("\ufeff"):
        what = "a byte order mark comes first, so sbatch rejects the script and qsub ignores directives"
        yield Problem(1, what, "run: sed -i '1s/^\\xEF\\xBB\\xBF//' SCRIPT")
    # A program in another language, such as perl, may write job scripts.
    is_for_shell = not subject.script.shebang or re.search(r"sh\b", subject.script.shebang)
    if "\r\n" in text:
        line = text.count("\n", 0, text.index("\r\n")) + 1
        what = "lines have Windows line endings (CR LF), which sbatch and the qsub of OpenPBS reject"
        severity: Severity | None = None if is_for_shell or subject.script.read() else "note"
        yield Problem(line, what, "run: sed -i 's/\\r$//' SCRIPT", severity)


@check("JOB004", "warning", "directive after the first command")
def _late_directives(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    own = script.directives_of(script.scheduler)
    remarks = {d.line for d in own if not d.flag}  # with words that the scheduler would reject
    late = [d for d in own if d.late and d.line not in remarks and not script.is_quoted(d.line)]
    lines = sorted({d.line for d in late})
    if lines and _belong_to_job(script, late) and is_reached(script, lines[0]):
        others = f" and {counted(len(lines) - 1, 'other')} come" if len(lines) > 1 else " comes"
        flags, given = {d.flag for d in late}, {d.flag for d in script.read()}
        # Users keep options that they do not use below the last command.
        last = max((command.line for command in script.commands), default=lines[0])
        are_kept = lines[0] > last and any(map(_REQUESTS.match, given))
        is_given = 2 * len(flags - given) <= len(flags) or flags <= given | subject.given_on_submission
        # The script sets the variables of qsub -v itself.
        set_again = [d for d in late if d.flag == "-v" and all(map(script.sets, d.value.split(",")))]
        is_harmless = all(d in set_again or _is_without_loss(d) for d in late)
        # JOB034 reports a first command such as `PBS -l nodes=1`.
        is_harmless |= re.match(r"(?:PBS|SBATCH)\s+-", script.commands[0].text) is not None
        moved = "them" if len(lines) > 1 else "it"
        faulty = " and line ".join(str(line) for line in sorted({d.line for d in late if d.fault})[:3])
        remedy = f"move {moved} to the other directives, above the first command"
        remedy += f", but correct or omit line {plain(faulty)}" if faulty else ""
        remedy += ", with values instead of variables" * any("$" in d.value for d in late)
        yield Problem(
            lines[0],
            f"this directive{others} after the first command, where the scheduler ignores directives",
            remedy,
            # They may be those of another job, and names of logs with variables have no better place.
            "note" if are_kept or is_given or is_harmless else None,
        )


def _is_without_loss(directive: Directive) -> bool:
    """Returns whether a directive sets a default, a name, or a log whose name has a variable of the shell."""
    is_log = directive.flag in ("-o", "-e", "--output", "--error")
    is_name = directive.flag in ("-N", "--job-name")
    is_default = (directive.flag, directive.value.lower()) in {
        *_DEFAULTS,
        ("--export", "all"),
        ("--mail-type", "none"),
    }
    return is_name or is_default or (is_log and "$" in directive.value)


def _belong_to_job(script: Script, late: list[Directive]) -> bool:
    """Returns whether late directives are meant for this job.

    They may also be those of a second script in the same file or of a template, or remarks in a program that
    submits other scripts.
    """
    before = [line.strip() for line in script.lines[1 : late[0].line - 1] if line.strip()]
    first = min((command.line for command in script.commands), default=late[0].line)
    after = [line.strip() for line in script.lines[first - 1 : late[0].line - 1]]
    is_second = any(line.startswith(("#!", "<<<<<<< ")) for line in after) or (
        {d.flag for d in late} & {d.flag for d in script.read()} & {"--job-name", "-N"}
    )
    is_for_template = (
        is_template(script)
        or any(has_placeholder(d.value, is_path=True) for d in late)
        or all(line[0] == "#" or _WHOLE_PLACEHOLDER.fullmatch(line) for line in before)
    )
    submits = any(c.argv and c.argv[0].endswith(("sbatch", "qsub")) for c in script.commands)
    is_job = script.shebang and len(late) > 1 and not submits
    return bool(script.read() or is_job) and not (is_second or is_for_template)


@check("JOB005", "warning", "a comment that looks like a misspelled directive")
def _nearly_directives(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    first = next((command.line for command in script.commands), len(script.lines) + 1)
    indented = [n for n, line in enumerate(script.lines[: first - 1], start=1) if _INDENTED.match(line)]
    given = {_one_of(d.flag) for d in script.read()}
    given -= subject.scheduler.reader.repeatable_flags_in(subject.scheduler_version)
    if indented and script.scheduler in ("slurm", ""):
        others = f" and {counted(len(indented) - 1, 'other')} are" if len(indented) > 1 else " is"
        yield Problem(
            indented[0],
            f"this directive{others} indented, and sbatch ignores lines that do not begin with #SBATCH",
            "remove the blanks before #SBATCH",
            "note" if _flags(subject, script.lines[indented[0] - 1]) & given else None,
        )
    nearly = list(_nearly(subject))
    num_blank = sum(bool(match[2]) and not match[3].islower() for _, match, _ in nearly)
    for number, match, near in nearly:
        # To disable a directive, users add a blank or letters, or write the prefix in lowercase letters. An
        # option that another directive sets is probably disabled.
        flags = _flags(subject, match.string)
        is_usage = match[3].islower()  # such as `#   sbatch --array=1-5 \`
        # Users disable options with a blank, often several, or those without which the job runs.
        are_disabled = num_blank > 1 and not any(map(_CHANGES_JOB.match, flags))
        is_disabled = are_disabled or flags & given or flags <= _OFTEN_DISABLED
        if script.scheduler and match[2] and (is_usage or is_disabled):
            continue
        may_be_disabled = script.scheduler and (
            match[2]
            or match[3] == near.lower()
            or (match[3] != near and (match[3].endswith(near) or match[3] == f"{near}X"))
            or flags & given
        )
        what = f"{shown(match[0])} is a comment, so the scheduler ignores this option"
        is_misspelled = match[3] != near and not match[2]
        fix = f"spell it #{near}" if is_misspelled else f"write #{near} at the very beginning of the line"
        if other := near_option(match[5]) if near == "SBATCH" else "":
            fix += f" and spell the option {other}"
        remedy = f"{fix}, or write ##{near} to disable it"
        # With a variable, which the scheduler does not expand, the directive would be wrong, too.
        is_wrong = "$" in match.string.partition("-")[2]
        # Without a node list, the job runs on other nodes; many users disable it.
        is_harmless = bool(script.scheduler) and flags <= _WITHOUT_EFFECT
        # Job steps may say themselves how many nodes they use.
        is_harmless |= flags == {"--nodes"} and re.search(r"\bsrun\s.*--nodes[= ]", script.text) is not None
        is_unsure = may_be_disabled or is_wrong or is_harmless
        yield Problem(number, what, remedy, "note" if is_unsure else None)


def _flags(subject: Subject, line: str) -> set[str]:
    """Returns the options of a comment, as if it was a directive."""
    value = subject.script.value
    unneeded: set[tuple[str, str | None]] = {*_DEFAULTS, ("--error", value("--output"))}
    if not (value("--ntasks") or value("--gpus")):
        unneeded.add(("--nodes", "1"))  # all of the job is on one node
    if value("--ntasks-per-node") is None:
        unneeded.add(("--ntasks", value("--nodes")))  # srun starts one task on each node
    joined = ("-o", "-e") if value("-j") in ("oe", "eo") else ()  # one log has both outputs
    _, dash, words = line.partition("-")
    read = subject.scheduler.reader.read_directives([(1, dash + words)])
    needed = (d for d in read if (d.flag, d.value) not in unneeded and d.flag not in joined)
    return {_one_of(d.flag.partition(":")[0]) for d in needed}


def _one_of(flag: str) -> str:
    """Returns the first of several options that exclude each other, for each of them."""
    return "--mem" if flag in ("--mem-per-cpu", "--mem-per-gpu") else flag


def _nearly(subject: Subject) -> Iterator[tuple[int, re.Match[str], str]]:
    """Yields the line, the match and the correct prefix of each comment that begins like a directive."""
    script = subject.script
    known = [scheduler.prefix[1:] for scheduler in MONITORED.values()]
    # After the first command, the scheduler ignores even correct directives.
    first = next((command.line for command in script.commands), len(script.lines) + 1)
    for number, line in enumerate(script.lines[: first - 1], start=1):
        match = _NEARLY.match(line)
        # Not misspelled: `##PBS`, the usual way to disable a directive, and comments about how to submit the
        # script, such as `# sbatch -N 2 job.sh`.
        if not match or match[1] or (match[2] and not match[4]) or _SUBMIT.match(line):
            continue
        word = match[3].rstrip(":")
        if match[3].upper() in _NOT_MISSPELLED or any(one.match(line) for one in DIRECTIVE_PATTERNS):
            continue
        for near in get_close_matches(word.upper(), known, n=1, cutoff=0.6):
            is_close = is_one_edit(word.upper(), near) or get_close_matches(word.upper(), [near], cutoff=0.75)
            if word.upper() == near or (is_close and (word[0].upper() == near[0] or word.upper() in near)):
                yield number, match, near


@check("JOB007", "warning", "the same directive with two different values")
def _contradictions(subject: Subject) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    lines: dict[str, int] = {}
    script = subject.script
    pairs = [(d.line, f"-l {name}", value) for d, name, value in script.resources()]
    repeatable = subject.scheduler.reader.repeatable_flags_in(subject.scheduler_version)
    read = [d for d in script.read() if d.flag and d.flag not in repeatable and not d.fault]
    # SLURM017 and others report a long option with one dash, such as -exclusive, which is -e xclusive.
    read = [d for d in read if script.scheduler != "slurm" or not with_two_dashes(d)]
    read = [d for d in read if not subject.scheduler.reader.rejects(d)]  # which SLURM015 reports
    pairs += [(d.line, d.flag, d.value) for d in read]
    for line, name, value in sorted(pairs, key=lambda pair: pair[0]):
        is_none = name == "--export" and seen.get(name) in ("NONE", "NIL")  # which any other list implies
        is_same = name in ("-k", "-m") and sorted(seen.get(name, "")) == sorted(value)
        amount = _amount(subject, name, value)  # such as 4G and 4096
        is_same |= amount is not None and amount == _amount(subject, name, seen.get(name, ""))
        if seen.get(name, ",") not in (value, ",") and not (is_none or is_same):
            # OpenPBS uses the first of several resources with the same name (set_resource.c).
            used = "only one of them" if name.startswith("-l ") else "the last value"
            what = f"{plain(name)} is {shown(seen[name])} in line {lines[name]} and {shown(value)} here, "
            what += f"and {used} is used"
            is_log = name in subject.scheduler.reader.log_flags
            is_overridden = _is_overridden(subject, name, seen[name], value, is_log)
            is_overridden = is_overridden or name in subject.given_on_submission
            severity: Severity | None = "note" if is_overridden else None
            remedy = _joined(name, seen[name], value)
            if re.search(r"\s--tasks[= ]", script.lines[line - 1]):
                remedy = f"write --ntasks, as sbatch takes --tasks for {plain(name)}"
            yield Problem(line, what, remedy, severity)
        seen[name], lines[name] = value, line


def _is_overridden(subject: Subject, name: str, before: str, value: str, is_log: bool) -> bool:
    """Returns whether the second value is probably the one that is meant.

    A block of directives that several scripts share is often overridden in these ways. A job that requests
    more than before runs in any case.
    """
    items, others = set(value.split(",")), set(before.split(","))
    is_part = items < others or items > others
    prefix = "gpu:" if before.startswith("gpu:") else ""
    typed = rf"{prefix}(?:[A-Za-z]|\d{{3,4}})[\w.-]*:{re.escape(before.removeprefix('gpu:'))}"
    is_refined = bool((prefix or name.startswith("--gpus")) and re.fullmatch(typed, value))
    first, second = (_amount(subject, name, text) for text in (before, value))
    is_more = first is not None and second is not None and first < second
    fits = name == "--partition" and "gpu" in value.lower() and requests_gpus(subject)
    is_other_log = is_log and not (name in ("--output", "-o") and re.search(r"err\b", value))
    # The last name is mostly the one that is meant: it was added to the directives of another script.
    is_name = name in _LAST_IS_MEANT
    return is_part or is_refined or is_more or fits or is_other_log or is_name


def _amount(subject: Subject, name: str, value: str) -> float | None:
    """Returns a number, a time in seconds or a size in bytes; None if it is none of them."""
    if name.startswith("--mem") and value == "0":
        return math.inf  # all memory of the node
    if name in ("--time", "-l walltime"):
        return subject.scheduler.reader.walltime_s(value)
    size = re.fullmatch(r"(\d{1,12})([KMGT]?)B?", value.upper())
    return int(size[1]) * 1024.0 ** " KMGT".index(size[2] or "M") if size else None


def _joined(name: str, before: str, value: str) -> str:
    """Returns the remedy for an option that is given twice: a list, if it takes one."""
    if name in ("--output", "-o") and re.search(r"err\b", value):
        return f"write {'--error' if name[1] == '-' else '-e'} for this one"
    if name == "--constraint":
        return "join them in one --constraint, with & if the job needs both, or with | for either"
    if name == "--dependency" and "?" in before + value:
        return "write one option, with ? between all jobs, or with commas"
    items, others = before.split(","), value.split(",")
    counts = name in ("--gres", "--licenses", "--tres-per-task")
    first, second = ({re.split("[:=]", item)[0] for item in part} for part in (items, others))
    of_gpu = (first | second) & {"gpu", "shard", "mps"}  # of which Slurm accepts one
    if name in ("-l select", "-l nodes") or (counts and (first & second or len(of_gpu) > 1)):
        return f"write one {name} with all that the job needs"
    if name not in _LISTS or {"NONE", "NIL"} & {*items, *others}:
        return f"keep only one {plain(name)}"
    return f"write one option with all of them, as in {plain(f'{name}={before},{value}')}"
