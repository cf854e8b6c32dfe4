"""Renders templates: the shipped ones, and those of users.

A user's template can include the shipped templates and the files of its own directory. Jinja's sandbox keeps
it from other files and from Python's internals.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    FileSystemBytecodeCache,
    FileSystemLoader,
    FunctionLoader,
    StrictUndefined,
    TemplateNotFound,
)
from jinja2.bccache import Bucket

from ddp_hpc.base.assets import asset_directory, user_directory
from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.shell_quoting import sh

# The name of the user's template in Jinja, so that it can extend a shipped one with the same file name.
_OWN = "the template itself"


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
    """Renders the user's template at `path` with the variables `names`.

    Raises:
        RequestError: the template is invalid, accesses something forbidden, or its output is not a script.
    """

    def load(name: str) -> tuple[str, str, None] | None:
        return (path.read_text(encoding="utf-8"), str(path), None) if name == _OWN else None

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    files = FileSystemLoader([asset_directory("templates"), path.parent])
    loader = ChoiceLoader([FunctionLoader(load), files])
    try:
        script = _environment(ImmutableSandboxedEnvironment, loader).get_template(_OWN).render(names)
    except Exception as error:
        text = _short(error) or type(error).__name__
        if isinstance(error, TemplateNotFound):
            text = f"{_short(error.name)} is neither a shipped template nor a file in this directory"
        raise RequestError(f"{path}{_line(error, path)}: {text}. Fix the template.") from None
    if not script.startswith("#!"):
        raise RequestError(
            f"{path}: the output of the template is not a job script, as it does not begin with #!. Begin "
            "the template with #!/bin/bash."
        )
    return script


def _line(error: Exception, path: Path) -> str:
    """Returns `:LINE` for an error in the user's file, or an empty string if the line is unknown."""
    import traceback

    line = getattr(error, "lineno", None) if getattr(error, "filename", None) == str(path) else None
    frames = traceback.extract_tb(error.__traceback__)
    line = line or next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
    return f":{line}" if line else ""


def _short(what: object) -> str:
    text = " ".join(str(what).split()).removesuffix(".")
    return ascii(text if len(text) <= 200 else f"{text[:197]}...")[1:-1]


class _CompiledTemplates(FileSystemBytecodeCache):
    """Keeps the shipped templates compiled beside their sources, as Python keeps its modules.

    Compiling them takes as long as the rest of `ddp-hpc render`.
    """

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Writes a compiled template, if the directory is writable."""
        with suppress(OSError):
            Path(self.directory).mkdir(exist_ok=True)
            super().dump_bytecode(bucket)


@cache
def _shipped() -> Environment:
    directory = asset_directory("templates")
    environment = _environment(Environment, FileSystemLoader(directory))
    if not sys.dont_write_bytecode:
        environment.bytecode_cache = _CompiledTemplates(str(directory / "__pycache__"), "shipped_%s.cache")
    return environment


def _environment(kind: type[Environment], loader: BaseLoader) -> Environment:
    environment = kind(
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
