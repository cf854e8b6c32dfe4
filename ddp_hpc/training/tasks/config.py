"""The options of the model."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.options import check_values, option

MODELS = ("transformer", "classifier", "linear", "decoder")


def read_model_option(_: str, text: str) -> tuple[str, Any]:
    """Parses `layers=6` into a name and a value: a Python literal, otherwise the text.

    Raises:
        RequestError: the name is missing.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise RequestError(f"--model-option {text}: expected NAME=VALUE, such as layers=6")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The options that select the model to train.

    Raises:
        RequestError: the model does not exist, or a value is out of range.
    """

    name: str = option(
        "transformer",
        "Model to train: transformer, classifier, linear, decoder, or your own model as "
        "package.module:factory; see docs/how-to/own-model.md.",
        flag="--model",
    )
    options: tuple[tuple[str, Any], ...] = option(
        (),
        "Argument for the function that creates the model, such as layers=6; may be repeated.",
        flag="--model-option",
        name="model_options",
        read=read_model_option,
        metavar="NAME=VALUE",
        multiple=True,
        changes_losses=True,
    )
    dropout: float = option(
        0.1, "Dropout probability of the model.", at_least=0, below=1, changes_losses=True
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.name not in MODELS and not self.is_own:
            raise RequestError(
                f"--model {self.name}: unknown model{nearest(self.name, MODELS)}. Use one of "
                f"{', '.join(MODELS)}, or package.module:factory for your own model."
            )

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's own, named as package.module:factory."""
        return ":" in self.name
