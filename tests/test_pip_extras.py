"""The pip commands in messages about missing packages."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ddp_hpc.base import pip_extras
from tests.conftest import PROJECT, clean_environ

EXTRAS = ("train", "mpi", "mpich", "digits", "report", "tensorboard")


def names(command: str) -> set[str]:
    """The packages that the shell passes to pip."""
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    return {Requirement(word).name for word in words[2:]}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_names_the_packages_of_the_extra_and_not_ddp_hpc(extra: str) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(one).name for one in project["optional-dependencies"][extra]}
    assert names(pip_extras.install_command(extra)) == wanted
    assert "ddp-hpc" not in wanted


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_installed_package_reads_the_same_from_its_metadata(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_checkout = names(pip_extras.install_command(extra))
    monkeypatch.setattr(pip_extras, "_CHECKOUT", tmp_path)
    assert names(pip_extras.install_command(extra)) == in_checkout


def test_a_copy_without_metadata_refers_to_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pip_extras, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "requires", missing)
    assert pip_extras.install_command("train") == "pip install '.[train]' in the checkout of ddp-hpc"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--max-steps", "1"],
        ["export", "snapshots", "model.pt"],
        ["sample", "snapshots"],
        ["bench", "io"],
        ["bench", "comm"],
    ],
)
def test_commands_that_need_torch_print_the_pip_command_in_a_base_installation(
    words: list[str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for package in ("click", "jinja2", "markupsafe"):
        [origin] = find_spec(package).submodule_search_locations
        (base / package).symlink_to(origin)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ddp_hpc", *words],
        env=clean_environ({"PYTHONPATH": f"{PROJECT}:{base}"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    name = " ".join(word for word in words if word in ("bench", "io", "comm", words[0]))
    command = pip_extras.install_command("train")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].removeprefix("[rank 0/1] ") == (
        f"error: ddp-hpc {name} requires torch, which is not installed; run {command}"
    )
