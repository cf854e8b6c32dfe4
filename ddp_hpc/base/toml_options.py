"""The options of a configuration in TOML files; see `ddp_hpc.base.options`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.option_names import naming
from ddp_hpc.base.options import Option, check_value, options_of, read_pair
from ddp_hpc.base.toml_config import TomlFile


def toml_options(path: Path, config: type[Any]) -> dict[str, Any]:
    """Returns the values of options in a TOML file, by name.

    Tables have the names of the components of the configuration; a key is the name of an option on the
    command line with underscores, such as `batch_size`.

    Raises:
        RequestError: the file cannot be read, or a key or a value is not valid; names the key.
    """
    file = TomlFile(path)
    by_key = {option.key: option for option in options_of(config)}
    components = {key[0] for key in by_key if len(key) > 1}
    values: dict[str, Any] = {}
    for key, value in _flat(file.document, components):
        if key not in by_key:
            name = ".".join(key)
            hint = nearest(name, [".".join(known) for known in by_key])
            raise file.error(f'unknown key "{name}"{hint}; --help lists the options')
        values[by_key[key].name] = _value(by_key[key], value, file)
    return values


def _flat(table: Mapping[str, Any], components: Collection[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and key in components:
            yield from (((key, *below), of_below) for below, of_below in _flat(value, ()))
        else:
            yield (key,), value


def _value(option: Option, value: Any, file: TomlFile) -> Any:
    key, read = option.key, option.read
    if read is None or read is read_pair:
        converted = file.value(value, str if option.choices else option.type, key)
        with _naming_file(file):
            check_value(option, converted)
        return converted
    if option.is_multiple:
        pairs = [f"{name}={part!r}" for name, part in value.items()] if isinstance(value, dict) else value
        texts = file.value(pairs, tuple[str, ...], key)
    else:
        texts = (file.value(",".join(map(str, value)) if isinstance(value, list) else value, str, key),)
    with _naming_file(file):
        read_values = tuple(read(".".join(key), text) for text in texts)
    return read_values if option.is_multiple else read_values[0]


@contextmanager
def _naming_file(file: TomlFile) -> Iterator[None]:
    """Adds the name of the file to an error, which names options as in the file."""
    try:
        with naming(str):
            yield
    except RequestError as error:
        raise file.error(str(error)) from None


def as_toml(config: Any) -> str:
    """Returns the configuration as text that `toml_options` can read, without options that have no value."""
    import tomli_w

    document: dict[str, Any] = {}
    for option in options_of(type(config)):
        value = option.value_in(config)
        if value is None:
            continue
        if option.is_multiple:
            value = dict(value)
        elif "show" in option.declared:
            value = option.declared["show"](value)
        elif isinstance(value, Path):
            value = str(value)
        *table, key = option.key
        (document.setdefault(table[0], {}) if table else document)[key] = value
    text: str = tomli_w.dumps(document)
    return text
