"""Renders templates: shipped ones in this process, user templates in a restricted child process.

The sandbox blocks access to Python's internals and to all files except the shipped
templates and those in the template's directory. It cannot detect endless loops, so a user's
template is compiled and rendered by a child process with limits on time and memory.
"""

from __future__ import annotations

import pickle
import re
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from jinja2 import (
    BaseLoader,
    FileSystemLoader,
    FunctionLoader,
    StrictUndefined,
    TemplateError,
    TemplateNotFound,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddp_hpc.base.assets import asset_directory, user_directory
from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, RequestError
from ddp_hpc.render.shell_quoting import sh

MAX_TEMPLATE_BYTES = 1024 * 1024
# Slurm rejects scripts larger than 4 MB (slurm.conf.5, max_script_size).
MAX_SCRIPT_BYTES = 4 * 1024 * 1024
MAX_CPU_S = 5
MAX_MEMORY_BYTES = 1024**3
_MAX_WALL_S = 60

_OWN = "the template itself"
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_CHILD = "import sys; sys.path[:0] = sys.argv[1:]; from ddp_hpc.render.templates import child; child()"


def render_shipped(name: str, names: Mapping[str, object]) -> str:
    """Renders the shipped template `name` with the variables `names`."""
    return _shipped().get_template(name).render(names)


def find_template(given: str) -> Path:
    """Returns the file for `--template`: a path, or a name in `~/.config/ddp-hpc/templates`.

    Raises:
        RequestError: there is no such file.
    """
    beside = [user_directory("templates") / given] if "/" not in given else []
    with suppress(OSError):  # the name is too long for a file
        for path in [Path(given), *beside]:
            if path.is_file():
                return path
    raise RequestError(
        f"template {_short(repr(given))} was not found here or in {user_directory('templates')}. "
        "Give the path of a template."
    )


def render_own(path: Path, names: Mapping[str, object]) -> str:
    """Renders the user's template at `path` with the variables `names`, in a child process.

    Raises:
        RequestError: the template is invalid, accesses something forbidden, exceeds `MAX_CPU_S` or
            `MAX_MEMORY_BYTES`, or its output is not a script.
    """
    argv = [sys.executable, "-I", "-c", _CHILD, *filter(None, sys.path)]
    question = pickle.dumps((str(path.resolve()), dict(names)))
    try:
        done = subprocess.run(argv, input=question, capture_output=True, timeout=_MAX_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"{path}: the template was not rendered within {_MAX_WALL_S} s. Simplify it, or try again."
        ) from None
    answer = done.stdout.decode("utf-8", "surrogateescape")
    if done.returncode == EXIT_WRONG_REQUEST:
        raise RequestError(f"{path}{answer}")
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise RequestError(
            f"{path}: the template was stopped after {MAX_CPU_S} s of CPU time. Check it for an endless loop."
        )
    if done.returncode:
        raise RequestError(
            f"{path}: rendering the template failed with exit code {done.returncode}, probably because of "
            "insufficient memory. Simplify the template."
        )
    if not answer.startswith("#!"):
        raise RequestError(
            f"{path}: the output of the template is not a job script, as it does not begin with #!. Begin "
            "the template with #!/bin/bash."
        )
    return answer


def child(max_cpu_s: int = MAX_CPU_S) -> None:
    """Renders a template in the child process: from stdin to stdout. Exits with 0 or 2."""
    for limit, most in (
        (resource.RLIMIT_CPU, max_cpu_s),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (least, hard))
    path, names = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the parent process
    answer, code = _answer(Path(path), names)
    sys.stdout.buffer.write(answer.encode("utf-8", "backslashreplace" if code else "surrogateescape"))
    sys.stdout.buffer.flush()
    raise SystemExit(code)


def _answer(path: Path, names: Mapping[str, object]) -> tuple[str, int]:
    """Returns the script and exit code 0. For an error, returns a message that begins with the line number,
    and exit code 2.
    """
    try:
        text = _environment(FunctionLoader(_Sources(path))).get_template(_OWN).render(names)
        size = len(text.encode("utf-8", "surrogateescape"))
    except MemoryError:
        return (
            f": the template needs more than {MAX_MEMORY_BYTES // 1024**3} GiB of memory. Make it smaller.",
            2,
        )
    except TemplateNotFound as error:
        missing = f": {_short(error.name)} is neither a shipped template nor a regular file in this directory"
        return f"{missing}. Only these can be extended or included.", 2
    except Exception as error:
        return f"{_line(error, path)}: {_short(error) or type(error).__name__}. Fix the template.", 2
    if size > MAX_SCRIPT_BYTES or "\0" in text:
        return (
            ": the output of the template is larger than 4 MB or contains a NUL character, which no "
            "scheduler accepts. Correct the template.",
            2,
        )
    return text, 0


class _Sources:
    """Loads the user's template, shipped templates, and regular files beside the user's template."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._shipped = asset_directory("templates")

    def __call__(self, name: str) -> tuple[str, str, None] | None:
        path = self._own if name == _OWN else self._shipped / name
        if not _BESIDE.fullmatch(name) and name != _OWN:
            return None
        if not path.is_file():
            path = self._own.parent / name
            if path.is_symlink() or not path.is_file():
                return None
        with path.open("rb") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(text) > MAX_TEMPLATE_BYTES:
            raise TemplateError(f"{path.name} is larger than {MAX_TEMPLATE_BYTES // 1024**2} MiB")
        return text.decode("utf-8"), str(path), None


def _line(error: Exception, path: Path) -> str:
    """Returns `:LINE` for an error in the user's file, or an empty string if the line is unknown."""
    line = getattr(error, "lineno", None) if getattr(error, "filename", None) == str(path) else None
    frames = traceback.extract_tb(error.__traceback__)
    line = line or next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
    return f":{line}" if line else ""


def _short(what: object) -> str:
    text = " ".join(str(what).split()).removesuffix(".")
    return ascii(text if len(text) <= 200 else f"{text[:197]}...")[1:-1]


@cache
def _shipped() -> ImmutableSandboxedEnvironment:
    return _environment(FileSystemLoader(asset_directory("templates")))


def _environment(loader: BaseLoader) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        loader=loader,
        undefined=StrictUndefined,
        autoescape=False,
        # Jinja's default {# would conflict with ${#NAME} in bash.
        comment_start_string="{##",
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = sh
    return environment
