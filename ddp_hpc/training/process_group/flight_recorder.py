"""Enables torch's flight recorder, which writes the last collectives of each rank to a file after a hang.

torch's `torchfrtrace` reads the files of all ranks and finds which ranks entered which collective.
torch records with NCCL and with gloo, but writes files only if NCCL's watchdog reaches --timeout.
The heartbeat detects a hang earlier, and this module then writes the files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from ddp_hpc.base.in_time import in_time

_FILE, _OLD_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def turn_on_flight_recorder(environ: MutableMapping[str, str]) -> None:
    """Enables the flight recorder, which writes to `flight/` in the run directory (DDP_HPC_RUN_DIR).

    Call this function before the process group is created. Variables that the user has set are not changed.
    Without a writable run directory, nothing is set. The variables are those that torch 2.13 reads (c10d's
    FlightRecorder.hpp and ProcessGroupNCCL.hpp). Tested with gloo; NCCL's dump has not been tested on a GPU.
    """
    run_directory = environ.get("DDP_HPC_RUN_DIR")
    if not run_directory:
        return
    # torch does not create the directory, and reports the failure only in its log.
    directory = Path(run_directory).absolute() / "flight"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    # Only one of the old and the new name is set, because torch prints a warning per rank if both are.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if _OLD_FILE not in environ:
        environ.setdefault(_FILE, str(directory / "rank_"))


def write_flight_record(rank: int, limit_s: float) -> None:
    """Writes the record of this rank's process group, under the file name that torch would use.

    Does nothing if torch is not loaded or no file name is set. Never raises, and waits at most `limit_s`.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    prefix = os.environ.get(_FILE) or os.environ.get(_OLD_FILE)
    if c10d is not None and prefix is not None:
        in_time(lambda: Path(f"{prefix}{rank}").write_bytes(_record(c10d)), limit_s)


def _record(c10d: Any) -> bytes:
    """Returns the record of the backend that the ranks use.

    NCCL and gloo have separate records, and a torch build with NCCL has the functions for both.
    """
    has_nccl = "nccl" in sys.modules["torch.distributed"].get_backend_config()
    record: bytes = c10d._dump_nccl_trace() if has_nccl else c10d._dump_fr_trace()
    return record
