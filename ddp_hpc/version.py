"""The version of this package, in one place. It imports nothing, so that any module may read it."""

__version__ = "0.2.0"
