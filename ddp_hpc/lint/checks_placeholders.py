"""Checks of variables and placeholders in directives, which the scheduler takes literally."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, nearest_known, plain, shown
from ddp_hpc.lint.parse_script import Directive, Script
from ddp_hpc.lint.placeholders import (
    has_placeholder,
    is_named_twice,
    marked_placeholder,
    stands_for_number,
    without_comment,
)

# Options whose values may contain `$` and `~`. In other options, the scheduler does not expand them.
_FREE_TEXT_FLAGS = frozenset(("-v", "--export", "--comment", "--wrap"))
# Variables of a login or of a job.
_OF_JOB = re.compile(
    r"USER|LOGNAME|PWD|HOSTNAME|TMPDIR|(?:SLURM|PBS|SGE)_\w+|JOB_(?:ID|NAME)|"
    r"\w*(?:SCRATCH|WORK|HOME|VAULT|STORE|PROJECT|PROJ|GROUP|DATA|CFS)\w*"
)
_DEFAULT_LOG = "omit the option, or give only a directory, as the default name of the log contains the job ID"
# What sbatch replaces in the names of logs, by the names of variables.
_PATTERNS = {
    r"ARRAY_?JOB_?ID": "%A",
    r"ARRAY_?(?:TASK_?)?ID": "%a",
    r"(?<!ARRAY_)JOB_?ID": "%j",
    "USER(?:NAME)?|LOGNAME": "%u",
    "JOB_?NAME": "%x",
}
_REQUESTS = re.compile("--(?:time|nodes|ntasks|cpus|mem|gres|gpus|partition|account)|-[lqA]$")


@check("JOB008", "error", "a variable or ~ in a directive")
def _unexpanded(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    unset = [(d.flag, _unset(script, d.value)) for d in script.read() if not _is_free_text(d)]
    is_requested = any(names and _REQUESTS.match(flag) for flag, names in unset)
    is_form = is_requested and len({name for _, names in unset for name in names}) > 1
    is_form = is_form or re.search(r"(?m)^#.*\benvsubst\b", script.text) is not None
    for d in subject.script.read():
        # pyxis writes the mounts into a shell script, and rejects only those that begin with a variable.
        is_expanded = d.flag == "--container-mounts" and not re.search(r"(?:^|,)[$~]", d.value)
        if not (is_expanded or _is_free_text(d) or _is_name(subject, d)) and _has_variable(d.value):
            program = subject.scheduler.submit_program
            what = f"{d.flag} {shown(d.value)}: {program} does not expand variables, ~ or $( )"
            may_be_accepted = d.flag == "-N" and not subject.uses_chunks  # by Torque
            severity: Severity | None = "warning" if may_be_accepted else None
            is_to_fill_in = is_form or is_named_twice(d.value)
            yield Problem(d.line, what, _instead_of_variable(subject, d), severity, is_to_fill_in)


def _unset(script: Script, value: str) -> set[str]:
    """Returns the variables in a value that neither the script nor a login sets.

    If there are several, and one is in a request, a program such as string.Template may replace them.
    """
    names = {name for name in re.findall(r"\$\{?([A-Za-z]\w*)", value) if not _OF_JOB.fullmatch(name)}
    return {name for name in names if not script.sets(name)}


@check("JOB017", "warning", "a variable or placeholder in a name or in a mail address")
def _unexpanded_name(subject: Subject) -> Iterator[Problem]:
    reader = subject.scheduler.reader
    for d in subject.script.read():
        if d.flag == "--export" and (variable := re.search(r"\$\{?\w+\}?", d.value)):
            what = f"Slurm does not expand {plain(variable[0])} in --export {shown(d.value)}"
            yield Problem(d.line, what, "write the value, or export the variable in the script")
        if _is_free_text(d) or not _is_name(subject, d):
            continue
        is_log = d.flag in reader.log_flags
        if d.flag == "--mail-user" and (subject.script.value("--mail-type") or "none").lower() == "none":
            continue  # nobody gets mail
        if (d.flag, subject.script.value("-m")) == ("-M", "n"):
            continue
        if (d.flag, subject.script.value("-j")) in (("-e", "oe"), ("-o", "eo")):
            continue  # the other log has both outputs
        if is_log and (pattern := reader.foreign_log_pattern.search(d.value)):
            what = f"{subject.scheduler.title} does not replace {pattern[0]} in {d.flag} {shown(d.value)}"
            yield Problem(d.line, what, _DEFAULT_LOG)
        elif any(d.value.count(first) != d.value.count(last) for first, last in ("<>", "{}")):
            continue  # a blank in the placeholder ends the value, so sbatch rejects the script (JOB016)
        elif d.flag in ("--job-name", "--mail-user") and (
            pattern := re.search(r"%[jJAaxu](?![a-z])", d.value)
        ):
            what = f"Slurm does not replace {pattern[0]} in {d.flag} {shown(d.value)}"
            is_example = re.search(r"@(?:domain|example)\.", d.value) is not None
            remedy = f"omit {pattern[0]}, which works only in --output, --error and --input"
            remedy = "write the address" if d.flag == "--mail-user" else remedy
            yield Problem(d.line, what, remedy, is_to_fill_in=is_example)
        elif pair := _misspelled_variable(subject, d):
            yield Problem(d.line, f"PBS does not set {plain(pair[0])}", f"did you mean {pair[1]}?")
        elif (mark := marked_placeholder(d.value)) and d.flag not in subject.given_on_submission:
            yield from _not_replaced(subject, d, mark)


def _misspelled_variable(subject: Subject, d: Directive) -> tuple[str, str] | None:
    """Returns a variable in the name of a log that PBS does not set, and the one that is meant; None if none.

    OpenPBS replaces no variable in these names.
    """
    variables = subject.scheduler.reader.variables
    names = [
        name
        for name in re.findall(r"\$\{?(PBS_\w+)", d.value)
        if name not in variables and not subject.uses_chunks
    ]
    nearest = nearest_known(names, sorted(variables), cutoff=0.85)
    return next((pair for pair in nearest.items() if pair[1]), None)


def _not_replaced(subject: Subject, d: Directive, mark: str) -> Iterator[Problem]:
    """Yields a variable or placeholder in a name, if the scheduler does not replace it."""
    reader = subject.scheduler.reader
    may_expand = d.flag in reader.log_flags and reader.expands_log_variables
    # Torque replaces these, but OpenPBS does not.
    of_pbs = "" if subject.uses_chunks else "PBS_|"
    if may_expand and re.search(rf"\$\{{?(?:{of_pbs}(?:HOME|USER|LOGNAME)\b)|\^", d.value):
        return
    if may_expand and "$PBS_" in d.value.rpartition("/")[2].replace("{", ""):
        what = f"OpenPBS does not expand {plain(mark)} in {d.flag} {shown(d.value)}"
        remedy = _DEFAULT_LOG
    elif mark[0] in "$%":
        what = f"{subject.scheduler.title} does not expand {plain(mark)} in {d.flag} {shown(d.value)}"
        remedy = _instead_of_variable(subject, d)
    else:
        what = f"{shown(mark)} in {d.flag}{'' if mark == d.value else f' {shown(d.value)}'} is a placeholder"
        remedy = "write your own value"
    is_placeholder = mark[0] not in "$%" or is_named_twice(d.value)
    is_expanded = may_expand or re.search(r"\$USER@iitd\.", d.value)  # IIT Delhi documents this address
    yield Problem(d.line, what, remedy, "note" if is_expanded else None, is_placeholder)


def _instead_of_variable(subject: Subject, d: Directive) -> str:
    """Returns what to write instead of a variable of the shell in a directive."""
    matches = [
        (re.search(rf"\$\{{?((?:\w*_)?(?:{name}))(?![A-Za-z])", d.value), to)
        for name, to in _PATTERNS.items()
    ]
    places = sorted((match.start(), to, plain(match[1])) for match, to in matches if match)
    found = [f"{to} instead of ${name}" for _, to, name in places]
    is_log = d.flag in ("--output", "--error")
    if is_log and found:
        rest = ", and the value of the other" * (len(set(re.findall(r"\$\{?\w+", d.value))) > len(found))
        return f"write {' and '.join(found)}{rest}"
    if re.search(r"\$\{?\w*(?:JOB_?ID|ARRAY_?(?:TASK_?)?(?:ID|INDEX))\b", d.value):
        return "omit the variable, which is set only in the running job"
    if is_log and re.match(r"\$\{?PWD\}?/[^$]+$", d.value) and subject.script.value("--chdir") is None:
        return "omit $PWD/, as relative names begin in the directory of submission"
    option = f"{d.flag}=VALUE" if d.flag.startswith("--") else f"{d.flag} VALUE"
    return f"write the value itself, or submit with {subject.scheduler.submit_program} {option}"


def _is_free_text(d: Directive) -> bool:
    return not d.flag or d.flag in _FREE_TEXT_FLAGS


def _has_variable(value: str) -> bool:
    return "$" in value or bool(re.match(r"(?:[^/:]*:)?~", value))


def _is_name(subject: Subject, d: Directive) -> bool:
    """Returns whether any value is accepted, because it is only a job name, a mail address or a file name."""
    if d.flag in subject.scheduler.reader.log_flags:
        # A scheduler that does not expand variables looks for a directory whose name is literally `$USER`.
        directory = d.value.rpartition("/")[0]
        is_literal = _has_variable(directory) or bool(marked_placeholder(directory))
        return subject.scheduler.reader.expands_log_variables or not is_literal
    return d.flag in subject.scheduler.reader.name_flags


@check("JOB016", "error", "a placeholder of a template in a directive")
def _placeholders(subject: Subject) -> Iterator[Problem]:
    directives = [
        d
        for d in subject.script.read()
        if not (_is_free_text(d) or _is_name(subject, d) or _is_constraint_or_name(d))
        and (has_placeholder(_whole_value(d), is_path=True) or stands_for_number(d.text))
    ]
    directives += [
        d
        for d in subject.script.read()
        # After a semicolon, the words may be a comment, which SLURM017 reports.
        if not d.flag and d.fault and has_placeholder(d.text.partition(";")[0], is_path=True)
    ]
    if directives:
        first = min(directives, key=lambda d: d.line)
        others = len({d.line for d in directives}) - 1
        contain = f"and {counted(others, 'other directive')} contain" if others else "contains"
        text = without_comment(first.text).rstrip()
        what = f"{shown(text)} {contain} a placeholder"
        remedy = f"replace {'each placeholder' if others else 'it'} with a value"
        remedy += ", without a blank after =" * bool(re.search(r"=\s+\S", text))
        yield Problem(first.line, what, remedy, is_to_fill_in=True)


def _whole_value(d: Directive) -> str:
    """Returns the value of an option, and the words that belong to it, as in `-q [your queue here]`."""
    if "[" not in d.value or "]" in d.value:
        return d.value
    match = re.match(r"[^\]]*\]", d.text[d.text.find(d.value) :])
    return match[0] if match else d.value


def _is_constraint_or_name(d: Directive) -> bool:
    """Returns whether a value that looks like a placeholder is a job name of PBS, or features of nodes."""
    name = r"[A-Za-z][\w.+-]*" if d.flag == "-N" else r"\[[\w|&*-]*[a-z\d][\w|&*-]*\]"
    return d.flag in ("-N", "--constraint") and bool(re.fullmatch(name, d.value))
