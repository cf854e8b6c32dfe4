"""How messages name an option: `--batch-size` on the command line, `batch_size` in Python, its key in TOML.

Code that reports an error does not know how the value was given. It names the option as in the configuration,
and `named` returns the name that the user knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddp_hpc.base.errors import RequestError


def on_command_line(option: str) -> str:
    """Returns the name of an option on the command line, such as `--batch-size`."""
    return f"--{option.replace('_', '-')}"


# One per process, as its other threads report errors too.
_name_of: Callable[[str], str] = on_command_line


def named(option: str) -> str:
    """Returns how the user of this process names an option; `option` is its name in `to_options`."""
    return _name_of(option)


@contextmanager
def naming(name_of: Callable[[str], str]) -> Iterator[None]:
    """In the `with` block, messages of all threads name options as `name_of` returns them."""
    global _name_of
    before, _name_of = _name_of, name_of
    try:
        yield
    finally:
        _name_of = before


class OptionError(RequestError):
    """The value of an option is invalid.

    The message is the name of the option, the value, the reason and the remedy. After a reason that states
    what the value must be, the message shows the value in parentheses.
    """

    def __init__(self, option: str, value: object, reason: str, remedy: str = "") -> None:
        self.option, self.value, self.reason, self.remedy = option, value, reason, remedy
        said = f"{reason} (got {value})" if reason.startswith("must ") else f"{value} {reason}"
        if remedy:
            said += f". {remedy}"
        super().__init__(f"{named(option)} {said}")
