"""Options that are declared once, as annotated fields of frozen dataclasses.

A field declares its type, default, help text and limits. A configuration consists of several such
dataclasses. `click_options` creates options of click from the fields, `from_options` and `to_options`
convert between a dict of option values and the configuration, and `toml_defaults` reads a TOML file with
the same names.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from math import isfinite
from operator import ge, gt, lt
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import click

from ddp_hpc.base.errors import RequestError, nearest

_KEY = "option"
_T = TypeVar("_T")


class Conversion(TypedDict, total=False):
    """The keyword arguments of `option` for values that click cannot convert."""

    read: Callable[[str, str], Any]
    """Converts the option's name and the text given for it to the value, or raises RequestError."""
    show: Callable[[Any], Any]
    """Converts the value to text that `read` accepts."""
    metavar: str
    """The placeholder for the value in the help text."""


class _Settings(Conversion, total=False):
    flag: str
    """The name of the option on the command line; by default the name of the field, with dashes."""
    above: float
    """The number must be greater than this."""
    at_least: float
    """The number must not be less than this."""
    below: float
    """The number must be less than this."""
    bare_value: str
    """The value if the option is given without a value."""
    multiple: bool
    """Whether the option may be given several times; the value is a tuple."""
    shown_default: str
    """The default in the help text, if it depends on something else."""


class _Option(_Settings):
    help: str


def option(default: Any, help: str, **settings: Unpack[_Settings]) -> Any:  # noqa: A002 - as click calls it
    """Returns a dataclass field that is also an option of the command line.

    The help text must be understandable without those of other options.
    """
    return field(default=default, metadata={_KEY: _Option(help=help, **settings)})


@dataclass(frozen=True)
class _Leaf:
    """One option: its type, and the path of its value in the composed configuration."""

    path: tuple[str, ...]
    name: str
    field: Field[Any]
    option: _Option
    type: Any

    @property
    def flag(self) -> str:
        return _flag_of(self.field)


def _flag_of(one: Field[Any]) -> str:
    declared: _Option = one.metadata[_KEY]
    return declared.get("flag") or f"--{one.name.replace('_', '-')}"


def _leaves(config: type[Any]) -> tuple[_Leaf, ...]:
    """Returns the options of a configuration and of its components, in order."""
    found: list[_Leaf] = []
    hints = get_type_hints(config)
    for one in fields(config):
        if is_dataclass(hints[one.name]):
            found += [replace(leaf, path=(one.name, *leaf.path)) for leaf in _leaves(hints[one.name])]
            continue
        declared: _Option = one.metadata[_KEY]
        name = _flag_of(one).removeprefix("--").replace("-", "_")
        name += "s" if "multiple" in declared else ""
        found.append(_Leaf((one.name,), name, one, declared, _without_none(hints[one.name])))
    return tuple(found)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [one for one in get_args(hint) if one is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def click_options(config: type[Any]) -> Callable[[_T], _T]:
    """Returns a decorator that adds all options of the configuration to a command."""

    def decorate(command: _T) -> _T:
        for leaf in reversed(_leaves(config)):
            command = _click_option(leaf)(command)
        return command

    return decorate


def _click_option(leaf: _Leaf) -> Callable[[Any], Any]:
    declared, flag, default = leaf.option, leaf.flag, leaf.field.default
    settings: dict[str, Any] = {
        "help": declared["help"],
        "metavar": declared.get("metavar"),
        "default": default,
    }
    if "shown_default" in declared:
        settings["help"] += f"  [default: {declared['shown_default']}]"
        settings["show_default"] = False
    if leaf.type is bool:
        both = default is not False
        spelled = f"{flag}/--no-{flag.removeprefix('--')}" if both else flag
        return click.option(spelled, leaf.name, is_flag=True, **settings)
    if "read" in declared:
        settings["multiple"] = is_multiple = "multiple" in declared
        settings["callback"] = _reader(declared["read"], is_multiple)
        if "show" in declared and default is not None:
            settings["default"] = declared["show"](default)
    elif get_origin(leaf.type) is Literal:
        settings["type"] = click.Choice(get_args(leaf.type))
        if "bare_value" in declared:
            settings |= {"is_flag": False, "flag_value": declared["bare_value"]}
        if "metavar" not in declared:
            settings.pop("metavar")
    elif leaf.type is Path:
        settings["type"] = click.Path(path_type=Path)
    else:
        settings["type"] = leaf.type
    return click.option(flag, leaf.name, **settings)


def _reader(
    read: Callable[[str, str], Any], is_multiple: bool
) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(_: click.Context, parameter: click.Parameter, text: Any) -> Any:
        flag = parameter.opts[0]
        if is_multiple:
            return tuple(read(flag, one) for one in text)
        return None if text is None else read(flag, text)

    return callback


def from_options(config: type[_T], values: Mapping[str, Any]) -> _T:
    """Returns the configuration with these option values, by name, and defaults for all others.

    Raises:
        RequestError: values contradict each other or are out of range.
    """
    given = dict(values)
    made = _compose(config, given, {leaf.path: leaf for leaf in _leaves(config)})
    if given:
        raise TypeError(f"unknown options: {', '.join(sorted(given))}")
    return made


def _compose(
    config: type[_T], given: dict[str, Any], leaves: Mapping[tuple[str, ...], _Leaf], at: tuple[str, ...] = ()
) -> _T:
    hints = get_type_hints(config)
    values: dict[str, Any] = {}
    for one in fields(config):  # type: ignore[arg-type]
        path = (*at, one.name)
        if is_dataclass(hints[one.name]):
            values[one.name] = _compose(hints[one.name], given, leaves, path)
        elif leaves[path].name in given:
            values[one.name] = given.pop(leaves[path].name)
    return config(**values)


def to_options(config: Any) -> dict[str, Any]:
    """Returns the values of all options of a composed configuration, by name."""
    return {leaf.name: _at(config, leaf.path) for leaf in _leaves(type(config))}


def _at(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def read_directory(flag: str, text: str) -> Path:
    """Converts a command-line argument to the path of a directory.

    Raises:
        RequestError: the argument is empty, which would mean the current directory.
    """
    if not text:
        raise RequestError(f"{flag} is empty; give a directory, and check any shell variable in the argument")
    return Path(text)


def show_numbers(numbers: Iterable[int]) -> str:
    """Returns the numbers separated by commas, such as `1,512`."""
    return ",".join(map(str, numbers))


DIRECTORY: Conversion = {"read": read_directory, "show": str, "metavar": "DIR"}
_LIMITS = {"above": (gt, "greater than"), "at_least": (ge, "at least"), "below": (lt, "less than")}


def check_ranges(config: Any) -> None:
    """Checks numbers against the limits of their fields; called from `__post_init__`.

    Raises:
        RequestError: a number is out of range.
    """
    for one in fields(config):
        declared = one.metadata.get(_KEY, {})
        value = getattr(config, one.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        for name, (holds, what) in _LIMITS.items():
            if name in declared and not holds(value, declared[name]):
                raise RequestError(f"{_flag_of(one)} must be {what} {declared[name]} (got {value})")
        if "at_least" in declared and not isfinite(value):
            raise RequestError(f"{_flag_of(one)} must be finite (got {value})")


def toml_defaults(path: Path, config: type[Any]) -> dict[str, Any]:
    """Returns the values in a TOML file as a `default_map` of click: the command line takes precedence.

    Tables have the names of the components; a key is the name of an option without the leading dashes, such
    as `batch-size`.

    Raises:
        RequestError: the file cannot be read, or a key is not an option.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {path}: cannot be read ({error}); check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"--config {path}: is not valid TOML ({error}); fix that line") from None
    by_key = {_key(leaf): leaf for leaf in _leaves(config)}
    defaults: dict[str, Any] = {}
    for key, value in _flat(document, ()):
        if key not in by_key:
            known = [".".join(one) for one in by_key]
            raise RequestError(
                f"--config {path}: unknown key {'.'.join(key)!r}{nearest('.'.join(key), known)}. See --help "
                "for the options; each belongs in the table of its group."
            )
        defaults[by_key[key].name] = _as_argument(by_key[key], value)
    return defaults


def _key(leaf: _Leaf) -> tuple[str, ...]:
    return (*(part.replace("_", "-") for part in leaf.path[:-1]), leaf.flag.removeprefix("--"))


def _flat(table: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and not at:
            yield from _flat(value, (key,))
        else:
            yield (*at, key), value


def _as_argument(leaf: _Leaf, value: Any) -> Any:
    """Converts a TOML value to the text that click would receive from the command line."""
    if "multiple" in leaf.option:
        return [f"{name}={one!r}" for name, one in value.items()] if isinstance(value, dict) else value
    if "read" in leaf.option and isinstance(value, list):
        return ",".join(map(str, value))
    return value


def as_toml(config: Any) -> str:
    """Returns the configuration as text that `toml_defaults` can read, without options that have no value."""
    import tomli_w

    document: dict[str, Any] = {}
    for leaf in _leaves(type(config)):
        value = _at(config, leaf.path)
        if value is None:
            continue
        if "multiple" in leaf.option:
            value = dict(value)
        elif "show" in leaf.option:
            value = leaf.option["show"](value)
        elif isinstance(value, Path):
            value = str(value)
        *table, key = _key(leaf)
        (document.setdefault(table[0], {}) if table else document)[key] = value
    text: str = tomli_w.dumps(document)
    return text
