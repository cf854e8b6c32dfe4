"""Checks an all-reduce between two processes on this node, with gloo over the loopback interface."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec

from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.doctor.check_result import DoctorFinding, Here, fail, first_line, ok, warn
from ddp_hpc.doctor.mpi import without_launcher

LIMIT_S = 60.0
# The ranks use a file store, because another program may take a chosen port before they start.
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


def two_ranks(here: Here) -> DoctorFinding:
    """Runs an all-reduce of two ranks on this node and checks the sum."""
    if find_spec("torch") is None:
        return warn("not run: torch is not installed", install_command("train"))
    environ = without_launcher(dict(here.environ)) | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-doctor-", dir=here.environ.get("TMPDIR")) as directory:
        error = _run(environ, directory, start_s + LIMIT_S)
    if error:
        return fail(
            f"the all-reduce of two ranks on this node failed ({error})",
            "see the checks torch, cores and tmp-space, and `ip addr show lo`",
            "",
        )
    return ok(f"all-reduce of two ranks over loopback in {time.monotonic() - start_s:.1f} s", "")


def _run(environ: dict[str, str], directory: str, end_s: float) -> str:
    """Returns the reason for a failure, or an empty string on success."""
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for rank in range(2):
                argv = [sys.executable, "-c", _PROGRAM, str(rank), f"{directory}/store"]
                process = subprocess.Popen(
                    argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
                ranks.append(process)
            codes = [process.wait(max(0.1, end_s - time.monotonic())) for process in ranks]
        except subprocess.TimeoutExpired:
            return f"no result within {LIMIT_S:g} s"
        except OSError as error:
            return first_line(error)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if not any(codes):
            return ""
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").strip().splitlines()
        return first_line(lines[-1] if lines else f"exit codes {codes}")
