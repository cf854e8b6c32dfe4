"""Fixtures for the tests of the benchmarks."""

from tests.training.conftest import no_gpu

__all__ = ["no_gpu"]
