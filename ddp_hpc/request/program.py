"""The program that a command starts: which Python file or module it is, and the default name of its job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

DEFAULT_NAME = "ddp"
_TRAINER = "ddp_hpc.train"
# The longest name of a job that PBS accepts.
_MAX_NAME_CHARS = 15
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))
# Programs that start the Python program which follows them, with options that this module does not know.
_STARTERS = frozenset(
    (
        "torchrun", "torchrun_jsc", "torchrun_script.sh", "accelerate", "deepspeed", "env", "nice", "numactl",
        "apptainer", "singularity", "shifter", "podman-hpc", "nsys", "uv", "conda",
    )
)  # fmt: skip
_STARTING_MODULES = frozenset(
    (
        "ddp_hpc.exec", "ddp_hpc.torchrun_step", "torch.distributed.run", "torch.distributed.launch",
        "accelerate.commands.launch", "deepspeed.launcher.runner",
    )
)  # fmt: skip
_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Program:
    """A program. `name` is the path of a file, as it was written, or the dotted name of a module."""

    kind: Literal["file", "module", "other"]
    name: str

    @property
    def is_trainer(self) -> bool:
        """Whether this is `ddp_hpc.train`."""
        return self.kind == "module" and self.name == _TRAINER


def program_of(command: Sequence[str]) -> Program | None:
    """Returns the program that a command starts, without launchers; None if the command does not show it."""
    if not command:
        return None
    name, rest = PurePosixPath(command[0]).name, command[1:]
    if name == "ddp-hpc":
        if rest and rest[0] == "train":
            return Program("module", _TRAINER)
        return program_of(rest[2 if "--" in rest[1:2] else 1 :])
    if name.endswith(".py"):
        return Program("file", command[0])
    if _PYTHON.fullmatch(name):
        return _of_python(rest)
    if name in _STARTERS:
        return _started(rest)
    if name in _SHELLS:
        script = next(iter(rest), "")
        return Program("other", script) if script and not script.startswith("-") else None
    return Program("other", command[0])


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


def _of_python(arguments: Sequence[str]) -> Program | None:
    words = iter(enumerate(arguments))
    for index, word in words:
        if word == "-m":
            module = next((one for _, one in words), "")
            if module in _STARTING_MODULES:
                return _started(arguments[index + 2 :])
            return Program("module", module) if module else None
        if word in ("-X", "-W"):
            next(words, None)
        elif word.startswith("-") and word != "-u":
            if word == "-c":
                return None
        elif not word.startswith("-"):
            return Program("file", word)
    return None


def _started(words: Sequence[str]) -> Program | None:
    """Returns the program after the options of a starter: the first Python file, module or interpreter."""
    for index, word in enumerate(words):
        if _PYTHON.fullmatch(PurePosixPath(word).name) or word.endswith(".py"):
            return program_of(words[index:])
        if word == "-m":
            return _of_python(words[index:])
    return None
