"""What an error means for the run: the cause of its end, the exit code and the message."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import DataError, DdpHpcError, RendezvousError, RequestError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.training.process_group import errors_of_torch
from ddp_hpc.training.process_group.errors_of_torch import KnownError
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.run.verdict import verdict

WORKER = "DataLoader worker (pid 7) is killed by signal: {}. \nAnd more."


@pytest.mark.parametrize(
    ("error", "cause", "exit_code", "words"),
    [
        (DataError("no such file"), Cause.REFUSED, 2, "no such file"),
        (DdpHpcError("the disk is full"), Cause.FAILED, 1, "the disk is full"),
        (RendezvousError("rank 3 is gone"), Cause.LOST_RANK, 1, "rank 3 is gone"),
        (ValueError("odd"), Cause.FAILED, 1, "ValueError: odd"),
        (RuntimeError(WORKER.format("Killed")), Cause.FAILED, 1, "DataLoader worker (pid 7)"),
        (RuntimeError(WORKER.format("Terminated")), Cause.SIGNALLED, 143, "stopped by SIGTERM"),
        (MemoryError(), Cause.OUT_OF_MEMORY, 78, "MemoryError; lower --batch-size"),
        (SystemExit(143), Cause.SIGNALLED, 143, "stopped by SIGTERM (scancel, qdel, "),
        (SystemExit(3), Cause.FAILED, 3, "a rank called sys.exit with exit code 3"),
        (SystemExit(2), Cause.REFUSED, 2, "a rank called sys.exit with exit code 2"),
        (SystemExit("no data"), Cause.FAILED, 1, "no data"),
        (KeyboardInterrupt(), Cause.INTERRUPTED, 130, "interrupted"),
    ],
)
def test_the_verdict_on_an_error(error: BaseException, cause: Cause, exit_code: int, words: str) -> None:
    found = verdict(error, Parts(), 1.0)
    assert (found.cause, found.exit_code) == (cause, exit_code)
    assert found.text.startswith(words)
    assert "\n" not in found.text


def test_only_an_unexpected_exception_has_a_traceback() -> None:
    assert verdict(ValueError("odd"), Parts(), 1.0).traceback_text
    assert not verdict(DdpHpcError("the disk is full"), Parts(), 1.0).traceback_text
    assert not verdict(RuntimeError(WORKER.format("Killed")), Parts(), 1.0).traceback_text


def test_a_script_gets_its_own_traceback_as_the_message() -> None:
    found = verdict(ValueError("odd"), Parts(in_script=True), 1.0)
    assert found.text.splitlines()[-1] == "ValueError: odd"
    assert not found.traceback_text


@pytest.mark.parametrize("in_script", [False, True])
def test_an_error_with_a_known_cause_ends_with_its_advice(
    monkeypatch: pytest.MonkeyPatch, in_script: bool
) -> None:
    row = KnownError(Cause.HANG, types=("MemoryError",))
    monkeypatch.setattr(errors_of_torch, "KNOWN_ERRORS", (row,))
    request = RequestError("the factory raised MemoryError")
    request.__context__ = MemoryError()
    for error in (MemoryError(), request):
        found = verdict(error, Parts(in_script=in_script), 1.0)
        assert found.cause is Cause.HANG
        assert found.text.endswith(f"MemoryError; {Cause.HANG.advice}")
