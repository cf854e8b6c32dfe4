"""Check of Python programs that end at once: arguments that they reject, and files that are not found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import Start, starts
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.lint.placeholders import has_placeholder, is_template
from ddp_hpc.lint.program_arguments import complaint
from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import files_of, text_of

# The directory in which the job was submitted, which is where lint looks for programs.
_HERE = re.compile(r"\.|\$\{?(?:SLURM_SUBMIT_DIR|PBS_O_WORKDIR|PWD)(?::[-?][^}]*)?\}?/?")
_PLACEHOLDER = re.compile("[A-Z]+_[A-Z_]+")
# JOB024 reports a command that ends after a backslash and a blank, and JOB003 a placeholder such as <model>.
_IS_CUT = re.compile(r"\\[ \t]*$|<[\w ./-]+>")
# An installation of the package makes it importable from anywhere.
_INSTALLS = ("setup.py", "setup.cfg", "pyproject.toml")


@check("JOB043", "error", "a Python program that ends at once")
def _ends_at_once(subject: Subject) -> Iterator[Problem]:
    if is_template(subject.script) or subject.template:
        return
    for start in starts(subject):
        program = program_of(start.words) if ".py" in start.command.text else None
        if program is None or program.kind != "file" or program.name not in start.words:
            continue
        directories = _directories(subject, start)
        texts = {text: place for place in directories if (text := text_of(place / program.name)) is not None}
        name = plain(program.name.rpartition("/")[2])
        if len(texts) == 1:
            text, place = next(iter(texts.items()))
            if package := _not_importable(subject, program.name, text, place):
                what = f"{name} imports {package}, but Python looks for modules in the directory of {name}, "
                module = program.name.removeprefix("./").removesuffix(".py").replace("/", ".")
                remedy = f"start it as python -m {plain(module)}"
                yield Problem(start.command.line, f"{what}unless PYTHONPATH has another", remedy, "note")
            yield from _rejected_arguments(start, program.name, place)
        elif other := next(filter(None, (_in_other_letters(one / program.name) for one in directories)), ""):
            what = f"there is no {name}, but {plain(other)}, which is another file on Linux"
            yield Problem(start.command.line, what, f"write {plain(other)}")


def _rejected_arguments(start: Start, file: str, place: Path) -> Iterator[Problem]:
    given = start.words[start.words.index(file) + 1 :]
    if _IS_CUT.search(start.command.text):
        return
    words = ["$" if has_placeholder(word) or _PLACEHOLDER.fullmatch(word) else word for word in given]
    program, name = program_of(start.words), plain(file.rpartition("/")[2])
    files = files_of(program, place) if program else None
    if files and (found := complaint(files, words)):
        yield Problem(
            start.command.line, f"{name} {plain(found.what)}, so it ends at once", plain(found.remedy)
        )
    elif files and (added := _added_by(start)) and complaint(files, [*words, added]):
        option = added.partition("=")[0]
        # PyTorch before 2.0 gives the program --local_rank.
        is_old = not complaint(files, [*words, added.replace("-rank", "_rank")])
        launcher = start.program if start.program == "deepspeed" else "torch.distributed.launch"
        since = " of PyTorch 2" * is_old
        what = f"{launcher}{since} gives {name} the option {option}, which it does not have"
        remedy = (
            "use torchrun, and read LOCAL_RANK" if "torch" in launcher else f"add {option} to the program"
        )
        yield Problem(start.command.line, what, remedy, "note" if is_old and added[7] == "-" else None)


def _added_by(start: Start) -> str:
    """Returns the argument that a launcher adds to those of the program; empty if it adds none."""
    if start.program == "deepspeed":
        return "" if "--no-local-rank" in start.options else "--local_rank=0"
    is_launch = start.is_torchrun and "torch.distributed.launch" in start.words[:7]
    return "--local-rank=0" if is_launch and "--use-env" not in start.options else ""


def _not_importable(subject: Subject, file: str, text: bytes, place: Path) -> str:
    """Returns the directory of a program that imports it as a package, which only `python -m` finds."""
    package = file.removeprefix("./").partition("/")[0]
    is_inside = package.isidentifier() and "/" in file
    imports = re.search(rf"(?m)^(?:from|import) {package}\b".encode(), text) if is_inside else None
    is_found = "PYTHONPATH" in subject.script.text or b"sys.path" in text
    is_installed = any((place / name).exists() for name in _INSTALLS)
    has_own = (place / package / package).exists() or (place / package / f"{package}.py").exists()
    return package if imports and not (is_found or is_installed or has_own) else ""


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
        places = list(islice(subject.path.absolute().parents, 2))
    before = [command for command in subject.script.commands if command.line < start.command.line]
    moves = [command for command in before if command.name in ("cd", "pushd", "popd")]
    return [moved for place in places if (moved := _after(place, moves))]


def _after(place: Path, moves: list[Command]) -> Path | None:
    """Returns the directory after these commands, which begin in `place`; None if it is unknown."""
    for command in moves:
        target = command.argv[1] if len(command.argv) == 2 else ""
        if command.name == "popd" or not target or command.text[:1].isspace():
            return None
        if target[0] not in "/~$":
            place = Path(os.path.normpath(place / target))
        elif not _HERE.fullmatch(target) and Path(target).name != place.name:
            return None  # no other copy of the directory, such as that on the cluster
    return place
