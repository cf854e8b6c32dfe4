"""Converts TOML files to frozen dataclasses. Every error names the file and the key.

A dataclass is the schema: its field names are the keys, its annotations the
types. Supported types are `str`, `int`, `float`, `bool`, `tuple[X, ...]`,
`dict[str, str]`, `X | None` and nested dataclasses of this kind.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.record import type_hints

T = TypeVar("T")

# The position of a value in a document: keys of tables, and indices in arrays.
_Path = tuple[str | int, ...]


def read_toml(path: Path, cls: type[T], *, table: str = "", base: Callable[[str], Path] | None = None) -> T:
    """Returns the file at `path` as an instance of `cls`; with `table`, only that table, if it exists.

    If `base` is given, the key `extends` names another file, and `base` returns its path. The
    tables of this file are merged into those of the other file key by key; other
    values, including lists, replace those of the other file.

    Raises:
        RequestError: the file cannot be read, is not TOML, or has an unknown or missing key, a
            value of the wrong type, or a value that `cls` rejects; or files extend each other in a
            cycle.
    """
    file = TomlFile(path)
    document = file.document if base is None else _extended(file.document, path, base)
    if table:
        return typing.cast(T, file.value(document.get(table, {}), cls, (table,)))
    return typing.cast(T, file.table(document, cls, ()))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as err:
        raise RequestError(f"{path}: cannot be read ({err.strerror}); check the path") from err
    except UnicodeDecodeError as err:
        raise RequestError(
            f"{path}: is not UTF-8 text (byte {err.start}); convert it to UTF-8, as TOML requires"
        ) from err


def _parse(text: str, source: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise RequestError(f"{source}: is not valid TOML: {err}; fix that line") from err
    except RecursionError as err:
        raise RequestError(f"{source}: is nested too deeply; use fewer levels of tables and arrays") from err


def _extended(document: dict[str, Any], path: Path, base: Callable[[str], Path]) -> dict[str, Any]:
    chain = [path]
    merged = document
    while name := document.get("extends"):
        if not isinstance(name, str):
            raise RequestError(f'{chain[-1]}: "extends" must be the name of a profile (got {name!r})')
        below = base(name)
        if any(below.resolve() == known.resolve() for known in chain):
            cycle = " -> ".join(known.stem for known in [*chain, below])
            raise RequestError(f"{path}: extends itself ({cycle}); remove one of these `extends` keys")
        chain.append(below)
        document = _parse(_read_text(below), below)
        merged = _merged(document, merged)
    return merged


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merged(below[key], value)
    return merged


class TomlFile:
    """A parsed TOML file. Errors about its values contain their keys.

    Raises:
        RequestError: the file cannot be read, or is not TOML.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self.document = _parse(_read_text(source), source)

    def table(self, table: dict[str, Any], cls: Any, path: _Path) -> Any:
        """Converts a table to a dataclass."""
        hints = type_hints(cls)
        known = {f.name: f for f in fields(cls)}
        for key in table:
            if key not in known:
                hint = nearest(key, list(known)) or f"; known keys: {', '.join(known)}"
                raise self.error(f'unknown key "{key}"{hint}', path)
        needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
        for key in needed:
            if key not in table:
                raise self.error(f'the key "{key}" is missing; add it', path)
        values = {key: self.value(value, hints[key], (*path, key)) for key, value in table.items()}
        try:
            return cls(**values)
        except RequestError as err:
            raise self.error(str(err), path) from None

    def value(self, value: Any, kind: Any, path: _Path) -> Any:
        """Converts a value to a type, which can be a dataclass."""
        origin = typing.get_origin(kind)
        if origin is UnionType or origin is typing.Union:
            (kind,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
            origin = typing.get_origin(kind)
        if is_dataclass(kind) and isinstance(kind, type):
            if isinstance(value, dict):
                return self.table(value, kind, path)
            raise self._wrong_type(path, value, "a table")
        if origin is tuple and isinstance(value, list):
            item = typing.get_args(kind)[0]
            return tuple(self.value(v, item, (*path, i)) for i, v in enumerate(value))
        if origin is dict and isinstance(value, dict):
            item = typing.get_args(kind)[1]
            return {k: self.value(v, item, (*path, k)) for k, v in value.items()}
        if kind is float and type(value) is int:
            return float(value)
        # The types are compared with `is`, because isinstance accepts a bool as an int.
        if type(value) is kind:
            return value
        raise self._wrong_type(path, value, _type_name(kind))

    def _wrong_type(self, path: _Path, value: Any, needed: str) -> RequestError:
        name = ".".join(str(step) for step in path)
        return self.error(f'"{name}" is {value!r}, which is {_type_name(type(value))}; {needed} is needed')

    def error(self, message: str, table: _Path = ()) -> RequestError:
        """Returns the error with this message, which is about this table or about the whole file."""
        place = f" [{'.'.join(map(str, table))}]" if table else ""
        return RequestError(f"{self._source}:{place} {message}")


def _type_name(kind: Any) -> str:
    if is_dataclass(kind):
        return "a table"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    origin = typing.get_origin(kind) or kind
    return names.get(kind) or {tuple: "a list", list: "a list", dict: "a table"}.get(origin, kind.__name__)
