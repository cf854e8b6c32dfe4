"""Fixtures for the tests of the training."""

import pytest
import torch


@pytest.fixture
def no_gpu():
    """Where there is a GPU, asking for one is no mistake."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu covers what is expected then")
