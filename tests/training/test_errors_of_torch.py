"""Which errors of torch mean that another process has ended."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from ddp_hpc.training.process_group import errors_of_torch
from ddp_hpc.training.process_group.errors_of_torch import Lost, explain_lost_contact, lost_process

LIBRARIES = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_*.so"))
GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\nframe #0"
REMOTE = "NCCL error in: x.cpp:1, remote process exited or there was a network error\nLast error:\npeer n2"
OWN = "NCCL error in: x.cpp:1, invalid usage\nLast error:\nDuplicate GPU"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), Lost.RANK),
        (dist.DistBackendError(REMOTE), Lost.RANK),
        (dist.DistNetworkError("The client socket has timed out"), Lost.RANK),
        (dist.DistStoreError("wait timeout after 300000ms"), Lost.RANK),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), Lost.WORKER),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "), Lost.WORKER_BY_SIGTERM),
        # not caused by another process
        (dist.DistBackendError(OWN), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("gloo: connection closed by peer"), None),
        (TimeoutError("timed out"), None),
    ],
)
def test_an_error_names_the_process_that_was_lost(error: Exception, lost: Lost | None) -> None:
    assert lost_process(error) is lost


def test_lost_contact_is_one_line_with_the_last_error_of_nccl() -> None:
    assert "frame" not in explain_lost_contact(RuntimeError(GLOO), 30.0)
    assert "Last error: peer n2" in explain_lost_contact(dist.DistBackendError(REMOTE), 30.0)


def test_the_types_exist_in_the_installed_torch() -> None:
    assert all(hasattr(dist, name) for name in errors_of_torch.TYPES_OF_LOST_RANKS)


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
