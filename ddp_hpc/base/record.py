"""Frozen classes of keyword arguments, for classes that every start of `ddp-hpc` creates, and their types."""

from __future__ import annotations

import sys
from dataclasses import MISSING, FrozenInstanceError, dataclass, field
from functools import cache
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field,))
def record(cls: type[_T]) -> type[_T]:
    """Like `@dataclass(frozen=True, kw_only=True, eq=False, repr=False)`, but quicker to create.

    `dataclass` compiles the methods of each class, which took a tenth of the time of `ddp-hpc render`.
    """
    made: Any = dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
    made.__init__, made.__setattr__, made.__delattr__ = _init, _refuse, _refuse
    return made  # type: ignore[no-any-return]


def _init(self: Any, **given: Any) -> None:
    for name, declared in self.__dataclass_fields__.items():
        if name in given:
            value = given.pop(name)
        elif declared.default is not MISSING:
            value = declared.default
        elif declared.default_factory is not MISSING:
            value = declared.default_factory()
        else:
            raise TypeError(f"{type(self).__name__}() lacks the argument {name!r}")
        object.__setattr__(self, name, value)
    if given:
        raise TypeError(f"{type(self).__name__}() has no argument {next(iter(given))!r}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _refuse(_: Any, name: str, *__: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def type_hints(cls: type[Any]) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass in a module with `from __future__ import annotations`.

    Like `typing.get_type_hints`, but each text such as `tuple[str, ...]` is compiled only once per module.
    """
    return {
        name: _evaluated(text, base.__module__)
        for base in reversed(cls.__mro__)
        for name, text in vars(base).get("__annotations__", {}).items()
    }


@cache
def _evaluated(annotation: str, module: str) -> Any:
    return eval(annotation, vars(sys.modules[module]))  # noqa: S307 - an annotation of our own code
