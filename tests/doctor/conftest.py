"""Fixtures for the tests of doctor."""

from __future__ import annotations

import pytest

from ddp_hpc.doctor.check_result import Here


@pytest.fixture
def login() -> Here:
    """A login node with an empty environment."""
    return Here({})
