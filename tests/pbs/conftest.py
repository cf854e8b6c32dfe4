"""A PBS machine per test. All its jobs are ended after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.site import Site, install

MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[MakeSite]:
    """Creates machines with the given settings."""
    made: list[Site] = []

    def make(**settings: Any) -> Site:
        root = tmp_path / f"pbs{len(made)}"
        made.append(install(root, **settings))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    """A machine with the defaults of OpenPBS: one core per chunk."""
    return make_site()


@pytest.fixture
def alcf(make_site: MakeSite) -> Site:
    """A machine with whole nodes, as those of ALCF."""
    return make_site(default_chunk_ncpus=64)
