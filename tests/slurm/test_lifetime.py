"""The cluster leaves no process, file or cgroup behind, no matter how it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from .cluster import Cluster
from .configuration import CGROUPS, HEAD
from .nodes import init_pid, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.check]

CHECKOUT = Path(__file__).resolve().parents[2]
BUSY_JOB = "#!/bin/sh\nsrun sh -c 'setsid sleep 1000 & exec sleep 1000'\n"


def namespaces(cluster: Cluster) -> set[str]:
    """Returns the PID namespaces of the cluster's hosts, which contain all its processes."""
    pids = [init_pid(cluster.layout, name) for name in [HEAD, *cluster.node_names]]
    return {str(Path(f"/proc/{pid}/ns/pid").readlink()) for pid in pids}


def processes_in(namespaces: Iterable[str]) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "ns/pid").readlink()) in namespaces:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def cgroups(prefix: str) -> list[Path]:
    return list(CGROUPS.glob(f"*/slurm_{prefix}*"))


def start_busy_job(cluster: Cluster) -> None:
    job_id = cluster.sbatch(BUSY_JOB, "--nodes=2")
    wait_for("running step", lambda: f"{job_id}.0" in cluster.run(["squeue", "--steps"]).stdout)


HOLDER = """
import time
from tests.slurm.cluster import Cluster, Settings
from tests.slurm.configuration import has_cgroup_v1
from tests.slurm.test_lifetime import namespaces, start_busy_job
with Cluster(Settings(cgroups=has_cgroup_v1())) as cluster:
    start_busy_job(cluster)
    print(cluster.root, cluster.settings.node_prefix, *namespaces(cluster), flush=True)
    time.sleep(1000)
"""


def test_a_cluster_ends_with_the_process_that_created_it_and_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        root, prefix, *mine = holder.stdout.readline().split()
        assert len(processes_in(mine)) > 5
        holder.kill()
    assert holder.returncode == -signal.SIGKILL
    wait_for("end of the cluster's processes", lambda: not processes_in(mine))
    wait_for("end of the cluster's files", lambda: not Path(root).exists())
    assert cgroups(prefix) == []


@pytest.mark.parametrize(("required", "outcome"), [("", "SKIPPED "), ("1", "DDP_HPC_REQUIRE_SLURM=1, but ")])
def test_without_slurm_the_tests_are_skipped_or_fail_with_one_line(required: str, outcome: str) -> None:
    hide = 'mount --bind /dev/null /usr/sbin/munged && exec "$@"'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "_", sys.executable, "-m"]
    argv += ["pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_arrays.py"))]
    environ = os.environ | {"DDP_HPC_REQUIRE_SLURM": required}
    done = subprocess.run(argv, cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    assert done.returncode == (1 if required else 0), done.stdout
    told = re.findall(rf"^{outcome}.*lack the programs munged.*apt-get install", done.stdout, re.MULTILINE)
    assert bool(told)
    assert required or len(told) == 1
