"""Checks of the texts in a job request, such as its command, which hold on every site."""

from __future__ import annotations

import re
import shlex

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.raw_options import directive_in_setup
from ddp_hpc.sites.profile_tables import check_variable


def parse_signal(text: str) -> tuple[str, int]:
    """Returns the name and the seconds of `NAME@SECONDS`, such as TERM@60.

    Raises:
        RequestError: the text has another format.
    """
    match = re.fullmatch(r"(?:SIG)?(TERM|INT|USR1|USR2)@([0-9]{1,6})", text)
    if match is None:
        raise RequestError(
            f"--signal {text[:80]!r} is not NAME@SECONDS with TERM, INT, USR1 or USR2. Use for example "
            "TERM@60."
        )
    return match[1], int(match[2])


def check_name(option: str, name: str, what: str) -> None:
    """Raises RequestError if `name` cannot be that of `what`, such as a container."""
    if name.startswith("-") or not name.isprintable():
        raise RequestError(f"{option} {name[:80]!a} is not the name or the path of {what}")


def check_python_env(directory: str, conda_env: str) -> None:
    """Raises RequestError if `directory` is not an absolute path, or if both environments are given."""
    if directory and conda_env:
        raise RequestError(
            f"--python-env {directory} and --conda-env {conda_env} were given, but a job uses one Python "
            "environment. Omit one of the options."
        )
    # A colon would separate two entries of PATH.
    if directory and (not directory.startswith("/") or ":" in directory or not directory.isprintable()):
        raise RequestError(
            f"--python-env {directory[:80]!a} is not the absolute path of a directory. Give the path that "
            "python -c 'import sys; print(sys.prefix)' prints."
        )


def check_env(env: dict[str, str]) -> None:
    """Raises RequestError for a name or a value that no environment variable can have."""
    for name, value in env.items():
        check_variable(name)
        if "\0" in value:
            raise RequestError(
                f"the value of {name} contains a NUL character, which environment variables cannot contain. "
                "Remove it."
            )


def check_lines(option: str, lines: tuple[str, ...]) -> None:
    """Raises RequestError if a line of bash is several lines or a directive."""
    for line in lines:
        if re.search(r"[\0\n\r]", line):
            raise RequestError(
                f"{option} line {line!r} contains a line break. Use a separate --{option} for each line."
            )
        if directive := directive_in_setup(line):
            raise RequestError(
                f"{option} line {line!r} is a directive, which the scheduler does not read among commands. "
                f"Use --directive {shlex.quote(directive)}."
            )


def check_command(command: tuple[str, ...]) -> None:
    """Raises RequestError for a command that a launcher would misread."""
    if not command or not command[0]:
        raise RequestError("the command is empty. Give a program after --, such as -- python train.py.")
    if command[0].startswith("-"):
        raise RequestError(
            f"the command begins with {command[0]!r}, which the launcher would read as its own option. "
            "Put the program first, such as -- python -m ddp_hpc.train --epochs 3."
        )
    for word in command:
        if word == ":":
            raise RequestError(
                'the command contains the argument ":", which mpiexec and srun read as the start of a second '
                "program. Move the command into a script."
            )
        if "\0" in word:
            raise RequestError(
                "the command contains a NUL character, which command lines cannot contain. Remove it."
            )
