"""Options that are declared once, as annotated fields of frozen dataclasses.

A field declares its type, default, help text and limits. A configuration, such as `Job` or the `TrainConfig`
of the training, consists of such fields, or of several such dataclasses. `from_options` and `to_options`
convert between a dict of option values and the configuration, and `check_values` checks the values of a
configuration. `click_options` has the options of the command line, `toml_options` those in files, and
`option_names` their names in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from math import isfinite
from operator import ge, gt, lt
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
)

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.option_names import OptionError, on_command_line
from ddp_hpc.base.record import type_hints

_KEY = "option"
_T = TypeVar("_T")


class Conversion(TypedDict, total=False):
    """The keyword arguments of `option` for values that are converted from text in a way of their own."""

    read: Callable[[str, str], Any]
    """Converts the option's name and the text given for it to the value, or raises RequestError."""
    show: Callable[[Any], Any]
    """Converts the value to text that `read` accepts."""
    metavar: str
    """The placeholder for the value in the help text."""


class _Settings(Conversion, total=False):
    flag: str
    """The name of the option on the command line; by default the name of the field, with dashes."""
    argument: str
    """The name of the argument in functions of `import ddp_hpc`; by default that of the option."""
    name: str
    """The name of the option in Python; by default its name on the command line, with underscores."""
    section: str
    """The section of --help."""
    positional: bool
    """Whether this is the argument of a command instead of an option."""
    above: float
    """The number must be greater than this."""
    at_least: float
    """The number must not be less than this."""
    below: float
    """The number must be less than this."""
    bare_value: str
    """The value if the option is given without a value."""
    multiple: bool
    """Whether the option may be given several times, although the type does not show it."""
    shown_default: str
    """The default in the help text, if it depends on something else."""
    changes_losses: bool
    """Whether a training with another value has other losses. If the value changes between two attempts of a
    run, the log says so."""


class Declared(_Settings):
    """All that a field declares."""

    help: str
    default: Any


def option(default: Any, help: str, **settings: Unpack[_Settings]) -> Any:  # noqa: A002 - as click calls it
    """Returns a dataclass field that is also an option of the command line.

    A tuple of texts or a dict is an option that may be given several times.

    The help text must be understandable without those of other options.
    """
    metadata = {_KEY: Declared(help=help, default=default, **settings)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Option(NamedTuple):
    """One option: its type, and the path of its value in the composed configuration."""

    path: tuple[str, ...]
    flag: str
    declared: Declared
    type: Any
    """The type without None."""

    @property
    def name(self) -> str:
        """The name in `to_options`."""
        return self.declared.get("name") or self._flag_as_name

    @property
    def key(self) -> tuple[str, ...]:
        """The tables and the key in a TOML file."""
        return (*self.path[:-1], self._flag_as_name)

    @property
    def _flag_as_name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_multiple(self) -> bool:
        """Whether the option may be given several times."""
        is_tuple = get_origin(self.type) is tuple and "read" not in self.declared
        return is_tuple or get_origin(self.type) is dict or "multiple" in self.declared

    @property
    def read(self) -> Callable[[str, str], Any] | None:
        """Converts the option's name and one text given for it; None for numbers and texts."""
        of_type = read_pair if get_origin(self.type) is dict else _read_path if self.type is Path else None
        return self.declared.get("read", of_type)

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values, if they are declared as Literal."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def value_in(self, config: Any) -> Any:
        """Returns the value of the option in a configuration."""
        for name in self.path:
            config = getattr(config, name)
        return config


_options: dict[Any, tuple[Option, ...]] = {}


def options_of(config: type[Any]) -> tuple[Option, ...]:
    """Returns the options of a configuration and of its components, in order."""
    if config not in _options:
        _options[config] = tuple(_declared_options(config))
    return _options[config]


def _declared_options(config: type[Any]) -> Iterator[Option]:
    hints = type_hints(config)
    for declared in fields(config):
        hint = hints[declared.name]
        if is_dataclass(hint):
            below: Any = hint
            yield from (option._replace(path=(declared.name, *option.path)) for option in options_of(below))
            continue
        settings: Declared = declared.metadata[_KEY]
        flag = settings.get("flag") or on_command_line(declared.name)
        yield Option((declared.name,), flag, settings, _without_none(hint))


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        rest = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def _read_path(_: str, text: str) -> Path:
    return Path(text)


def read_pair(flag: str, text: str) -> tuple[str, str]:
    """Splits `--env NAME=VALUE` into name and value.

    Raises:
        RequestError: the text does not contain `=`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"{flag} requires NAME=VALUE (got {text!r}). For an empty value write {text}=.")
    return name, value


def merged_values(config: type[Any], file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values in a file, replaced by those that were given on the command line.

    For options that may be given several times, the values of the file come first.
    """
    options = [option for option in options_of(config) if "positional" not in option.declared]
    several = {option.name for option in options if option.is_multiple}
    both = {
        name: (*_items(file[name]), *_items(given[name])) for name in several & file.keys() & given.keys()
    }
    return {**file, **given, **both}


def _items(value: Any) -> Iterable[Any]:
    return value.items() if isinstance(value, dict) else value


def from_options(config: type[_T], values: Mapping[str, Any]) -> _T:
    """Returns the configuration with these option values, by name, and defaults for all others and for None.

    Raises:
        RequestError: values contradict each other or are out of range.
    """
    given = dict(values)
    made = _compose(config, given, {option.path: option for option in options_of(config)})
    if given:
        raise TypeError(f"unknown options: {', '.join(sorted(given))}")
    return made


def _compose(
    config: type[_T],
    given: dict[str, Any],
    options: Mapping[tuple[str, ...], Option],
    at: tuple[str, ...] = (),
) -> _T:
    values: dict[str, Any] = {}
    for declared in fields(config):  # type: ignore[arg-type]
        path = (*at, declared.name)
        if (option := options.get(path)) is None:
            values[declared.name] = _compose(type(declared.default), given, options, path)
        elif (value := given.pop(option.name, None)) is not None:
            values[declared.name] = dict(value) if get_origin(option.type) is dict else value
    return config(**values)


def to_options(config: Any) -> dict[str, Any]:
    """Returns the values of all options of a configuration, by name."""
    return {option.name: option.value_in(config) for option in options_of(type(config))}


def argument_names(config: type[Any]) -> Callable[[str], str]:
    """Returns a function that returns the arguments of `import ddp_hpc` for names of options."""
    declared = {option.name: option.declared for option in options_of(config)}
    return lambda name: declared[name].get("argument", name) if name in declared else name


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


def check_values(config: Any) -> None:
    """Checks numbers against the limits of their fields, and names against the choices; for `__post_init__`.

    Raises:
        OptionError: a value is out of range, or is not one of the choices.
    """
    for option in options_of(type(config)):
        if len(option.path) == 1:  # components check themselves
            check_value(option, option.value_in(config))


def check_value(option: Option, value: Any) -> None:
    """Checks one value as `check_values` does."""
    if option.choices and value is not None and value not in option.choices:
        hint = nearest(str(value), option.choices)
        remedy = f"Use one of {', '.join(option.choices)}."
        raise OptionError(option.name, repr(value), f"is unknown{hint}", remedy)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    limits: Mapping[str, Any] = option.declared
    for name, (holds, what) in _LIMITS.items():
        if (limit := limits.get(name)) is not None and not holds(value, limit):
            raise OptionError(option.name, value, f"must be {what} {limit}")
    if "at_least" in option.declared and not isfinite(value):
        raise OptionError(option.name, value, "must be finite")
