"""Two captures side by side, and the sentence that says what changed."""

import pytest

from ddp_hpc.trace.capture import read_capture
from ddp_hpc.trace.compare import compare


@pytest.fixture(scope="module")
def loaders(tmp_path_factory, forks):
    """Captures of one loop: from memory, from HDF5 as the lesson reads it, from HDF5 as we do."""
    folder = tmp_path_factory.mktemp("loaders")
    job = forks.start(str(folder), cwd=folder, ranks=1, program="tests.trace.three_loaders")
    assert job.wait() == [0], job.words()
    return {name: read_capture(folder / name) for name in ("memory", "naive_hdf5", "our_hdf5")}


def _data_share(capture):
    return capture.mean.data_s / capture.mean.wall_s


def test_the_lessons_finding_is_reproduced_and_named(loaders):
    sentence = compare(loaders["memory"], loaders["naive_hdf5"])
    assert sentence.startswith("memory against naive_hdf5: a step takes ")
    assert "times faster): waiting for data takes " in sentence
    assert "% of the difference." in sentence
    backwards = compare(loaders["naive_hdf5"], loaders["memory"])
    assert "times slower): waiting for data takes " in backwards
    assert any("is waiting for data: see ddp-hpc bench io" in s for s in loaders["naive_hdf5"].findings)


def test_with_our_loader_it_is_gone(loaders):
    sentence = compare(loaders["our_hdf5"], loaders["naive_hdf5"])
    assert "times faster): waiting for data takes " in sentence
    assert _data_share(loaders["naive_hdf5"]) > 0.2
    assert loaders["our_hdf5"].mean.data_s < 0.2 * loaders["naive_hdf5"].mean.data_s
    assert loaders["our_hdf5"].mean.data_s <= loaders["memory"].mean.data_s
