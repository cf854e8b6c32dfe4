"""Which errors of torch, of other libraries and of the operating system have a known cause.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.base.run_outcomes import Cause


class KnownError(NamedTuple):
    """Errors with the same cause: those with a class or base class in `types`, and each RuntimeError whose
    message contains `library` and one of `words`, in any case.
    """

    cause: Cause
    types: tuple[str, ...] = ()
    library: str = ""
    words: tuple[str, ...] = ()


# gloo and NCCL insert the texts of strerror(3) into their messages.
_NUMBERS = (errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE)
_LOST_CONNECTION = ("timed out", "timeout", *(os.strerror(number) for number in _NUMBERS))
# torch/csrc/DataLoader.cpp, in a handler of SIGCHLD: anywhere in the main thread.
_WORKER = "DataLoader worker"
# The first row that fits counts. torch raises most errors as RuntimeError or DistBackendError with a message
# of a library: checked with torch 2.8 to 2.13. tests/training/test_errors_of_torch.py checks this one.
KNOWN_ERRORS = (
    # Errors of torch's store and its sockets, which have types of their own since torch 2.1.
    KnownError(Cause.LOST_RANK, types=("DistNetworkError", "DistStoreError")),
    # A worker process (--workers) received the SIGTERM of the job shortly before this process.
    KnownError(Cause.SIGNALLED, library=_WORKER, words=("is killed by signal: Terminated",)),
    KnownError(Cause.FAILED, library=_WORKER, words=("is killed by signal: ", "exited unexpectedly")),
    # gloo/transport/tcp/pair.cc and unbound_buffer.cc, whose paths are part of the message.
    KnownError(Cause.LOST_RANK, library="gloo", words=("Connection closed by peer", *_LOST_CONNECTION)),
    # ncclGetErrorString and the warnings of NCCL's sockets, in ProcessGroupNCCL.cpp and NCCLUtils.cpp.
    KnownError(
        Cause.LOST_RANK, library="NCCL", words=("remote process", "Connection closed", *_LOST_CONNECTION)
    ),
    # torch's allocator for GPUs, and Python and NumPy.
    KnownError(Cause.OUT_OF_MEMORY, types=("OutOfMemoryError", "MemoryError")),
    # c10/core/impl/alloc_cpu.cpp, and errors of CUDA and HIP outside of torch's allocator.
    KnownError(Cause.OUT_OF_MEMORY, library="DefaultCPUAllocator", words=("can't allocate memory",)),
    KnownError(Cause.OUT_OF_MEMORY, words=("CUDA error: out of memory", "HIP error: out of memory")),
)


OTHER_ERROR = KnownError(Cause.FAILED)


def known_error(error: BaseException) -> KnownError:
    """Returns the row of this error, without regard to those that led to it; OTHER_ERROR if it has none."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    for row in KNOWN_ERRORS:
        has_words = row.library.lower() in text and any(word.lower() in text for word in row.words)
        if has_words or names.intersection(row.types):
            return row
    return OTHER_ERROR


def known_cause(error: BaseException) -> Cause | None:
    """Returns the first cause that is not vague of this error and of those that led to it; None without one.

    Errors that `from None` hides count, too: wrappers of users' code raise a RequestError with its message.
    """
    link: BaseException | None = error
    for _ in range(100):  # the errors can form a circle
        if link is None:
            break
        cause = (link if isinstance(link, DdpHpcError) else known_error(link)).cause
        if not cause.is_vague:
            return cause
        if isinstance(link, DataError):
            break  # a damaged file can make h5py raise any error, such as a MemoryError
        link = link.__cause__ or link.__context__
    return None


def explain_lost_worker(error: BaseException) -> str:
    """Describes torch's error about a worker that exited, in one line; empty for all other errors."""
    if known_error(error).library != _WORKER:
        return ""
    first_line = str(error).strip().partition("\n")[0].rstrip()
    return f"{first_line} (if a job runs out of memory, the kernel kills such processes first)"


def explain_lost_contact(error: BaseException, timeout_s: float) -> str:
    """Returns one line for an error that another rank's exit or hang has caused; empty for other errors."""
    if known_error(error).cause is not Cause.LOST_RANK:
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
