"""The fixture `cluster`, and the skipping of tests marked `slurm` on machines that cannot run a cluster."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from .cluster import Cluster, what_is_missing

REQUIRE = "DDP_HPC_REQUIRE_SLURM"
_the_cluster = pytest.StashKey[Cluster]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # pytest reports all skips in one line if they have the same source line and text.
    if item.get_closest_marker("slurm") and (reason := what_is_missing()):
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of two nodes for the whole session. At the start of each test it has no jobs."""
    with Cluster() as cluster:
        request.config.stash[_the_cluster] = cluster
        yield cluster
        del request.config.stash[_the_cluster]


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if cluster := _cluster_of(request.node):
        cluster.cancel_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (cluster := _cluster_of(item)):
        report.sections.append(("the Slurm daemons' logs", cluster.log_tails()))
    return report


def _cluster_of(item: pytest.Item) -> Cluster | None:
    """Returns the cluster that a test uses, if it is running."""
    uses_it = "cluster" in getattr(item, "fixturenames", ())
    return item.config.stash.get(_the_cluster, None) if uses_it else None
