"""The fixtures `cluster` and `accounting_cluster`, and the skipping of tests marked `slurm` on machines that
cannot run a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from .cluster import Cluster, Settings, what_is_missing
from .requirements import what_is_missing_for_accounting

REQUIRE = "DDP_HPC_REQUIRE_SLURM"
_clusters = {"cluster": pytest.StashKey[Cluster](), "accounting_cluster": pytest.StashKey[Cluster]()}


def pytest_runtest_setup(item: pytest.Item) -> None:
    # pytest reports all skips in one line if they have the same source line and text.
    marker = item.get_closest_marker("slurm")
    if marker is None:
        return
    reason = what_is_missing_for_accounting() if marker.kwargs.get("accounting") else what_is_missing()
    if reason:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of two nodes for the whole session. At the start of each test it has no jobs."""
    yield from _run(request, "cluster", Settings())


@pytest.fixture(scope="session")
def accounting_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with accounting for the whole session, whose controller soon forgets jobs that have ended.

    Tests that use it are marked with `pytest.mark.slurm(accounting=True)`.
    """
    settings = Settings(accounting=True)
    yield from _run(request, "accounting_cluster", settings)


def _run(request: pytest.FixtureRequest, name: str, settings: Settings) -> Iterator[Cluster]:
    with Cluster(settings) as cluster:
        request.config.stash[_clusters[name]] = cluster
        yield cluster
        del request.config.stash[_clusters[name]]


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if cluster := _running(request.node, "cluster"):
        cluster.cancel_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for cluster in filter(None, (_running(item, name) for name in _clusters)):
            report.sections.append(("the Slurm daemons' logs", cluster.log_tails()))
    return report


def _running(item: pytest.Item, name: str) -> Cluster | None:
    """Returns the cluster of this fixture if the test uses it and it is running."""
    uses_it = name in getattr(item, "fixturenames", ())
    return item.config.stash.get(_clusters[name], None) if uses_it else None
