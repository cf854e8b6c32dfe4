"""The variables that a script reads without setting or testing them."""

from __future__ import annotations

import re

from ddp_hpc.lint.check_registry import Subject
from ddp_hpc.lint.launch_commands import expanded_in_shell, single_quoted
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.schedulers.registry import MONITORED

# $NAME and ${NAME}, but not ${NAME:-default}, which also works without the variable.
_EXPANSION = re.compile(r"\$(\w+|\{\w+(?=[}%#/,^@\[]))")
# Commands that set variables which are not recorded as assignments.
_DECLARES = re.compile(r"for|let|read|declare|local|readarray|mapfile|select|typeset|export|getopts")
OF_SCHEDULERS = re.compile(r"(?:SLURM|PBS|SLRUM|SLUM|SLRM|SULRM|PSB)_[A-Z]\w+")
# Variables that torchrun sets for its ranks, and others that scripts often set.
OF_RANKS = re.compile(
    r"(?:NODE_|MACHINE_|LOCAL_|GLOBAL_)?RANK|WORLD_SIZE|NODEID|PROCID|(?:PMI|PALS|OMPI)\w+RANK\w*"
)
_IN_ARITHMETIC = re.compile(r"\$\(\((?=[^()]*?\b((?:SLURM|PBS)_\w+))")
# ${NAME:=value}, ${NAME:?message}, ${NAME:+option}, $?NAME of csh, [[ -v NAME ]], printf -v NAME and
# ((NAME > 1)).
_EXPANDED = re.compile(
    r"\$\{(\w+):?[=?+]|\$\?([A-Za-z_]\w*)|"
    r"(?:\[|\btest|\bprintf|&&|\|\|) -v (\w+)|(?<!\$)\(\(\s*(SLURM_\w+)\s*[<>]"
)
_SET_IN_CSH = re.compile(r"\b(?:setenv|set|foreach)\s+(\w+)|@\s+(\w+)")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=?+]")
_COPY = re.compile(r"\$\{?(\w+)\}?")
# A number that is compared has no default.
_NUMBERS = r"-(?:eq|ne|lt|gt|le|ge)"
_COMPARES = re.compile(rf"\s(?:{_NUMBERS}|==?)\s(?!\"\")")
_TESTS = ("test", "[", "[[", "case")


def read_variables(subject: Subject) -> dict[str, int]:
    """Maps each variable that the script neither sets nor tests to the line that reads it first."""
    read: dict[str, int] = {}
    known = {name for _, name, _ in subject.script.assignments} | _set_or_tested(subject.script)
    real = {name for scheduler in MONITORED.values() for name in scheduler.reader.variables}
    copies = {
        (line, name)
        for line, name in _tested_copies(subject.script)
        if name in real or not OF_SCHEDULERS.fullmatch(name)
    }
    for command in subject.script.commands:
        if command.name in _TESTS:
            is_number = re.search(rf"\s{_NUMBERS}\s", command.text)
            known.update(n for n in expanded(command.text) if not (is_number and OF_RANKS.fullmatch(n)))
        text = command.text.partition(">")[2] if command.name in ("echo", "printf") else command.text
        in_tasks = single_quoted(text) if command.launched[1:2] == ("-c",) else ""
        expanded_later = [name for name in expanded(in_tasks) if not re.search(rf"\b{name}=", text)]
        if command.name == "trap":
            expanded_later = [
                n for n in expanded(single_quoted(text)) if n.endswith("_") and OF_SCHEDULERS.match(n)
            ]
        # mpirun and ibrun set these for their ranks, and so does srun with its libraries.
        of_mpi: tuple[str, ...] = ("PMI",) if "--mpi" in command.text else ()
        of_mpi = ("OMPI_", "PMI", "PALS_") if command.name.startswith(("mpi", "ibrun")) else of_mpi
        expanded_later = [name for name in expanded_later if not name.startswith(of_mpi)]
        # Without a list, scontrol takes that of the job.
        text = re.sub(r"scontrol show hostnames?\s+[^\s\"]+", "", text)
        for name in (*expanded(expanded_in_shell(text)), *expanded_later):
            if (command.line, name) not in copies:
                read.setdefault(name, command.line)
        if _DECLARES.fullmatch(command.name):
            known.update(word.partition("=")[0] for word in command.words[1:])
    return {name: line for name, line in read.items() if name not in known}


def _set_or_tested(script: Script) -> set[str]:
    """Returns the variables that a script sets or tests without an assignment or a command of _TESTS."""
    found = _EXPANDED.findall(script.text)
    if "csh" in script.shebang:
        found += _SET_IN_CSH.findall(script.text)
    given = re.findall(r"\b(\w+)=", script.value("--export") or script.value("-v") or "")
    return {name for names in found for name in names if name} | set(given)


def _tested_copies(script: Script) -> set[tuple[int, str]]:
    """Returns the line and the name of each variable that is copied to another one, which is tested later."""
    tested: dict[str, int] = {}
    for command in script.commands:
        names = _WITH_DEFAULT.findall(command.text)
        if command.name in _TESTS and not _COMPARES.search(command.text):
            names += _COPY.findall(command.text)
        tested.update(dict.fromkeys(names, command.line))
    return {
        (line, match[1])
        for line, name, value in script.assignments
        if (match := _COPY.fullmatch(value)) and tested.get(name, 0) > line
    }


def expanded(text: str) -> list[str]:
    """Returns the names of the variables that a text expands without a default."""
    return [name.lstrip("{") for name in _EXPANSION.findall(text)] + _IN_ARITHMETIC.findall(text)
