"""The version of this package. This module imports nothing, so that any module can import it."""

__version__ = "0.2.0"
