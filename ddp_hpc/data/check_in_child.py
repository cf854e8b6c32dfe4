"""`python -m ddp_hpc.data.check_in_child PATH SRC_KEY TGT_KEY START STOP`: searches samples of an HDF5 file
for non-finite values, and prints the result as JSON.

The HDF5 library crashes on some damaged files. A rank that reads in a child process can
still report the file. The child is not forked, because a fork under MPI can hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from ddp_hpc.base.errors import DataError
from ddp_hpc.base.process_control import PACKAGES, die_with_parent
from ddp_hpc.data.check_finite import BadSample, first_bad_sample
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.samples import Samples


def first_bad_sample_in_child(samples: Samples, start: int, stop: int) -> BadSample | None:
    """Returns the same as `first_bad_sample`, for an HDF5 file.

    Raises:
        DataError: the file cannot be read, it changed while it was read, or the HDF5 library crashed.
    """
    path = os.environ.get("PYTHONPATH")
    argv = [sys.executable, "-m", "ddp_hpc.data.check_in_child", str(samples.path.absolute())]
    done = subprocess.run(
        [*argv, samples.src.key, samples.tgt.key, str(start), str(stop)],
        env={**os.environ, "PYTHONPATH": f"{PACKAGES}{os.pathsep}{path}" if path else str(PACKAGES)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        how = f"exit code {done.returncode}"
        with suppress(ValueError):
            how = f"the process was killed by {signal.Signals(-done.returncode).name}"
        raise DataError(
            f"{samples.path}: reading the samples {start} to {stop - 1} failed ({how}); copy or write the "
            "file again"
        )
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise DataError(found)
    return BadSample(*found) if found else None


def main(argv: list[str]) -> None:
    """Prints the bad sample as a list, null if there is none, or the error as a string."""
    die_with_parent(signal.SIGKILL)
    with suppress(ImportError):
        import mpi4py

        mpi4py.rc.initialize = False  # a parallel build of h5py imports mpi4py.MPI
    path, src_key, tgt_key, start, stop = argv
    try:
        samples = open_samples(Path(path), src_key=src_key, tgt_key=tgt_key)
        bad = first_bad_sample(samples, int(start), int(stop))
        result: object = None if bad is None else astuple(bad)
    except DataError as error:
        result = str(error)
    print(json.dumps(result))  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main(sys.argv[1:])
