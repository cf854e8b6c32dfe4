"""What the doctor's tests share."""

from __future__ import annotations

import pytest

from ddp_hpc.doctor.result import Here


@pytest.fixture
def login() -> Here:
    """A login node with an empty environment."""
    return Here({})
