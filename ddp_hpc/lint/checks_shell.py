"""Check of shell commands that do something else than they seem to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.bash_syntax import is_reached
from ddp_hpc.lint.check_registry import Problem, Subject, check, plain, shown
from ddp_hpc.lint.launch_commands import single_quoted
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.lint.placeholders import is_template

_NAME = r"[A-Za-z_]\w*"
# The beginning of a command, what is wrong with it, and what to write instead.
_BEGINNINGS = (
    (r"(?:SBATCH|PBS)\s+-", "the # of this directive is missing", "write # before it"),
    (r"setenv\s+\w+\s", "setenv is a command of csh, and bash has none", "write export NAME=VALUE"),
    (rf"set\s+{_NAME}\s*=", "in bash, set does not assign a value to a variable", "write NAME=VALUE"),
    (r"(?:source|\.)\s+\S+[./]t?csh(?:\s|$)", "bash cannot read a file of csh", "use the file for bash"),
    (rf"(?:export\s+)?\$\{{?(?P<name>{_NAME})\}}?=", "this does not set the variable", "omit the $"),
    (
        rf"(?:export\s+{_NAME}=\s+[^#\s]|{_NAME}=\s+[\d\"'])",
        "the value is empty here",
        "omit the blank after =",
    ),
    (rf"export\s+{_NAME}\s+[\d/~\"']", "this does not set the variable", "write export NAME=VALUE"),
    (
        rf"(?:unset|export)\s+{_NAME}[.,:;](?:\s|$)",
        "this is not the name of a variable",
        "omit the mark after it",
    ),
    (r"\$\s+[a-z]", "the prompt of a terminal is not part of a command", "omit the $"),
    (r"(source|python3?|module|conda|export|cd|torchrun)\s+\1\s", "this word is written twice", "omit one"),
    (r"source\s+(?:conda|mamba)\s+activate\b", "source opens a file of this name", "omit source"),
    (
        r"(?:module|ml)\s+(?:load|add)\s[^#\n]*?\w,(?:\s|$)",
        "module takes the comma for a part of the name",
        "omit it",
    ),
    (
        r"(?:sbatch|srun|mpirun|mpiexec|salloc)\s(?:--[\w-]+=\S+\s+)*[\"']--?\w[\w-]*\s[^\"'$]*[\"']",
        "the quotes make the option and its value one word",
        "omit them",
    ),
    (r"for\s+\w+\s+in\s+\{\w*\.\.\$", "bash expands braces before variables", "use $(seq FIRST LAST)"),
    (
        r"for\s+\w+\s+in\s+(?:\d+\.\.\d+|\{\d+-\d+\})\s*$",
        "this is one word, not a list of numbers",
        "use {1..9}",
    ),
    (r"(?:(?:ba)?sh )?[^\s=\"]*bin/activate$", "this does not change the script's own shell", "use source"),
    (r"[^'\"#|]*\s2>&1 +>>? *(?!/dev/null)[\w./$]", "the errors do not go to this file", "write > FILE 2>&1"),
    (r"(?!echo|printf)[^'\"#]*[\s=][\u201c\u201d]", "bash does not treat these quotes as quotes", 'write "'),
    (r"[^'\"#]*\s\\&\\&\s", "the escaped ampersands are arguments of this command", "write &&"),
    (r"(?:(?:if|elif|while)\s+)?\[\s[^\]]*\s>=?\s*[\d$]", "here, > writes to a file", "write -gt or -ge"),
    (rf"(?:export\s+)?{_NAME}=[\"']~/", "bash does not expand ~ in quotes", "write $HOME"),
    (
        r"(?:export\s+)?(LD_LIBRARY_PATH|PYTHONPATH)=(?!.*\$\{?\1\b).*:\$\{?PATH\b",
        "PATH contains the directories of programs, and the former value is lost",
        "write the variable's own name at the end",
    ),
    (
        r"(?!echo|printf)[^'\"#]*\b(?:python[\d.]*|torchrun|accelerate launch)\s(?:-\S+\s)*-m\s+"
        r"[\w./]+\.py(?:\s|$)",
        "-m takes the name of a module, not of a file",
        "omit -m, or .py",
    ),
    (
        r"cd\s+[\"']?(?:PBS_O_WORKDIR|SLURM_SUBMIT_DIR)\b|(?:mpi|srun)[^'\"#$]*\s-np?\s+(?:SLURM|PBS)_[A-Z]|"
        rf"(?:export\s+)?{_NAME}=(?:SLURM|PBS)_(?:ARRAY|JOB|NTASKS|CPUS|NNODES|NODE|O_)\w*\s*$",
        "the $ of the variable is missing",
        "write $ before its name",
    ),
)
# With these, another shell or program may expand the ~ of a value, or the name in it.
_EXPANDS_LATER = re.compile(r"\b(?:eval|ssh|rsync|scp)\b|expanduser|\$\{!|declare -n")
_BARE_INDEX = re.compile(r"(?<!\\)\$([A-Za-z_]\w*)\[\$?\{?\w")
_OF_ARRAY = re.compile(r"\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)")


@check("JOB034", "warning", "a shell command that does something else")
def _something_else(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if match := re.match(r"(?:/usr)?/bin/env\s+(?!-)(\w+\s+-.*)", script.shebang):
        what = f"Linux gives env one argument, so it looks for a program with the name {shown(match[1])}"
        yield Problem(1, what, f"write #!/bin/{plain(match[1])}, or #!/usr/bin/env -S", "error")
    if not re.search(r"\b(?:ba)?sh\b", script.shebang) or is_template(script):
        return
    for command in script.commands:
        for what, remedy in (*_beginnings(script, command), *_not_expanded(script, command)):
            if is_reached(script.text, command.line):
                yield Problem(command.line, what, remedy)


def _beginnings(script: Script, command: Command) -> Iterator[tuple[str, str]]:
    for beginning, what, remedy in _BEGINNINGS if command.ends not in ("|", "|&", ")") else ():
        match = re.match(beginning, command.text.rstrip())
        if match is None or ("~/" in match[0] and _EXPANDS_LATER.search(script.text)):
            continue
        # The variable may contain a name, and setenv may be a function.
        name = match.groupdict().get("name")
        defined = rf"(?<![$\w{{]){name}=|\b(?:for|read)\b.*\b{name}\b" if name else r"\bsetenv *\("
        if not re.search(defined, script.text):
            yield what, remedy


def _not_expanded(script: Script, command: Command) -> Iterator[tuple[str, str]]:
    outside = re.sub(r"'[^']*'", "", command.text)
    is_quoted = _OF_ARRAY.search(single_quoted(command.text)) and not _OF_ARRAY.search(outside)
    if is_quoted and command.name in ("sed", "awk", "gawk"):
        yield f"bash expands no variable in the single quotes of {command.name}", "use double quotes"
    for name in _BARE_INDEX.findall(outside):
        if re.search(rf"(?m)^\s*(?:declare -a\s+)?{name}=\(", script.text):
            yield (
                f"${plain(name)}[ ] is the first element and the index in brackets",
                f"write ${{{name}[INDEX]}}",
            )
