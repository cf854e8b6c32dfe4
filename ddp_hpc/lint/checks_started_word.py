"""Check of the words that launchers and containers take for the name of a program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_hpc.lint.check_registry import Problem, Subject, check, shown
from ddp_hpc.lint.parse_script import LAUNCH_COMMANDS, Command
from ddp_hpc.lint.placeholders import is_template
from ddp_hpc.schedulers.registry import MONITORED

# Options of srun and mpirun that have no value.
_BARE = re.compile(
    r"-[lluvQOsXE]|-n\d+|-N\d+|-c\d+|--(?:label|unbuffered|verbose|quiet|overcommit|exclusive|exact|overlap|pty|"
    r"oversubscribe|share|allow-run-as-root|use-hwthread-cpus|display-map|report-bindings|no-kill|"
    r"disable-status|export-all|preserve-env|kill-on-bad-exit)"
)
# Options of srun and mpirun with a value as the next word.
_WITH_VALUE = re.compile(
    r"-(?:n|np|N|c|p|w|t|A|G|J|o|e|i|D|m|x|d|K|W|q|C|ppn|npernode|f|host|hosts|hostfile|machinefile|H|perhost|bind-to|map-by)"
    r"|--(?:n|np|ntasks|nodes|cpus-per-task|gres|mem|mem-per-cpu|mpi|partition|account|time|ppn|npernode|map-by|"
    r"bind-to|hostfile|machinefile|host|hosts|export|gpus|gpus-per-node|gpus-per-task|ntasks-per-node|cpu-bind|"
    r"cpu_bind|gpu-bind|depth|job-name|output|error|nodelist|chdir|qos|distribution|signal|het-group|jobid|"
    r"container-image|container-mounts|container-workdir|container-name|relative|wait|network|env|envlist)"
)
_OF_SHELL = ("cd", "source", ".", "export", "module", "ml", "ulimit", "unset", "alias", "setenv", "eval")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# A whole command in quotes: its first word is not a path that contains blanks.
_WHOLE = re.compile(r"[\w./-]*(?:python[\d.]*|\w+\.(?:py|sh)|bash|echo|cd|hostname|torchrun)\s.*", re.DOTALL)
_IMAGE = re.compile(r"[^-\s=:,]\S*\.(?:sif|simg|sqsh|img)|docker://\S+")
_OF_LSF = ("jsrun", "bsub")
_OVERLAY = re.compile(r"-o|-B|--(?:overlay|bind|home|scratch)")


@check("JOB036", "error", "a word that a launcher or a container takes for a program")
def _no_program(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if is_template(script):
        return
    for command in script.commands:
        if command.name in LAUNCH_COMMANDS:
            yield from _launched_word(command)
        words = command.launched or command.argv
        yield from _code_of_shell(command, words)
        yield from _in_container(command, words)


def _launched_word(command: Command) -> Iterator[Problem]:
    word = _program_word(command.argv)
    where = f"{command.name} takes {shown(word)} for the name of a program"
    if _ASSIGNMENT.fullmatch(word):
        yield Problem(command.line, where, f"write the assignment before {command.name}, or env before it")
    elif word in _OF_SHELL or (word == "conda" and re.search(r"\sconda\s+(?:de)?activate\b", command.text)):
        what = f"{command.name} starts programs, and {word} is a command of the shell"
        yield Problem(command.line, what, f"write it before {command.name}, or use bash -c '...'")
    elif _WHOLE.fullmatch(word):
        yield Problem(command.line, where, "omit the quotes, or use bash -c '...'")


def _program_word(words: tuple[str, ...]) -> str:
    """Returns the word that a launcher takes for the program; empty if an option is unknown."""
    index = 1
    while index < len(words):
        word = words[index]
        if not word.startswith("-"):
            return "" if "$" in word.partition("=")[0] else word
        if _WITH_VALUE.fullmatch(word):
            index += 1
        elif not ("=" in word or _BARE.fullmatch(word)):
            return ""
        index += 1
    return ""


def _code_of_shell(command: Command, words: tuple[str, ...]) -> Iterator[Problem]:
    """Yields `bash -c python train.py`, whose code is only the first word."""
    if not re.fullmatch(r"(?:.*/)?(?:ba)?sh", words[0] if words else "") or len(words) < 4:
        return
    flag, code, following = words[1:4]
    if re.fullmatch(r"-l?c", flag) and re.fullmatch(r"[\w./-]+", code) and not re.match(r"_|--$", following):
        what = f"the code of bash {flag} is only {shown(code)}, without the words after it"
        yield Problem(command.line, what, f"write the whole command in quotes: bash {flag} '...'")


def _in_container(command: Command, words: tuple[str, ...]) -> Iterator[Problem]:
    name = words[0].rpartition("/")[2] if words else ""
    if name not in ("singularity", "apptainer") or "exec" not in words[1:4]:
        return
    found = [i for i, (before, word) in enumerate(pairwise(words), start=1) if _is_image(before, word)]
    rest = words[found[0] + 1 :] if found else ("",)
    if not rest and "<" not in command.text:
        what = f"{name} exec starts nothing, as no command follows {shown(words[-1])}"
        yield Problem(command.line, what, "write the command on the same line, or \\ at its end")
    elif rest and _ASSIGNMENT.fullmatch(rest[0]):
        what = f"{name} exec takes {shown(rest[0])} for the name of a program"
        yield Problem(command.line, what, "write --env NAME=VALUE before the image, or env after it")


def _is_image(before: str, word: str) -> bool:
    return bool(_IMAGE.fullmatch(word)) and not _OVERLAY.fullmatch(before)


@check("JOB038", "warning", "a command of another scheduler")
def _command_of_another(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    # The script may ask which scheduler runs it, or define the command.
    if len({d.scheduler for d in script.directives}) > 1 or re.search(
        r"\b(?:command -v|which|type) |\b(?:if|case|alias|\|\|)\s.*(?:PBS|SLURM|srun)", script.text
    ):
        return
    own = subject.scheduler.reader.own_commands
    others = [name for other in MONITORED.values() for name in other.reader.own_commands if name not in own]
    for command in script.commands if own and not is_template(script) else ():
        if (
            command.name in (*others, *_OF_LSF)
            and command.argv[0][0] != "$"
            and not re.search(rf"\b{command.name} ?\(", script.text)
        ):
            title = subject.scheduler.title
            yield Problem(
                command.line, f"{command.name} does not belong to {title}", f"use a command of {title}"
            )
            return
