"""The mpiexec for ranks on this machine: the site's if mpi4py works with it, otherwise the wheel's."""

import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery import local_mpi
from ddp_hpc.discovery.local_mpi import Trial, choose_mpiexec, try_two_ranks, with_library_of
from tests.conftest import clean_environ


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's mpiexec, which does not exist yet."""
    return tmp_path / "site" / "bin" / "mpiexec"


def chosen(site: Path) -> Path:
    """The mpiexec that is chosen if the site's directory is the first one on the PATH."""
    path = f"{site.parent}:{clean_environ()['PATH']}"
    return choose_mpiexec(clean_environ({"PATH": path}))[0]


def test_without_a_site_mpiexec_the_wheels_is_used(mpiexec: Path, site: Path) -> None:
    assert chosen(site) == mpiexec


def test_a_site_mpiexec_is_used_if_its_ranks_share_a_world(mpiexec: Path, site: Path) -> None:
    assert chosen(program(site, f'exec {mpiexec} "$@"')) == site


@pytest.mark.parametrize("text", ["exit 0", 'shift 2; "$@" && "$@"'], ids=["does nothing", "singletons"])
def test_a_site_mpiexec_without_a_common_world_is_skipped(
    mpiexec: Path, site: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(program(site, text)) == mpiexec
    assert (
        f"{site} does not work with mpi4py; using the mpiexec of the mpich wheel" in capsys.readouterr().err
    )


def test_pbs_own_mpiexec_is_skipped(mpiexec: Path, site: Path) -> None:
    # Outside of a job PBS's mpiexec runs the next one on the PATH.
    version = '[ "$1" = --version ] && echo pbs_version = 1'
    assert chosen(program(site, f'{version} || exec {mpiexec} "$@"')) == mpiexec


def test_a_file_that_cannot_be_executed_does_not_work_as_mpiexec(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    assert try_two_ranks(broken, clean_environ()) is Trial.FAILED


def test_a_hanging_mpiexec_is_killed_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_mpi, "TRIAL_S", 0.5)
    hangs = program(tmp_path / "mpiexec", f"sleep 600 & echo $! >{tmp_path}/pid; wait")
    assert try_two_ranks(hangs, clean_environ()) is Trial.TOO_SLOW
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    end = time.monotonic() + 10
    # On a busy machine a killed process takes a moment to end, and its new parent may not have reaped it yet.
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the hanging rank is still there"
        time.sleep(0.05)


def test_without_any_mpiexec_the_error_contains_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_mpi, "bundled_mpiexec", lambda: None)
    with pytest.raises(RequestError, match=r"or in this environment; pip install '.\[mpich\]'"):
        choose_mpiexec({"PATH": str(tmp_path)})


def test_mpi4py_loads_the_library_of_the_mpiexec(tmp_path: Path) -> None:
    mine = program(tmp_path / "bin" / "mpiexec", "true")
    library = tmp_path / "lib" / "libmpi.so"
    library.parent.mkdir()
    library.touch()
    assert with_library_of(mine, {"A": "1"}) == {"A": "1", "MPI4PY_LIBMPI": str(library)}
    own = {"MPI4PY_LIBMPI": "/the/users/own.so"}
    assert with_library_of(mine, own) == own
