"""Fixtures for the tests of the training."""

import pytest
import torch

from .tiny import DATA, EPOCHS, EVERY_STEP, make_data, make_home


@pytest.fixture
def no_gpu():
    """Where there is a GPU, asking for one is no mistake."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu covers what is expected then")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """The folder of the data of `tiny`."""
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path, tiny_data):
    """Where one test's runs are at home."""
    return make_home(tmp_path, tiny_data)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, tiny_data, forks):
    """The home of a run of 2 ranks that nothing happened to."""
    home = make_home(tmp_path_factory.mktemp("whole"), tiny_data)
    forks.run(*DATA, *EVERY_STEP, "--epochs", str(EPOCHS), cwd=home, ranks=2)
    return home
