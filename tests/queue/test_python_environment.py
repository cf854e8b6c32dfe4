"""Which Python environment `ddp-hpc submit` names for the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.queue.conftest import Programs, Run

REQUEST = ["--profile", "generic_slurm", "--walltime", "00:10:00", "--ranks-per-node", "1", "--dry-run"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment to which this ddp-hpc seems to belong."""
    folder = tmp_path / "env"
    folder.mkdir()
    monkeypatch.setattr(sys, "prefix", str(folder))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_script_of_submit_is_that_of_render_with_the_option_in_its_header(
    work: Path, programs: Programs, run: Run, environment: Path
) -> None:
    script = run("submit", *REQUEST).out
    assert f" --python-env {environment}\n" in script
    assert script == run("render", *REQUEST[:-1], "--python-env", str(environment)).out
    assert str(environment) not in run("render", *REQUEST[:-1]).out


def test_the_users_choice_is_kept(work: Path, programs: Programs, run: Run, environment: Path) -> None:
    assert "--python-env" not in run("submit", *REQUEST, "--conda-env", "mine").out


def test_ddp_hpc_in_the_environment_of_the_directory_comes_before_one_that_is_not_active(
    work: Path, programs: Programs, run: Run, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / ".venv" / "bin").mkdir(parents=True)
    assert f" --python-env {environment}\n" in run("submit", *REQUEST).out, ".venv lacks ddp-hpc"
    (work / ".venv" / "bin" / "ddp-hpc").touch()
    assert "--python-env" not in run("submit", *REQUEST).out
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    done = run("submit", *REQUEST)
    assert f" --python-env {environment}\n" in done.out
    assert "note:" not in done.err
    monkeypatch.setattr(sys, "prefix", str(work / ".venv"))
    assert f" --python-env {work}/.venv\n" in run("submit", *REQUEST).out, "another one is active"
    monkeypatch.setenv("VIRTUAL_ENV", str(work / ".venv"))
    assert "--python-env" not in run("submit", *REQUEST).out


def test_the_note_names_the_active_environment_that_is_not_used(
    work: Path, programs: Programs, run: Run, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda/envs/mine")
    assert (
        f"note: ddp-hpc is installed in {environment}, not in the active environment /opt/conda/envs/mine, "
        f"so the job runs {environment}/bin/python; "
    ) in run("submit", *REQUEST).err


@pytest.mark.parametrize("path", ["relative", "/with:colon"])
def test_an_environment_that_cannot_be_first_on_the_path_is_refused(
    work: Path, programs: Programs, run: Run, path: str
) -> None:
    done = run("render", "--profile", "local", "--python-env", path)
    assert (done.code, done.out) == (2, "")
    assert "is not the absolute path of a directory" in done.err
