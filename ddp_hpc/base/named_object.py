"""Imports the functions and classes that users name as `package.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.user_code_exceptions import describe_error


def find_named(option: str, name: str) -> Callable[..., Any]:
    """Imports the function or class `package.module:name`.

    Raises:
        RequestError: the module does not exist, cannot be imported, or does not have that name.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise RequestError(f"{option} {name}: expected package.module:name, Python names joined by dots")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise RequestError(f"{option} {name}: cannot be imported: {describe_error(error)}") from None
        raise RequestError(
            f"{option} {name}: no module named {error.name!r} in {Path.cwd()} or on sys.path. "
            "Run the command in the directory of the module, or add that directory to PYTHONPATH"
        ) from None
    except Exception as error:  # the user's code may raise anything
        raise RequestError(f"{option} {name}: cannot be imported: {describe_error(error)}") from None
    for part in path.split("."):
        if not hasattr(value, part):
            hint = nearest(part, [known for known in vars(value) if not known.startswith("_")])
            raise RequestError(f"{option} {name}: module {module_name!r} has no attribute {part!r}{hint}")
        value = getattr(value, part)
    if not callable(value):
        raise RequestError(f"{option} {name} is not a function or class (its type is {type(value).__name__})")
    return value  # type: ignore[no-any-return]
