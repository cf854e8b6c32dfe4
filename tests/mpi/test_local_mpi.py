"""The choice of mpiexec for `make train`: the site's if mpi4py works with it, otherwise the wheel's."""

import os
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery import local_mpi
from tests.conftest import Ended, Launch, clean_environ

from .conftest import OPENMPI_SETTINGS

SAYS_SIZE = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Local:
    """Runs `python -m ddp_hpc.discovery.local_mpi` with a site's directory first on the PATH."""

    def __init__(self, launch: Launch, site: Path) -> None:
        self._launch, self.site = launch, site

    def __call__(self, *words: str | Path, **env: str) -> Ended:
        path = f"{self.site}:{clean_environ()['PATH']}"
        return self._launch(
            [sys.executable, "-m", "ddp_hpc.discovery.local_mpi", *words], env={"PATH": path, **env}
        )


@pytest.fixture
def local(launch: Launch, tmp_path: Path) -> Local:
    return Local(launch, tmp_path / "site" / "bin")


@pytest.fixture
def size_of_two() -> list[str]:
    return ["--", "-n", "2", sys.executable, "-c", SAYS_SIZE]


def test_without_a_site_mpiexec_the_wheels_is_used(
    local: Local, mpiexec: Path, size_of_two: list[str]
) -> None:
    ended = local(*size_of_two)
    assert ended.stderr == f"mpiexec: {mpiexec} (from the mpich wheel)\n"
    assert ended.stdout == "2\n2\n"


def test_a_site_mpiexec_is_used_if_its_ranks_share_a_world(
    local: Local, mpiexec: Path, size_of_two: list[str]
) -> None:
    site = program(local.site / "mpiexec", f'exec {mpiexec} "$@"')
    ended = local(*size_of_two)
    assert f"mpiexec: {site} (found on the PATH; works with mpi4py)" in ended.stderr
    assert ended.stdout == "2\n2\n"


@pytest.mark.parametrize(
    "text",
    ["exit 1", "exit 0", "kill -9 $$", 'shift 2; "$@" && "$@"'],
    ids=["fails", "does nothing", "dies", "starts singletons"],
)
def test_a_site_mpiexec_without_a_common_world_is_skipped(
    local: Local, mpiexec: Path, size_of_two: list[str], text: str
) -> None:
    site = program(local.site / "mpiexec", text)
    ended = local(*size_of_two)
    assert f"{site} does not work with mpi4py; using the mpiexec of the mpich wheel" in ended.stderr
    assert f"mpiexec: {mpiexec} (from the mpich wheel)" in ended.stderr
    assert ended.stdout == "2\n2\n"


def test_pbs_own_mpiexec_is_skipped(local: Local, mpiexec: Path, size_of_two: list[str]) -> None:
    # Outside of a job PBS's mpiexec runs the next one on the PATH.
    version = '[ "$1" = --version ] && echo pbs_version = 1'
    pbs = program(local.site / "mpiexec", f'{version} || exec {mpiexec} "$@"')
    ended = local(*size_of_two)
    assert ended.stderr == f"mpiexec: {mpiexec} (from the mpich wheel)\n"
    assert ended.stdout == "2\n2\n"
    named = local(pbs, *size_of_two)
    assert (named.exit_code, "is PBS's own mpiexec" in named.stderr) == (2, True)


def test_a_file_that_cannot_be_executed_does_not_work_as_mpiexec(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    assert not local_mpi.works_with_mpi4py(broken, clean_environ())


def test_a_hanging_mpiexec_is_killed_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_mpi, "TRIAL_S", 0.5)
    hangs = program(tmp_path / "mpiexec", f"sleep 600 & echo $! >{tmp_path}/pid; wait")
    start = time.monotonic()
    assert not local_mpi.works_with_mpi4py(hangs, clean_environ())
    assert time.monotonic() - start < 5
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    end = time.monotonic() + 10
    # On a busy machine a killed process takes a moment to end, and its new parent may not have reaped it yet.
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the hanging rank is still there"
        time.sleep(0.05)


def test_open_mpis_mpiexec_on_the_path_is_used_with_its_library(
    local: Local, openmpi_mpiexec: Path, size_of_two: list[str]
) -> None:
    ended = local(
        *size_of_two, PATH=f"{openmpi_mpiexec.parent}:{clean_environ()['PATH']}", **OPENMPI_SETTINGS
    )
    assert f"mpiexec: {openmpi_mpiexec} (found on the PATH" in ended.stderr
    assert ended.stdout == "2\n2\n"


def test_an_mpiexec_specified_by_the_user_is_used_without_a_trial(local: Local, tmp_path: Path) -> None:
    mine = program(tmp_path / "my mpiexec", 'echo "mine: $*"')
    ended = local(mine, "--", "-n", "3", "program")
    assert ended.stderr == f"mpiexec: {mine} (as specified)\n"
    assert ended.stdout == "mine: -n 3 program\n"


def test_an_mpiexec_name_is_searched_on_the_path(local: Local) -> None:
    mine = program(local.site / "mpiexec.site", "echo found")
    assert local("mpiexec.site", "--", "-n", "3").stderr == f"mpiexec: {mine} (as specified)\n"


@pytest.mark.parametrize("kind", ["missing", "no program", "a directory"])
def test_a_specified_file_that_is_not_executable_is_refused(local: Local, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "no program":
        path.write_text("text")
    elif kind == "a directory":
        path.mkdir()
    ended = local(path, "--", "-n", "2", "true")
    assert (
        ended.stderr
        == f"error: {path} is not an executable program; specify an mpiexec: make MPIEXEC=/path/to/mpiexec\n"
    )
    assert ended.exit_code == 2


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["mpiexec", "x", "--"]])
def test_wrong_arguments_print_the_usage(local: Local, words: list[str]) -> None:
    ended = local(*words)
    assert ended.stderr.startswith("usage: python -m ddp_hpc.discovery.local_mpi [MPIEXEC] -- ")
    assert ended.exit_code == 2


def test_the_exit_code_is_that_of_the_program(local: Local) -> None:
    assert local("--", "-n", "2", "sh", "-c", "exit 75").exit_code == 75


def test_without_any_mpiexec_the_error_contains_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_mpi, "bundled_mpiexec", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"or in this environment; pip install .*mpich"):
        local_mpi.choose_mpiexec(None)


def test_the_environment_is_changed_only_for_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = program(tmp_path / "bin" / "mpiexec", "true")
    library = tmp_path / "lib" / "libmpi.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    assert local_mpi.choose_mpiexec(str(mine))[1]["MPI4PY_LIBMPI"] == str(library)
    assert "MPI4PY_LIBMPI" not in os.environ
    monkeypatch.setenv("MPI4PY_LIBMPI", "/the/users/own.so")
    assert local_mpi.choose_mpiexec(str(mine))[1]["MPI4PY_LIBMPI"] == "/the/users/own.so"
