"""Which errors of torch and of the operating system have a known cause."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from ddp_hpc.base.errors import DataError, DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.training.process_group import errors_of_torch
from ddp_hpc.training.process_group.errors_of_torch import (
    OTHER_ERROR,
    KnownError,
    explain_lost_contact,
    known_cause,
    known_error,
)

LIBRARIES = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_*.so"))
GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\nframe #0"
REMOTE = "NCCL error in: x.cpp:1, remote process exited or there was a network error\nLast error:\npeer n2"
OWN = "NCCL error in: x.cpp:1, invalid usage\nLast error:\nDuplicate GPU"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(GLOO), Cause.LOST_RANK),
        (dist.DistBackendError(REMOTE), Cause.LOST_RANK),
        (dist.DistNetworkError("The client socket has timed out"), Cause.LOST_RANK),
        (dist.DistStoreError("wait timeout after 300000ms"), Cause.LOST_RANK),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), Cause.FAILED),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "), Cause.SIGNALLED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Cause.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), Cause.OUT_OF_MEMORY),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        # not caused by another process
        (dist.DistBackendError(OWN), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("gloo: connection closed by peer"), None),
        (TimeoutError("timed out"), None),
    ],
)
def test_an_error_shows_its_cause_by_its_type_or_its_message(error: Exception, cause: Cause | None) -> None:
    row = known_error(error)
    assert (None if row is OTHER_ERROR else row.cause) is cause


def test_the_allocator_of_the_host_raises_an_error_with_a_known_cause() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert known_cause(caught.value) is Cause.OUT_OF_MEMORY


def test_a_damaged_file_is_not_a_lack_of_memory() -> None:
    damaged = DataError("data.h5 is not a valid HDF5 file")
    damaged.__context__ = MemoryError()
    assert known_cause(damaged) is None


@pytest.fixture
def new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for errors that torch raises, with a cause that is not vague."""
    row = KnownError(Cause.HANG, types=("MemoryError",))
    monkeypatch.setattr(errors_of_torch, "KNOWN_ERRORS", (row, *errors_of_torch.KNOWN_ERRORS))


@pytest.mark.usefixtures("new_row")
def test_the_cause_of_an_error_is_known_through_wrappers_that_hide_it() -> None:
    def wrapped(inner: Exception, outer: Exception, *, hides: bool) -> Exception:
        try:
            try:
                raise inner
            except Exception as error:
                raise outer from (None if hides else error)
        except Exception as error:
            return error

    hidden = wrapped(MemoryError(), RequestError("the factory raised it"), hides=True)
    assert known_cause(hidden) is Cause.HANG
    assert known_cause(wrapped(hidden, DdpHpcError("failed"), hides=False)) is Cause.HANG
    assert known_cause(RequestError("no such file")) is None
    # A lost rank says less than the error of this package that was raised for it.
    assert known_cause(wrapped(RuntimeError(GLOO), DdpHpcError("not saved"), hides=True)) is None
    circle = ValueError()
    circle.__cause__ = KeyError()
    circle.__cause__.__cause__ = circle
    assert known_cause(circle) is None


def test_lost_contact_is_one_line_with_the_last_error_of_nccl() -> None:
    assert "frame" not in explain_lost_contact(RuntimeError(GLOO), 30.0)
    assert "Last error: peer n2" in explain_lost_contact(dist.DistBackendError(REMOTE), 30.0)


def test_the_types_exist_in_the_installed_torch() -> None:
    of_ranks = [row for row in errors_of_torch.KNOWN_ERRORS if row.cause is Cause.LOST_RANK]
    names = [name for row in of_ranks for name in row.types]
    assert names
    assert all(hasattr(dist, name) for name in names)


@pytest.mark.parametrize(
    "words",
    # The last word of "is killed by signal: Terminated" is inserted by torch, and NCCL is not in every torch.
    [b"is killed by signal: ", b"exited unexpectedly", b"Connection closed by peer", b"imed out", b"timeout"],
)
def test_the_messages_exist_in_the_installed_torch(words: bytes) -> None:
    assert any(_contains(path, words) for path in LIBRARIES)


def _contains(path: Path, words: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(words) >= 0
