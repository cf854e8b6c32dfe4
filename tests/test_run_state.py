"""The file `state`: Python writes it atomically, and Python and bash read it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import _STATES, Cause, State, Stop
from ddp_hpc.base.run_state import RunState, read_state, write_state

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "snapshots-and-requeue.md"


@pytest.mark.parametrize("state", State)
def test_python_and_bash_read_the_written_state(tmp_path: Path, state: State) -> None:
    word = RunState(state, 120, "rank 1 got SIGTERM; $(touch pwned) `x` \\ 'y' \u00fc")
    write_state(tmp_path, word)
    assert read_state(tmp_path) == word
    script = 'read -r state step reason <"$1/state"; printf "%s|%s|%s" "$state" "$step" "$reason"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"{state}|120|{word.reason}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("reason", "read"),
    [("", ""), ("  ", ""), ("two\nlines\r\nand\ta tab", "two lines and a tab"), ("done 9", "done 9")],
)
def test_a_reason_is_on_the_one_line_whatever_is_in_it(tmp_path: Path, reason: str, read: str) -> None:
    write_state(tmp_path, RunState(State.REQUEUE, 3, reason))
    assert (tmp_path / "state").read_text().count("\n") == 1
    assert read_state(tmp_path) == RunState(State.REQUEUE, 3, read)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"finished 3 x",
        b"done x",
        b"done -1",
        b"done " + b"9" * 5000,
        b"\xff\xfe",
    ],
    ids=range(6),
)
def test_an_invalid_state_file_is_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(DdpHpcError, match=f"{tmp_path}/state: ") as caught:
        read_state(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_old_state_is_kept_if_the_directory_is_not_writable(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    write_state(open_folder, RunState(State.RUNNING, 1, ""))
    open_folder.chmod(0o555)
    with as_nobody(), pytest.raises(DdpHpcError, match="cannot be written"):
        write_state(open_folder, RunState(State.DONE, 2, ""))
    open_folder.chmod(0o755)
    assert read_state(open_folder) == RunState(State.RUNNING, 1, "")


def test_an_attempt_ends_once_and_leaves_a_complete_run_complete() -> None:
    ends = tuple(state for state in State if state.is_final)
    assert all(State.RUNNING.may_become(later, in_same_attempt=True) for later in State)
    assert not [one for one in ends for later in State if one.may_become(later, in_same_attempt=True)]
    assert [one for one in State if not one.may_become(State.FAILED, in_same_attempt=False)] == [State.DONE]
    assert all(one.may_become(State.RUNNING, in_same_attempt=False) for one in State)


@pytest.mark.parametrize("state", State)
def test_every_state_has_a_row_that_fits_its_exit_code_and_a_cause(state: State) -> None:
    assert state in _STATES, f"add a row for {state!r} to _STATES in run_outcomes.py"
    row = _STATES[state]
    if row.ends_in == "failure":
        assert row.exit_code not in (0, 75), f"{state}: 0 and 75 are the exit codes of runs without a failure"
    else:
        expected = 75 if row.ends_in == "stop" else 0
        assert row.exit_code == expected, f"{state}: launchers take all exit codes but 0 and 75 for failures"
    ends = [cause for cause in Cause if cause.state_of_run(has_progressed=False) is state]
    # A failure can have a state that depends on earlier attempts, which the supervisor writes.
    assert ends or not state.is_final or state.is_failure, f"{state}: no cause leads to this state"
    assert {cause.exit_code for cause in ends} == {75} or not state.is_stopped


def test_the_documentation_has_the_row_of_each_state() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted((state, str(state.exit_code)) for state in State)


def test_the_documentation_has_the_row_of_each_cause() -> None:
    rows = re.findall(r"^\| ([a-z -]+) \| (\d+) \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(cause, str(cause.exit_code), _state_after(cause)) for cause in Cause]


def _state_after(cause: Cause) -> str:
    state, later = (cause.state_of_run(has_progressed=progressed) for progressed in (False, True))
    text = f"`{state}`" if state else "unchanged"
    return text if state == later else f"{text}, or `{later}` after a snapshot"


def test_each_failure_and_each_stop_has_an_advice() -> None:
    assert not [cause for cause in Cause if cause.is_failure and not cause.advice]
    assert Cause.STOPPED.advice == "submit the script again"


def test_the_line_about_a_stop_says_what_must_be_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(Cause.STOPPED, "why")
    assert stop.line("State saved") == "Stopping: why. State saved; run the same command again to resume."
    row = _STATES[State.REQUEUE]._replace(resumed_by="user", before_resuming="remove it")
    monkeypatch.setitem(_STATES, State.REQUEUE, row)
    end = "Saved; remove it, then run the same command again to resume."
    assert stop.line("Saved", " at step 3") == f"Stopping at step 3: why. {end}"
    assert Cause.STOPPED.advice == "remove it, then submit the script again"
