"""The program that a command starts: which Python file or module it is, and the default name of its job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

DEFAULT_NAME = "ddp"
_TRAINER = "ddp_hpc.train"
# The longest name of a job that PBS accepts.
_MAX_NAME_CHARS = 15
# Commands that start each other are read recursively.
_MAX_WORDS = 200
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))
# Programs and modules that start the Python file or module after their options as one or several ranks.
_AGENTS = frozenset(
    (
        "torchrun", "torchrun_jsc", "torchrun_script.sh", "accelerate", "deepspeed", "ddp_hpc.torchrun.step",
        "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
        "deepspeed.launcher.runner",
    )
)  # fmt: skip
# Programs and modules that start the command after their options.
_STARTERS = _AGENTS | frozenset(
    (
        "srun", "mpiexec", "mpirun", "ddp_hpc.exec", "env", "nice", "numactl", "apptainer", "singularity",
        "shifter", "podman-hpc", "nsys", "uv", "conda",
    )
)  # fmt: skip
_NAMES = _STARTERS | _SHELLS | {"ddp-hpc"}
_TAKE_MODULES = _AGENTS | {"uv"}
_PYTHON = r"python[0-9.]*"
# Options of Python with a value, which can be in the same word (-Xdev) or after other letters (-um MODULE).
_WITH_VALUE = r"(?s)-[^-cmWX]*([cmWX])(.*)"
_OPERATORS = frozenset(";&|()")


class Program(NamedTuple):
    """A program. `name` is the path of a file, as it was written, or the dotted name of a module.

    `python` is the interpreter, as it was written; it is empty if torchrun or a similar program starts the
    ranks, and `python` for an executable file.
    """

    kind: Literal["file", "module", "other"]
    name: str
    python: str = ""

    @property
    def is_trainer(self) -> bool:
        """Whether this is `ddp_hpc.train`."""
        return self.kind == "module" and self.name == _TRAINER


def program_of(command: Sequence[str]) -> Program | None:
    """Returns the program that a command starts; None if the command does not show it."""
    if not command:
        return None
    name, rest = PurePosixPath(command[0]).name, command[1:_MAX_WORDS]
    if name == "ddp-hpc":
        if rest and rest[0] == "train":
            return Program("module", _TRAINER)
        return program_of(rest[2 if "--" in rest[1:2] else 1 :])
    if name.endswith(".py"):
        return Program("file", command[0], "python")
    if re.fullmatch(_PYTHON, name):
        return _of_python(command[0], rest)
    if name in _STARTERS:
        return _started(rest, name)
    if name in _SHELLS:
        return _of_shell(rest)
    return Program("other", command[0])


def module_of(command: Sequence[str]) -> str:
    """Returns the module of a command `python -m MODULE`, otherwise an empty string."""
    letter, name, _ = _main_of_python(command[1:])
    return name if letter == "m" and re.fullmatch(_PYTHON, PurePosixPath(command[0]).name) else ""


def default_name(command: Sequence[str]) -> str:
    """Returns the name of a job whose user has not chosen one, such as `train` for `python train.py`."""
    program = program_of(command)
    if program is None or program.is_trainer:
        return DEFAULT_NAME
    is_module = program.kind == "module"
    last = program.name.rpartition(".")[2] if is_module else PurePosixPath(program.name).stem
    # The characters that both PBS and Slurm accept, and that do not surprise in the name of a directory.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.")
    return name[:_MAX_NAME_CHARS].rstrip("-.") if re.match("[A-Za-z]", name) else DEFAULT_NAME


def _of_python(python: str, arguments: Sequence[str]) -> Program | None:
    letter, name, after = _main_of_python(arguments)
    if letter == "m" and name in _STARTERS:
        return _started(arguments[after:], name)
    if letter == "c" or not name:
        return None
    return Program("module" if letter == "m" else "file", name, python)


def _main_of_python(arguments: Sequence[str]) -> tuple[str, str, int]:
    """Returns the letter of the option -m or -c, its value, and the index of the program's arguments.

    For a file, the letter is empty, and the file takes the place of the value.
    """
    words = iter(enumerate(arguments, start=1))
    for after, word in words:
        if not word.startswith("-"):
            return "", word, after
        if word == "-":
            break
        if option := re.fullmatch(_WITH_VALUE, word):
            letter, value = option.groups()
            value_end = after
            if not value:
                value_end, value = next(words, (after, ""))
            if letter in "cm":
                return letter, value, value_end
        elif word == "--check-hash-based-pycs":
            next(words, None)
    return "", "", len(arguments)


def _started(words: Sequence[str], starter: str) -> Program | None:
    """Returns the program after the options of a starter: the first Python file, interpreter or starter in
    `words`.
    """
    program = None
    for index, word in enumerate(words):
        name = PurePosixPath(word).name
        if word == "-m" and starter in _TAKE_MODULES:
            program = _of_python("", words[index:])
            break
        is_option = word.startswith("-") or re.match(r"\w+=", word)
        if not is_option and (name.endswith(".py") or name in _NAMES or re.fullmatch(_PYTHON, name)):
            program = program_of(words[index:])
            break
    return program._replace(python="") if program and starter in _AGENTS else program


def _of_shell(arguments: Sequence[str]) -> Program | None:
    """Returns the script of a shell, or the program of its only command after -c."""
    first = next(iter(arguments), "")
    if not first.startswith("-"):
        return Program("other", first) if first else None
    if not re.fullmatch(r"-[a-z]*c", first) or len(arguments) < 2:
        return None
    lexer = shlex.shlex(arguments[1], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote is not closed
        return None
    if any(_OPERATORS.issuperset(word) for word in words) or "\n" in arguments[1].strip():
        return None
    program = program_of(words[1:] if words[:1] == ["exec"] else words)
    return program if program and program.kind != "other" else None
