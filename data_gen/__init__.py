"""Writes data files for training: synthetic data, scikit-learn's digits, and text.

    from data_gen import Recipe, generate
    result = generate(Recipe(num_samples=4096), Path("data/train.h5"))

Importing this package is cheap: the first use of a name imports NumPy and h5py if it needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_gen.recipe import Recipe, default_file_name
    from data_gen.synthetic import generate

__all__ = ["Recipe", "default_file_name", "generate"]

_MODULES = {"Recipe": "recipe", "default_file_name": "recipe", "generate": "synthetic"}


def __getattr__(name: str) -> object:
    """Imports a public name when it is used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
