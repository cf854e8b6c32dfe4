"""Check of output and failures that a job does not show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain
from ddp_hpc.lint.checks_program_limits import IS_LIGHT
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.schedulers.script_options import whole_number

_KEEPS_OUTPUT = re.compile(r"(?:^|[\s/])conda run (?!.*(?:--no-capture-output|--live-stream|\bpip\b))")
# These end at once, or write their output to a file themselves.
_PRINTS_LITTLE = re.compile(
    r"\s(?:--version|-V)\b|\swhich\s|python\S*\s+-c\s.*\bprint\(|sh\s+-\w*c\s.*>|"
    r"\bsamtools\s+(?:sort|index)\b|\bnb(?:convert|term)\b"
)
_SHORT_OPTION_LAST = re.compile(r"\s-v\s[^\n]{,19}$")  # such as `-v 2>&1`, before a pipe
_WRITES_TEXT = (
    *("echo", "printf", "date", "cat", "", "}", "module", "env", "ls", "lscpu", "hostname", "nvidia-smi"),
    *("uname", "free", "df"),
)
_COMPRESSES = ("gzip", "pigz", "zstd", "xz", "bgzip")
_MAY_END = frozenset(("exec", "scancel", "trap", "source", ".", "kill"))
_SUBMITS = ("sbatch", "qsub")
_PIPEFAIL = "add set -o pipefail above the pipeline"
_ENDS = re.compile(r"exit|wait|fi|done|esac|\}|set|sleep|deactivate|module|ml|conda|tee|time|else|")
_ENDS_AT_ERRORS = re.compile(r"(?m)^[ \t]*set\s+-\w*e|^#!.*sh\s+-\w*e")
# Other names are those of commands that prepare something or only print.
_WORKS = re.compile(
    r"python[\d.]*|bash|srun|mpirun|mpiexec|torchrun|accelerate|.*\.(?:sh|py)|rscript|julia|matlab|sbatch"
)


@check("JOB033", "warning", "output or a failure that the job does not show")
def _not_shown(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    commands = [command for command in script.commands if command.argv]
    is_old = re.search(r"conda\d?/4\.[0-8]\b", script.text)
    for command in commands:
        keeps = _KEEPS_OUTPUT.search(" ".join(command.argv[:12])) and command.name not in ("echo", "export")
        is_version = command.ends == "|" and _SHORT_OPTION_LAST.search(command.text)
        keeps = keeps and not (is_version or _PRINTS_LITTLE.search(command.text))
        # What reads the output in $( ) needs all of it.
        if keeps and not re.search(r"(?:\$\(|`)\s*(?:\S{,200}/)?conda run", script.lines[command.line - 1]):
            what = "conda run prints the output of the program only after the program has ended"
            remedy = "add --no-capture-output after conda run"
            remedy += ", which conda has since 4.9" if is_old else ""
            yield Problem(command.line, what, remedy, "note" if is_old else None)
    last = max((c.line for c in commands if not IS_LIGHT.fullmatch(c.name)), default=0)
    loads = [c for c in commands if re.match(r"(?:module|ml)\s+(?:load|add)\s", c.text)]
    for command in commands:
        lost = loads if loads and loads[-1].line < command.line else []
        if (
            lost
            and command.line < last
            and re.fullmatch(r"(?:module|ml)\s+(?:--force\s+)?purge\s*", command.text)
        ):
            what = f"module purge unloads what line {lost[0].line} has loaded"
            yield Problem(command.line, what, "write it before the first module load", "note")
            break
    is_bash = "bash" in script.shebang and not re.search("pipefail|PIPESTATUS", script.text)
    reported: set[int] = set()
    following = (*[command.text for command in commands[1:]], "$?") if is_bash else ()
    for before, command, after in zip(commands, commands[1:], following[1:], strict=False):
        is_ignored = command.ends in ("|", "|&") or re.match(r"(?:true|:)(?:\s|$)", after)
        is_tested = command.ends in ("&&", "||") or before.words[0] in ("if", "elif")
        is_tested = is_tested and not is_ignored
        if (
            command.name in ("tee", *_COMPRESSES)
            and before.ends in ("|", "|&")
            and before.name not in _WRITES_TEXT
            and ("$?" in after or (is_tested and command.name == "tee"))
            and command.ends != "&"
            and not after.startswith("trap")
        ):
            what = f"the pipeline returns the exit status of {command.name}, "
            what += "and hides a failure of a command before it"
            severity: Severity | None = None if command.name == "tee" else "note"
            reported.add(command.line)
            yield Problem(command.line, what, _PIPEFAIL, severity)
    exits = [command for command in commands if command.name == "exit"]
    status = whole_number(exits[0].argv[1]) if len(exits) == 1 and len(exits[0].argv) == 2 else 0
    may_end = any(not _MAY_END.isdisjoint((command.name, *command.words[:2])) for command in commands)
    if (status or 0) % 256 and exits[0].line == script.end and not may_end:
        what = f"the job always ends with status {status}, so it counts as failed"
        yield Problem(script.end, what, "write exit 0, or the status of the program", "note")
    if "bash" in script.shebang:
        yield from _waits_for_all(script)
    for problem in _goes_on(subject, commands if is_bash else []):
        if problem.line not in reported:
            yield problem


def _goes_on(subject: Subject, commands: list[Command]) -> Iterator[Problem]:
    """Yields a program whose failure would end the script, or submit no other job, without `| tee`."""
    text = subject.script.text
    found = _ENDS_AT_ERRORS.search(text) if "set +e" not in text else None
    set_line = text.count("\n", 0, found.end()) + 1 if found else 0
    ends_at_errors = found is not None
    works = [c for c in commands if c.name not in _WRITES_TEXT and not _ENDS.fullmatch(c.name)]
    submits = [c for c in works if c.name in _SUBMITS]
    # The last command that would still run, which is in a later line.
    last = max((c.line for c in (works if ends_at_errors else submits)), default=0)
    for before, command in pairwise(commands):
        is_program = before.ends in ("|", "|&") and before.name not in _WRITES_TEXT + _SUBMITS
        is_tested = before.words[0] in ("if", "elif", "while", "until", "!")
        # With -d, they fail if they get nothing, and grep fails if nothing matches.
        is_harmless = re.search(r"\s-\w*d|\s--de", command.text) or before.name.endswith("grep")
        compresses = command.name in _COMPRESSES and 0 < set_line < command.line
        compresses = compresses and not is_harmless
        if not (command.name == "tee" or compresses) or command.ends not in ("\n", ";"):
            continue
        if not is_program or is_tested or command.line >= last:
            continue
        following = next((c for c in submits if c.line > command.line), None)
        then = f"line {following.line} submits the next job" if following else "set -e does not end the job"
        what = f"if {plain(before.name)} fails, {then}, as the pipeline returns the status of {command.name}"
        yield Problem(command.line, what, _PIPEFAIL, "note")
        return


def _waits_for_all(script: Script) -> Iterator[Problem]:
    """Yields a wait that hides failures in the background from a script with set -e."""
    started, wait = False, 0
    checks_itself = re.search(r"set \+e|\$!|\bkill\b|\bwait\s+-n|jobs -p", script.text)
    for command in script.commands if _ENDS_AT_ERRORS.search(script.text) and not checks_itself else ():
        if command.ends == "&" or command.words[0] in ("else", "elif", "esac"):
            started, wait = command.ends == "&", 0
        elif command.words == ("wait",):
            started, wait = False, command.line if started else 0
        elif wait and _WORKS.fullmatch(command.name):
            what = "wait without arguments returns 0 even if a program in the background has failed, so line "
            what += f"{command.line} runs anyway"
            remedy = "write pids+=($!) after each &, and replace wait with "
            remedy += 'for pid in "${pids[@]}"; do wait "$pid"; done'
            yield Problem(wait, what, remedy, "note")
            return
