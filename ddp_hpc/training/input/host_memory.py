"""How this process gets memory from the kernel: in large pages, and kept when it is freed.

A step on a CPU frees and asks for the same hundreds of megabytes again and again; each time the kernel
hands out zeroed pages of 4 KiB. What is computed does not change. benchmarks/step.py measures it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# mallopt(3), malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 2**30


def prepare_host_memory() -> None:
    """Call it before torch is imported. What the user has set stays.

    Changes this process's environment: torch's CPU allocator reads THP_MEM_ALLOC_ENABLE
    (c10/core/impl/alloc_cpu.cpp) and then asks for huge pages where the kernel gives them on request.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # another libc than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)
