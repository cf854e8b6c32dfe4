"""Two processes that add numbers over loopback with gloo: the least of what training does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec

from ddp_hpc.doctor.mpi import without_launcher
from ddp_hpc.doctor.result import Finding, Here, fail, first_line, ok, warn

LIMIT_S = 60.0
# Rank 0's store picks its own port: a port that is chosen beforehand may be taken by then.
_PROGRAM = """
import sys, datetime, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=50))
value = torch.full((1000,), rank + 1.0)
dist.all_reduce(value)
assert value.eq(3.0).all(), f"1 + 2 gave {value[0].item()}"
dist.destroy_process_group()
"""


def two_ranks(here: Here) -> Finding:
    """Two ranks' all-reduce on this node, and whether the sum is right."""
    if find_spec("torch") is None:
        return warn("not tried: torch is not installed", "pip install 'ddp-hpc[train]'")
    environ = without_launcher(dict(here.environ)) | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-doctor-", dir=here.environ.get("TMPDIR")) as folder:
        error = _run(environ, folder, start_s + LIMIT_S)
    if error:
        return fail(
            f"two ranks on this node could not add numbers ({error})",
            "look at the checks torch, cores and tmp-space, and at `ip addr show lo`",
            "",
        )
    return ok(f"two ranks added numbers over loopback in {time.monotonic() - start_s:.1f} s", "")


def _run(environ: dict[str, str], folder: str, end_s: float) -> str:
    """Why it failed; empty where it did not."""
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as words:
        try:
            for rank in range(2):
                argv = [sys.executable, "-c", _PROGRAM, str(rank), os.path.join(folder, "store")]  # noqa: PTH118 - an argument
                ranks.append(
                    subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
                )
            codes = [process.wait(max(0.1, end_s - time.monotonic())) for process in ranks]
        except subprocess.TimeoutExpired:
            return f"no answer within {LIMIT_S:g} s"
        except OSError as error:
            return first_line(error)
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                process.wait()
        if not any(codes):
            return ""
        words.seek(0)
        lines = words.read().decode("utf-8", "replace").strip().splitlines()
        return first_line(lines[-1] if lines else f"exit codes {codes}")
