"""Makes this process use huge pages and keep freed memory.

Every step on a CPU allocates and frees the same hundreds of megabytes, and by default the kernel zeroes
pages of 4 KiB each time. The results do not change. benchmarks/step.py measures the effect.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# The parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 2**30


def prepare_host_memory() -> None:
    """Configures the memory allocators of this process. Call this function before torch is imported. Settings
    of the user are not changed. Sets THP_MEM_ALLOC_ENABLE in the environment: torch's CPU allocator reads it
    (c10/core/impl/alloc_cpu.cpp) and then requests huge pages from the kernel.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # the C library is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)


def return_free_memory() -> None:
    """Returns the memory that the process has freed to the operating system, and not only at its end."""
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
