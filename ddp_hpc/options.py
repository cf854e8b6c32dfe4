"""Options that are declared once, as annotated fields of frozen dataclasses.

A field declares its type, default, help text and limits. `click_options` creates options of click from
the fields, `from_options` and `to_options` convert between flat option values and the composed
configuration, and `toml_defaults` reads a TOML file with the same names.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ddp_hpc.errors import RequestError, nearest

_KEY = "option"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class _Option:
    """The metadata of a field that is also an option of the command line."""

    help: str
    flag: str
    metavar: str | None
    read: Callable[[str, str], Any] | None
    show: Callable[[Any], Any] | None
    above: float | None
    at_least: float | None
    below: float | None
    bare_value: str | None
    multiple: bool
    shown_default: str | None


def option(
    default: Any,
    help: str,  # noqa: A002 - as click calls it
    *,
    flag: str = "",
    metavar: str | None = None,
    read: Callable[[str, str], Any] | None = None,
    show: Callable[[Any], Any] | None = None,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    bare_value: str | None = None,
    multiple: bool = False,
    shown_default: str | None = None,
) -> Any:
    """Returns a dataclass field that is also an option of the command line.

    Args:
        default: the value if the option is not given.
        help: the help text, which must be understandable without the other options.
        flag: the name of the option; by default the name of the field, with dashes.
        metavar: the placeholder for the value in the help text.
        read: converts the flag and its text into the value, and raises RequestError.
        show: converts the value into the text that `read` reads.
        above: the number must be greater than this.
        at_least: the smallest number allowed.
        below: the number must be less than this.
        bare_value: the value if the option is given without a value.
        multiple: whether the option may be given several times; the value is a tuple.
        shown_default: the default in the help text, if it depends on something else.
    """
    found = _Option(
        help=help, flag=flag, metavar=metavar, read=read, show=show, above=above, at_least=at_least,
        below=below, bare_value=bare_value, multiple=multiple, shown_default=shown_default,
    )  # fmt: skip
    return field(default=default, metadata={_KEY: found})


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

    @property
    def default(self) -> Any:
        return self.field.default


def _flag_of(one: Field[Any]) -> str:
    declared: _Option = one.metadata[_KEY]
    return declared.flag or f"--{one.name.replace('_', '-')}"


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
        name += "s" if declared.multiple else ""
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
    declared, flag = leaf.option, leaf.flag
    settings: dict[str, Any] = {"help": declared.help, "metavar": declared.metavar, "default": leaf.default}
    if declared.shown_default is not None:
        settings |= {"help": f"{declared.help}  [default: {declared.shown_default}]", "show_default": False}
    if leaf.type is bool:
        both = leaf.default is not False
        spelled = f"{flag}/--no-{flag.removeprefix('--')}" if both else flag
        return click.option(spelled, leaf.name, is_flag=True, **settings)
    if declared.read is not None:
        settings["callback"] = _reader(declared)
        default = leaf.default
        settings["default"] = default if default is None or not declared.show else declared.show(default)
        settings["multiple"] = declared.multiple
    elif get_origin(leaf.type) is Literal:
        settings["type"] = click.Choice(get_args(leaf.type))
        if declared.bare_value is not None:
            settings |= {"is_flag": False, "flag_value": declared.bare_value}
        if declared.metavar is None:
            settings.pop("metavar")
    elif leaf.type is Path:
        settings["type"] = click.Path(path_type=Path)
    else:
        settings["type"] = leaf.type
    return click.option(flag, leaf.name, **settings)


def _reader(declared: _Option) -> Callable[[click.Context, click.Parameter, Any], Any]:
    read = declared.read
    assert read is not None

    def callback(_: click.Context, parameter: click.Parameter, text: Any) -> Any:
        flag = parameter.opts[0]
        if declared.multiple:
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
        raise RequestError(f"{flag} is empty; give a directory, or check the variable that was used")
    return Path(text)


def check_ranges(config: Any) -> None:
    """Checks numbers against the limits of their fields; called from `__post_init__`.

    Raises:
        RequestError: a number is out of range.
    """
    for one in fields(config):
        declared: _Option | None = one.metadata.get(_KEY)
        value = getattr(config, one.name)
        if declared is None or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        limits = [
            (declared.above is not None and not value > declared.above, f"greater than {declared.above}"),
            (
                declared.at_least is not None and not value >= declared.at_least,
                f"at least {declared.at_least}",
            ),
            (declared.below is not None and not value < declared.below, f"less than {declared.below}"),
            (declared.at_least is not None and not isfinite(value), "finite"),
        ]
        for is_wrong, what in limits:
            if is_wrong:
                raise RequestError(f"{_flag_of(one)} must be {what} (got {value})")


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
        raise RequestError(f"--config {path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"--config {path}: not valid TOML ({error})") from None
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
    if leaf.option.multiple:
        return [f"{name}={one!r}" for name, one in value.items()] if isinstance(value, dict) else value
    if leaf.option.read is not None and isinstance(value, list):
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
        if leaf.option.multiple:
            value = dict(value)
        elif leaf.option.show is not None:
            value = leaf.option.show(value)
        elif isinstance(value, Path):
            value = str(value)
        *table, key = _key(leaf)
        (document.setdefault(table[0], {}) if table else document)[key] = value
    text: str = tomli_w.dumps(document)
    return text
