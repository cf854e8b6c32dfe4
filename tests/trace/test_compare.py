"""The comparison of two captures in one sentence."""

import pytest

from ddp_hpc.trace.capture import read_capture
from ddp_hpc.trace.compare import compare


@pytest.fixture(scope="module")
def loaders(tmp_path_factory, forks):
    """Captures of one loop with data from memory and from HDF5 as in the lesson."""
    directory = tmp_path_factory.mktemp("loaders")
    job = forks.start(str(directory), cwd=directory, ranks=1, program="tests.trace.three_loaders")
    assert job.wait() == [0], job.words()
    return {name: read_capture(directory / name) for name in ("memory", "naive_hdf5")}


def test_the_finding_of_the_lesson_is_reproduced(loaders):
    sentence = compare(loaders["memory"], loaders["naive_hdf5"])
    assert sentence.startswith("memory compared with naive_hdf5: a step takes ")
    assert "times faster): waiting for data takes " in sentence
    assert "% of the difference." in sentence
    backwards = compare(loaders["naive_hdf5"], loaders["memory"])
    assert "times slower): waiting for data takes " in backwards
    assert any(
        "Measure other file formats with ddp-hpc bench io" in s for s in loaders["naive_hdf5"].findings
    )
