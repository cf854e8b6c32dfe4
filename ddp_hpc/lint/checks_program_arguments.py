"""Check of Python programs that fail at their start: rejected arguments, and files and modules not found."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import Start, source_of, starts
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.lint.placeholders import has_placeholder, is_template
from ddp_hpc.lint.program_arguments import complaint, parser_of
from ddp_hpc.request.program import Program, program_of
from ddp_hpc.request.program_files import text_of

# The directory in which the job was submitted, which is where lint looks for programs.
_SUBMITTED_IN = re.compile(r"\$\{?(?:SLURM_SUBMIT_DIR|PBS_O_WORKDIR)(?::[-?][^}]*)?\}?/?")
_PLACEHOLDER = re.compile("[A-Z]+_[A-Z_]+")
# JOB024 reports a command that ends after a backslash and a blank or a comment, and JOB003 a placeholder such
# as <model>; with extglob, @(a|b) is a pattern, and <(...) is a file.
_IS_CUT = re.compile(r"\\[ \t]*$|\s\\[ \t]+#|<[\w ./-]+>|[<>@+!?](?:\(|$)")
_MOVES = re.compile(r"--?(?:chdir|wdir|wd|cwd|pwd|directory)\b|\s-D\s|\bbuiltin\b|\benv\s+-C")
# Where a cd lasts: not in a pipe, in the background or in a subshell.
_LASTS = ("\n", ";", "&&", "||")
_WRITE = ("cp", "mv", "ln", "sed", "tee", "rsync", "git", "curl", "wget", "tar", "unzip", "patch")
# With these, a program of deepspeed gets no --local_rank, or accepts it.
_LOCAL_RANK = frozenset(("--local_rank", "--no-local-rank", "--launcher"))
_MOVE = ("cd", "pushd", "popd", "builtin")
# An installation of the package makes it importable from anywhere.
_INSTALLS = ("setup.py", "setup.cfg", "pyproject.toml")


@check("JOB043", "error", "a Python program that fails at its start")
def _fails_at_start(subject: Subject) -> Iterator[Problem]:
    if is_template(subject.script) or subject.template or _has_other_directory(subject):
        return
    for start in starts(subject):
        program = program_of(start.words) if ".py" in start.command.text else None
        if program is None or program.kind != "file" or program.name not in start.words:
            continue
        directories = _directories(subject, start)
        texts = {text: place for place in directories if (text := text_of(place / program.name)) is not None}
        name = plain(program.name.rpartition("/")[2])
        if not directories or _is_written(subject, start, name):
            continue
        if len(texts) == 1:
            text, place = next(iter(texts.items()))
            if package := _not_importable(subject, program.name, text, place):
                what = f"{name} imports {package}, but Python looks for modules in the directory of {name}, "
                remedy = "add export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} before it"
                yield Problem(start.command.line, f"{what}unless PYTHONPATH has another", remedy, "note")
            if parser := _parser(subject, program, place):
                yield from _rejected_arguments(start, program.name, parser)
        elif other := next(filter(None, (_in_other_letters(one / program.name) for one in directories)), ""):
            what = f"there is no {name}, but {plain(other)}, which is another file on Linux"
            yield Problem(start.command.line, what, f"did you mean {plain(other)}?")


@lru_cache(maxsize=8)  # a script may start a program many times
def _parser(subject: Subject, program: Program, place: Path) -> ArgumentParser | None:
    return parser_of(source_of(subject, program, place).files)


def _rejected_arguments(start: Start, file: str, parser: ArgumentParser) -> Iterator[Problem]:
    given, name = start.words[start.words.index(file) + 1 :], plain(file.rpartition("/")[2])
    # The file may be the value of an option, such as srun -J train.py; python -V does not run it.
    is_value = start.is_launched and start.words[0] == file
    is_value |= not {"-V", "-h", "--version", "--help"}.isdisjoint(start.words[: start.words.index(file)])
    if is_value or _IS_CUT.search(start.command.text):
        return
    words = ["$" if has_placeholder(word) or _PLACEHOLDER.fullmatch(word) else word for word in given]
    if found := complaint(parser, words):
        yield Problem(start.command.line, f"{name} {plain(found.what)}", plain(found.remedy))
        return
    options = parser._option_string_actions
    is_launch = start.is_torchrun and "torch.distributed.launch" in start.words[:7]
    if is_launch and "--use-env" not in start.options and "--local-rank" not in options:
        # PyTorch before 2.0 gives the program --local_rank.
        is_old = "--local_rank" in options
        what = f"torch.distributed.launch{' of PyTorch 2' * is_old} gives {name} the option --local-rank, "
        remedy = "use torchrun, and read LOCAL_RANK"
        yield Problem(start.command.line, f"{what}which it does not have", remedy, "note" if is_old else None)
    elif start.program == "deepspeed" and _LOCAL_RANK.isdisjoint((*options, *start.options)):
        what = f"deepspeed gives {name} the option --local_rank, which it does not have"
        yield Problem(start.command.line, what, "add it to the program, or use deepspeed --no_local_rank")


def _has_other_directory(subject: Subject) -> bool:
    """Returns whether the job does not start in the directory in which it is submitted."""
    script = subject.script
    is_set = script.value("--chdir", "-D", "--workdir", "-d", "-w") is not None and script.scheduler != ""
    stays_at_home = subject.scheduler.reader.starts_login_shell and not any(
        command.name in ("cd", "pushd") for command in script.commands
    )
    return is_set or stays_at_home


def _is_written(subject: Subject, start: Start, name: str) -> bool:
    """Returns whether the script may write the program, or starts it in another directory."""
    others = [command.text for command in subject.script.commands if command.name in _WRITE]
    is_moved = _MOVES.search(start.command.text)
    is_target = re.search(rf">\s*\S*{re.escape(name)}", subject.script.text)
    return bool(is_moved or is_target) or any(name in text for text in others)


def _not_importable(subject: Subject, file: str, text: bytes, place: Path) -> str:
    """Returns the directory of a program that imports it as a package, which only `python -m` finds."""
    package = file.removeprefix("./").partition("/")[0]
    is_own = package.isidentifier() and "/" in file and package not in sys.stdlib_module_names
    imports = re.search(rf"(?m)^(?:from|import) {package}\b".encode(), text) if is_own else None
    is_found = "PYTHONPATH" in subject.script.text or b"sys.path" in text
    others = [*_INSTALLS, f"{package}/{package}", f"{package}/{package}.py"]
    return "" if not imports or is_found or any(os.path.exists(place / one) for one in others) else package  # noqa: PTH110 - Path.exists raises errors, for example if a name is too long


def _in_other_letters(path: Path) -> str:
    """Returns the name of a file that differs from this one in capital letters only; empty if none does."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return ""
    is_there = path.name in names
    return "" if is_there else next((name for name in names if name.lower() == path.name.lower()), "")


def _directories(subject: Subject, start: Start) -> list[Path]:
    """Returns the directories in which a program may be started; none if commands before it hide them."""
    places = [subject.directory] if subject.directory else []
    if not places and subject.path:
        places = list(islice(subject.path.absolute().parents, 3))
    own = (start.command.line, start.command.text)
    before = takewhile(lambda command: (command.line, command.text) != own, subject.script.commands)
    moves = [command for command in before if command.name in _MOVE] if places and _moves(subject) else []
    # Not in a condition, a function or a subshell.
    if not all(
        subject.script.lines[c.line - 1].startswith(("cd", "pushd")) and c.ends in _LASTS for c in moves
    ):
        return []
    return [moved for place in places if (moved := _after(place, moves))]


@lru_cache(maxsize=1)  # for each program that a script starts
def _moves(subject: Subject) -> bool:
    return any(command.name in _MOVE for command in subject.script.commands)


def _after(place: Path, moves: list[Command]) -> Path | None:
    """Returns the directory after these commands, which begin in `place`; None if it is unknown."""
    begin = place
    for command in moves:
        target = command.argv[1] if len(command.argv) == 2 else ""
        if not target:
            return None
        if target[0] not in "/~$":
            place = Path(os.path.normpath(place / target))
        elif _SUBMITTED_IN.fullmatch(target):
            place = begin
        elif Path(target).name != place.name:
            return None  # no other copy of the directory, such as that on the cluster
    return place
