"""torch's flight recorder: the last collectives of every rank, in a file each once the ranks hang.

torch's own `torchfrtrace` is made to tell from the files of all ranks which of them came to
which collective. torch records with NCCL and with gloo, but writes files only where NCCL's
watchdog runs into --timeout: the heartbeat, which is earlier, writes them here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from ddp_hpc.training.stacks import in_time

_FILE, _OLD_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def turn_on_flight_recorder(environ: MutableMapping[str, str]) -> None:
    """Lets the process group record, and write to `flight/` of the run folder (DDP_HPC_RUN_DIR).

    To be called before the process group is made. What the user has set stays; without a run
    folder, or where it cannot be written, nothing is set. The names are those which torch
    2.13 reads (c10d's FlightRecorder.hpp and ProcessGroupNCCL.hpp); NCCL's own dump has not
    been seen on a GPU, gloo's has.
    """
    run_folder = environ.get("DDP_HPC_RUN_DIR")
    if not run_folder:
        return
    # torch makes no folder, and fails in its log alone.
    folder = Path(run_folder).absolute() / "flight"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    # Both names of one thing would bring a warning from every rank.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if _OLD_FILE not in environ:
        environ.setdefault(_FILE, str(folder / "rank_"))


def write_flight_record(rank: int, limit_s: float) -> None:
    """Writes what this rank's process group has recorded, under the name that torch would give.

    Nothing where torch is not loaded or no file name is set. Never raises, and waits `limit_s` at most.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    prefix = os.environ.get(_FILE) or os.environ.get(_OLD_FILE)
    # The first exists where torch was built with NCCL, which keeps a record of its own.
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None or prefix is None:
        return
    in_time(lambda: Path(f"{prefix}{rank}").write_bytes(dump()), limit_s)
