"""Fixtures for the tests of the benchmarks."""

from tests.training.conftest import forks, no_gpu

__all__ = ["forks", "no_gpu"]
