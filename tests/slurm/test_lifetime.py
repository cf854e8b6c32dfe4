"""The cluster leaves no process, file or cgroup behind, no matter how it ends."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from .cluster import Cluster, ClusterError, Settings, random_prefix
from .configuration import CGROUPS, HEAD
from .nodes import init_pid, wait_for

pytestmark = pytest.mark.slurm

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


def test_down_ends_everything_even_with_a_running_job() -> None:
    with Cluster() as cluster:
        start_busy_job(cluster)
        root, mine = cluster.root, namespaces(cluster)
        assert any("slurmctld" in line for line in processes_in(mine))
        assert root.is_dir()
    assert processes_in(mine) == []
    assert cgroups(cluster.settings.node_prefix) == []
    assert not root.exists()


HOLDER = """
import time
from tests.slurm.cluster import Cluster
from tests.slurm.test_lifetime import namespaces, start_busy_job
with Cluster() as cluster:
    start_busy_job(cluster)
    print(cluster.root, cluster.settings.node_prefix, *namespaces(cluster), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_a_cluster_ends_with_the_process_that_created_it(sent: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        root, prefix, *mine = holder.stdout.readline().split()
        assert len(processes_in(mine)) > 5
        holder.send_signal(sent)
    assert holder.returncode == -sent
    wait_for("end of the cluster's processes", lambda: not processes_in(mine))
    wait_for("end of the cluster's files", lambda: not Path(root).exists())
    assert cgroups(prefix) == []


def test_two_clusters_run_at_the_same_time(cluster: Cluster) -> None:
    with Cluster() as other:
        for one in (cluster, other):
            done = one.run(["srun", "--nodes=2", "hostname"])
            assert sorted(done.stdout.split()) == one.node_names
    assert set(other.node_names).isdisjoint(cluster.node_names)
    assert cluster.run(["srun", "--nodes=2", "true"]).returncode == 0


def test_a_failed_start_reports_the_logs_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(tempfile.mkdtemp(prefix="ddp-slurm-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(root))
    settings = Settings(node_prefix=random_prefix(), features="gpu Nonsense=1")
    with pytest.raises(
        ClusterError, match=r"(?s)did not start: .*Nonsense.*---- munged.log\n.*Starting munge"
    ):
        Cluster(settings).up()
    assert not root.exists()


def pytest_without(program: str, tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hide = f'mount --bind /dev/null /usr/sbin/{program} && exec "$@"'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "_", sys.executable, "-m"]
    argv += ["pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name(tests))]
    return subprocess.run(argv, cwd=CHECKOUT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("munged", "test_cluster.py"),
        pytest.param("slurmdbd", "test_accounting.py", marks=pytest.mark.slurm(accounting=True)),
    ],
)
def test_without_slurm_the_tests_are_skipped_with_one_line(program: str, tests: str) -> None:
    done = pytest_without(program, tests, DDP_HPC_REQUIRE_SLURM="")
    assert done.returncode == 0, done.stdout
    told = re.findall(r"^SKIPPED .*$", done.stdout, re.MULTILINE)
    assert len(told) == 1
    assert f"lack the programs {program}" in told[0]
    assert "apt-get install" in told[0]


def test_if_slurm_is_required_a_skip_is_a_failure() -> None:
    done = pytest_without("munged", "test_cluster.py", DDP_HPC_REQUIRE_SLURM="1")
    assert done.returncode == 1
    assert "DDP_HPC_REQUIRE_SLURM=1, but the Slurm tests lack the programs munged" in done.stdout
    assert " skipped" not in done.stdout
