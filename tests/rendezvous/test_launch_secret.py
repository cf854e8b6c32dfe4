"""The key of a job in files that only the user can read."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.rendezvous import launch_secret
from ddp_hpc.rendezvous.launch_secret import new_secret, read_secret, shared_secret, write_secret


def test_all_ranks_get_the_same_key_in_any_order(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(
            pool.map(lambda _: shared_secret({"DDP_HPC_KEY_DIR": str(tmp_path)}, "slurm-1.0.0"), range(64))
        )
    assert len(set(found)) == 1
    assert found[0][1] == ""
    assert len(found[0][0]) == 32


def test_only_the_user_can_read_the_key_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        shared_secret({"DDP_HPC_KEY_DIR": str(tmp_path / "a" / "keys")}, "x")
    finally:
        os.umask(before)
    (path,) = (tmp_path / "a" / "keys").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_run_directory_comes_before_the_home_directory(tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    shared_secret({"DDP_HPC_RUN_DIR": str(run), "HOME": str(home)}, "x")
    assert len(list((run / f".keys-{os.geteuid()}").iterdir())) == 1
    assert not home.exists()
    shared_secret({"HOME": str(home)}, "x")
    assert len(list((home / ".local/state/ddp-hpc/keys").iterdir())) == 1


def test_a_directory_that_others_can_write_to_is_skipped(tmp_path: Path) -> None:
    """Another user could have put a key there."""
    run, home = tmp_path / "run", tmp_path / "home"
    keys = run / f".keys-{os.geteuid()}"
    keys.mkdir(parents=True)
    keys.chmod(0o777)
    _, note = shared_secret({"DDP_HPC_RUN_DIR": str(run), "HOME": str(home)}, "x")
    assert note == ""
    assert list(keys.iterdir()) == []
    assert list((home / ".local/state/ddp-hpc/keys").iterdir())


def test_without_a_usable_directory_a_note_explains_the_solution(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keys = {shared_secret({"HOME": str(tmp_path / "file")}, "x") for _ in range(2)}
    ((key, note),) = keys
    assert len(key) == 32
    assert "this job has no secret key" in note
    assert str(tmp_path / "file") in note
    assert "DDP_HPC_KEY_DIR" in note


def test_the_users_key_file_is_used(tmp_path: Path) -> None:
    key = new_secret()
    write_secret(tmp_path / "key", key)
    assert shared_secret({"DDP_HPC_KEY_FILE": str(tmp_path / "key")}, "x") == (key, "")


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_key_file_that_others_can_read_or_replace_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_secret(path, new_secret())
    path.chmod(mode)
    with pytest.raises(
        LaunchError, match=rf"must belong to the user .* mode 0600, but it has mode {mode:04o} "
    ):
        read_secret(path)


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_secret(path, new_secret())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LaunchError, match=f"belongs to user {owner}; remove it"):
        read_secret(path)


@pytest.mark.parametrize("text", ["", "g" * 64, "0" * 66])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(LaunchError, match="does not contain a key of 64 hexadecimal digits; remove the file"):
        read_secret(path)


@pytest.mark.parametrize("name", ["missing", "link"])
def test_a_key_file_that_is_missing_or_a_link_is_refused(tmp_path: Path, name: str) -> None:
    write_secret(tmp_path / "key", new_secret())
    (tmp_path / "link").symlink_to(tmp_path / "key")
    with pytest.raises(LaunchError, match="the job's key cannot be read"):
        read_secret(tmp_path / name)


def test_a_rank_waits_for_a_key_that_another_rank_is_writing(tmp_path: Path) -> None:
    environ = {"DDP_HPC_KEY_DIR": str(tmp_path)}
    key, _ = shared_secret(environ, "x")
    (path,) = tmp_path.iterdir()
    path.write_text("")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(shared_secret, environ, "x")
        time.sleep(0.3)
        path.write_text(key.hex())
        assert found.result(5) == (key, "")


def test_waiting_for_a_key_ends_if_its_writer_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_secret, "_WRITING_S", 0.2)
    environ = {"DDP_HPC_KEY_DIR": str(tmp_path)}
    shared_secret(environ, "x")
    (path,) = tmp_path.iterdir()
    path.write_text("")
    assert "does not contain a key" in shared_secret(environ, "x")[1]


def test_keys_of_old_jobs_are_removed(tmp_path: Path) -> None:
    environ = {"DDP_HPC_KEY_DIR": str(tmp_path)}
    shared_secret(environ, "old")
    (old,) = tmp_path.iterdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    shared_secret(environ, "new")
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == 1
