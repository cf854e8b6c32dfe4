"""The locations of templates/, profiles/ and jobs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base import assets
from ddp_hpc.base.errors import DdpHpcError

PROJECT = '[project]\nname = "ddp-hpc"\n'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package directory without siblings."""
    folder = tmp_path / "checkout" / "ddp_hpc"
    folder.mkdir(parents=True)
    monkeypatch.setattr(assets, "_PACKAGE", folder)
    return folder


def test_the_directory_inside_an_installed_package_has_precedence(package: Path) -> None:
    (package / "_assets" / "templates").mkdir(parents=True)
    (package.parent / "templates").mkdir()
    (package.parent / "pyproject.toml").write_text(PROJECT)
    assert assets.asset_directory("templates") == package / "_assets" / "templates"


def test_in_a_checkout_the_directory_is_next_to_the_package(package: Path) -> None:
    (package.parent / "templates").mkdir()
    (package.parent / "pyproject.toml").write_text(PROJECT)
    assert assets.asset_directory("templates") == package.parent / "templates"


@pytest.mark.parametrize("project", [None, '[project]\nname = "another"\n'])
def test_a_directory_without_the_project_file_is_ignored(package: Path, project: str | None) -> None:
    (package.parent / "templates").mkdir()
    if project:
        (package.parent / "pyproject.toml").write_text(project)
    with pytest.raises(DdpHpcError, match="reinstall ddp-hpc"):
        assets.asset_directory("templates")
