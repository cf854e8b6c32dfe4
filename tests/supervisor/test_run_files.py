"""The control files in the run directory: who may write them, and what is read from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.supervisor.run_files import RunFiles


@pytest.mark.parametrize("name", ["state", "attempts", "cancelled", "end", "job.sh"])
@pytest.mark.parametrize("how", [0o666, 0o664, "another user's", "a link"])
def test_a_file_that_other_users_can_write_is_refused(tmp_path: Path, name: str, how: int | str) -> None:
    path = tmp_path / name
    path.write_text("1 7 0 1000\n")
    path.chmod(0o644)
    RunFiles(tmp_path).check()
    if isinstance(how, int):
        path.chmod(how)
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif os.geteuid():
        pytest.skip("only root can give a file to another user")
    else:
        os.chown(path, 12345, -1)
    with pytest.raises(RequestError, match=f"^{path} is not a regular file, belongs to another user, or is"):
        RunFiles(tmp_path).check()


@pytest.mark.parametrize("line", ["x[$(touch canary)] 7 0 0", "1 7", "08 7 0 1", "1 7 0 1 more"])
def test_a_malformed_attempts_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "attempts").write_text(f"1 6 0 1000\n{line}\n")
    with pytest.raises(DdpHpcError, match="must have the format ATTEMPT JOBID STEP UNIX_S; remove the file"):
        RunFiles(tmp_path).last_attempt()


def test_a_damaged_state_counts_as_no_state(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("state of my own\n")
    state = RunFiles(tmp_path).state()
    assert (state.state, state.step) == (None, 0)
    assert state.stamp is not None
