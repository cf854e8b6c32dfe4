"""Options of the command line from the options of a configuration; see `ddp_hpc.base.options`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import click

from ddp_hpc.base.options import Option, options_of

_T = TypeVar("_T")


def click_options(
    config: type[Any],
    names: Collection[str] | None = None,
    completions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Callable[[_T], _T]:
    """Returns a decorator that adds the options of the configuration to a command.

    The value of an option that is not given is None, or an empty tuple; see `given_values`.

    Args:
        config: the configuration.
        names: names of the options that the command has; None: all.
        completions: functions for the shell completion of values, by name of the option.
    """

    def decorate(command: _T) -> _T:
        for option in reversed(options_of(config)):
            if (names is None or option.name in names) and "positional" not in option.declared:
                command = _click_option(option, completions.get(option.name))(command)
        return command

    return decorate


def _click_option(option: Option, complete: Callable[..., Any] | None) -> Callable[[Any], Any]:
    declared, flag, choices = option.declared, option.flag, option.choices
    shown = _shown_default(option)
    help_text = declared["help"] + (f"  [default: {shown}]" if shown else "")
    if option.type is bool:
        has_negative = declared["default"] is not False
        spelled = f"{flag}/--no-{flag.removeprefix('--')}" if has_negative else flag
        return click.option(spelled, option.name, is_flag=True, default=None, help=help_text)
    settings: dict[str, Any] = {
        "help": help_text,
        "metavar": declared.get("metavar") or (f"[{'|'.join(choices)}]" if choices else None),
        "multiple": option.is_multiple,
        "shell_complete": complete,
        "type": option.type if option.read is None and option.type in (int, float) else str,
    }
    if choices:
        settings["shell_complete"] = lambda *words: [name for name in choices if name.startswith(words[-1])]
    if "bare_value" in declared:
        settings |= {"is_flag": False, "flag_value": declared["bare_value"]}
    if option.read is not None:
        settings["callback"] = _reader(option, option.read)
    return click.option(flag, option.name, **settings)


def _shown_default(option: Option) -> str:
    declared, default = option.declared, option.declared["default"]
    if "shown_default" in declared:
        return declared["shown_default"]
    if option.type is bool:
        return option.flag.removeprefix("--") if default else ""
    if default is None or default in ("", (), {}):
        return ""
    return str(declared["show"](default) if "show" in declared else default)


def _reader(
    option: Option, read: Callable[[str, str], Any]
) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(_: click.Context, __: click.Parameter, text: Any) -> Any:
        if option.is_multiple:
            return tuple(read(option.flag, part) for part in text)
        return None if text is None else read(option.flag, text)

    return callback


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the options that the user has given on the command line."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


def to_arguments(config: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Returns the command-line arguments for a configuration, without those that are the defaults.

    `defaults` replaces declared defaults, by name.
    """
    arguments: list[str] = []
    for option in options_of(type(config)):
        value = option.value_in(config)
        if value == defaults.get(option.name, option.declared["default"]) or "positional" in option.declared:
            continue
        if option.type is bool:
            arguments.append(option.flag if value else f"--no-{option.flag.removeprefix('--')}")
            continue
        show = option.declared.get("show", str)
        values = [f"{name}={text}" for name, text in value.items()] if isinstance(value, dict) else value
        for part in values if option.is_multiple else [value]:
            arguments += [option.flag, show(part)]
    return arguments
