"""Which errors of torch mean that another process has ended, from the type of the error and its message.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import errno
import os
from enum import Enum


class Lost(Enum):
    """The process whose end has caused an error."""

    RANK = "another rank"
    WORKER = "a worker process of a DataLoader"
    WORKER_BY_SIGTERM = "a worker process that received the SIGTERM of the job"


# Errors of torch's store and its sockets, which have types of their own since torch 2.1.
TYPES_OF_LOST_RANKS = ("DistNetworkError", "DistStoreError")
# The texts of strerror(3), which gloo and NCCL insert into their messages.
_LOST_CONNECTION = tuple(
    os.strerror(number).lower() for number in (errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE)
)
# torch raises all other errors as RuntimeError or DistBackendError with the message of a library. A message
# belongs to a row if it contains the first word and one of the others. Checked with torch 2.8 to 2.13;
# tests/training/test_errors_of_torch.py checks the words with the installed torch.
MESSAGES = (
    # torch/csrc/DataLoader.cpp, in a handler of SIGCHLD: anywhere in the main thread.
    (Lost.WORKER_BY_SIGTERM, "DataLoader worker", ("is killed by signal: Terminated",)),
    (Lost.WORKER, "DataLoader worker", ("is killed by signal: ", "exited unexpectedly")),
    # gloo/transport/tcp/pair.cc and unbound_buffer.cc, whose paths are part of the message.
    (Lost.RANK, "gloo", ("Connection closed by peer", "Timed out", "timeout", *_LOST_CONNECTION)),
    # ncclGetErrorString and the warnings of NCCL's sockets, in ProcessGroupNCCL.cpp and NCCLUtils.cpp.
    (Lost.RANK, "NCCL", ("remote process", "Connection closed", "timed out", "timeout", *_LOST_CONNECTION)),
)


def lost_process(error: BaseException) -> Lost | None:
    """Returns the process whose end has caused this error; None for all other errors."""
    if not isinstance(error, RuntimeError):
        return None
    if type(error).__name__ in TYPES_OF_LOST_RANKS:
        return Lost.RANK
    text = str(error).lower()
    for lost, library, words in MESSAGES:
        if library.lower() in text and any(word.lower() in text for word in words):
            return lost
    return None


def explain_lost_worker(error: BaseException) -> str:
    """Describes torch's error about a worker that exited, in one line; empty for all other errors."""
    if lost_process(error) not in (Lost.WORKER, Lost.WORKER_BY_SIGTERM):
        return ""
    first_line = str(error).strip().partition("\n")[0].rstrip()
    return f"{first_line} (if a job runs out of memory, the kernel kills such processes first)"


def explain_lost_contact(error: BaseException, timeout_s: float) -> str:
    """Returns one line for an error that another rank's exit or hang has caused; empty for other errors."""
    if lost_process(error) is not Lost.RANK:
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Below the line `Last error:`, torch appends NCCL's last warning, which is the actual cause (torch's
    # NCCLUtils.cpp, getNcclErrorDetailStr).
    last = next((index for index, line in enumerate(lines) if line.startswith("Last error:")), None)
    cause = lines[0] if last is None else " ".join(lines[last : last + 2])
    cause = cause.partition(". This is typically")[0][:300]  # cut gloo's advice, which contains an emoji
    return (
        f"lost contact with another rank in a collective ({cause}). It has exited or is stuck; look for its "
        f"error above or in its node's log. Ranks wait {timeout_s:g} s for each other (--timeout, timeout_s)"
    )
