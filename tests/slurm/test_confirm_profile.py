"""`ddp-hpc profiles confirm` on a real Slurm, with a profile whose limits are partly wrong."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .cluster import Cluster

pytestmark = [pytest.mark.slurm(accounting=True), pytest.mark.check]

# Right: the version, the walltime of urgent, and the cores. Wrong: the walltime of debug, the number of
# devices, and a partition that does not exist.
PROFILE = """
extends = "generic_slurm"
default_queue = "debug"
software = ["export LOADED=1"]
[slurm]
version = "{version}"
[node]
cores = {cores}
device = "simulated"
devices = 2
[[queues]]
name = "debug"
max_walltime = "02:00:00"
[[queues]]
name = "debug"
qos = "short"
max_nodes = 1
max_walltime = "01:00:00"
[[queues]]
name = "urgent"
max_walltime = "01:00:00"
[[queues]]
name = "gone"
"""


def test_a_profile_is_compared_with_the_machine(accounting_cluster: Cluster, tmp_path: Path) -> None:
    cluster = accounting_cluster
    version = cluster.run(["sbatch", "--version"]).stdout.split()[1].rpartition(".")[0]
    profile = PROFILE.format(version=version, cores=cluster.settings.cpus_per_node)
    (tmp_path / "mine.toml").write_text(profile)
    qos = "sacctmgr --immediate add qos short set MaxWall=00:30:00 MaxTRESPerJob=node=1"
    cluster.run(shlex.split(qos)).check_returncode()

    confirm = ["ddp-hpc", "profiles", "confirm", "./mine.toml"]
    cluster.run([*confirm, "-o", "confirm.sh"], cwd=tmp_path).check_returncode()
    asked = cluster.run(["bash", "confirm.sh"], cwd=tmp_path)
    assert asked.returncode == 0

    # The job as the script says; it has fewer GPUs than the nodes, and each rank sees its own.
    line = next(line for line in asked.stderr.splitlines() if "ddp-hpc submit" in line)
    submitted = cluster.run(shlex.split(line), cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.split()[-1]
    assert cluster.wait(job_id).state == "COMPLETED"
    log = cluster.run(["ddp-hpc", "logs", job_id], cwd=tmp_path).stdout
    (tmp_path / "answers.txt").write_text(asked.stdout + log)

    done = cluster.run([*confirm, "answers.txt"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    table, *_ = done.stdout.split("\n\n")
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    facts = {row[0]: tuple(row[1:]) for row in rows if len(row) == 4} | {
        row[0]: ("", *row[1:]) for row in rows if len(row) == 3
    }
    assert {key: fact for key, fact in facts.items() if fact[2] == "differs"} == {
        "queues.debug.max_walltime": ("02:00:00", "01:00:00", "differs"),
        "queues.debug.short.max_walltime": ("01:00:00", "00:30:00", "differs"),
        "queues.gone": ("listed", "not listed", "differs"),
        "node.devices": ("2", "4", "differs"),
    }
    confirmed = {
        *("slurm.version", "queues.debug.short.max_nodes", "queues.urgent.max_walltime", "node.cores"),
        *("software", "launch.default", "launch (device of LOCAL_RANK)"),
    }
    assert {facts[key][2] for key in confirmed} == {"confirmed"}
    assert {facts[f"queues.{name}"][2] for name in ("long", "spare")} == {"new"}
    assert not [name for name in cluster.node_names if name in done.stdout]
