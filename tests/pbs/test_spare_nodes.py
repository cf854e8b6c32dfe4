"""A job with a spare node under PBS loses a node, and goes on without waiting in the queue again.

With the stand-in for PBS, and with the real mpiexec of MPICH or the stand-in for that of PALS. The nodes are
addresses of this machine (tests/fakes/nodes.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nodes import Nodes
from tests.fakes.site import Site, program
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render
from tests.slurm.test_restarts import PLAIN, recorded
from tests.training.forked import Forks
from tests.waiting import PATIENCE, wait_until

# A step takes 0.1 s.
MODEL = """
import os
import time
from torch import nn


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return super().forward(x)


def net():
    return Slow(4, 4)
"""
TRAIN = ["python", "-m", "ddp_hpc.train", "--model", "slow:net", "--src-shape", "4", "--tgt-shape", "4"]
TRAIN += ["--num-samples", "1600", "--batch-size", "4", "--epochs", "1", "--threads", "1", "--log-every", "5"]
TRAIN += ["--snapshot-every-steps", "10", "--metrics", "metrics.jsonl", "--init-timeout", "60"]
RENDER = ("--nodes", "2", "--ranks-per-node", "1", "--walltime", "00:10:00")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Three nodes."""
    made = Nodes(tmp_path, 3)
    yield made
    made.close()


def losses(site: Site) -> list[tuple[int, float]]:
    lines = (site.work / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def machine(make_site: MakeSite, nodes: Nodes, mpiexec: str) -> Site:
    site = make_site(nodes=nodes.names, max_poll_downtime_s=1.0)
    first = [site.pals_bin] if mpiexec == "pals" else []
    site.dotfile(*first, Path(sys.prefix) / "bin", site.pbs_bin)
    (site.work / "slow.py").write_text(MODEL)
    return site


def wait_for(site: Site, words: str) -> None:
    end_s = time.monotonic() + PATIENCE * 90
    while words not in site.logs():
        assert time.monotonic() < end_s, site.logs()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("mpiexec", "launcher", "variable"),
    [
        pytest.param("hydra", "mpiexec", "", marks=pytest.mark.check),
        pytest.param("hydra", "torchrun", "", marks=pytest.mark.soak),
        pytest.param("pals", "mpiexec", "PALS_NODEID=1", marks=pytest.mark.soak),
    ],
)
def test_a_node_that_dies_is_replaced_in_the_same_job(
    mpiexec: str, launcher: str, variable: str, make_site: MakeSite, nodes: Nodes
) -> None:
    """PBS would end the job after $max_poll_downtime, which is 1 s here."""
    quiet, site = (machine(make_site, nodes, mpiexec) for _ in range(2))
    options = [*RENDER, *nodes.options, "--launcher", launcher]
    quiet.wait(quiet.submit(render(quiet, "generic_pbs", *options, command=TRAIN)))
    options += ["--env", "STEP_S=0.1", "--spare-nodes", "1"]
    job_id = site.submit("-k", "doe", render(site, "generic_pbs", *options, command=TRAIN))
    wait_for(site, " step 50/")
    first, second, third = nodes.names
    site.lose(second)
    nodes.lose(second, variable)
    lost_s = time.monotonic()
    wait_for(site, "resuming after step")
    print(f"{time.monotonic() - lost_s:.0f} s from the loss to the next start")
    job = site.wait(job_id, timeout_s=120.0)
    assert (job["Exit_status"], job["run_count"], site.num_jobs()) == (0, 1, 1), site.logs()
    assert losses(site) == losses(quiet)
    log = site.log(job)
    assert f"no answer from {second}; replaced by {third}" in log
    run_dir = site.work / "runs" / "ddp"
    assert (run_dir / "nodes").read_text().split() == [first, third]
    # Before each start, the same launch line has checked the nodes. All have the name of this machine.
    results = json.loads((run_dir / "node_check" / "results.json").read_text())
    assert [rank["problems"] for rank in results["ranks"]] == [[], []]
    assert log.count("node check: the ranks report host names") == 2


@pytest.mark.soak
@pytest.mark.parametrize(("mpiexec", "variable"), [("hydra", ""), ("pals", "PALS_NODEID=1")])
def test_a_node_of_a_plain_program_that_dies_is_replaced(
    mpiexec: str, variable: str, forks: Forks, make_site: MakeSite, nodes: Nodes, tmp_path: Path
) -> None:
    """No rank of this program notices that a node has died."""
    (home := tmp_path / "quiet").mkdir()
    assert forks.script(PLAIN, "200", "10", cwd=home).exit_code == 0
    site = machine(make_site, nodes, mpiexec)
    options = [*RENDER, *nodes.options, "--env", "STEP_S=0.1", "--spare-nodes", "1"]
    command = ["python", str(PLAIN), "200", "10"]
    job_id = site.submit("-k", "doe", render(site, "generic_pbs", *options, command=command))
    wait_until(lambda: len(recorded(site.work)) >= 50, 90.0)
    _, second, third = nodes.names
    site.lose(second)
    nodes.lose(second, variable)
    job = site.wait(job_id, timeout_s=180.0)
    assert (job["Exit_status"], job["run_count"], site.num_jobs()) == (0, 1, 1), site.logs()
    assert recorded(site.work)[-1] == recorded(home)[-1], "the checksums of the weights"
    assert f"no answer from {second}; replaced by {third}" in site.log(job)


@pytest.mark.parametrize(
    ("mpiexec", "launcher", "variable"),
    [
        pytest.param("hydra", "mpiexec", "", marks=pytest.mark.check),
        pytest.param("hydra", "torchrun", "", marks=pytest.mark.soak),
        pytest.param("pals", "mpiexec", "PALS_NODEID=1", marks=pytest.mark.soak),
    ],
)
def test_without_a_spare_node_the_run_continues_on_fewer_nodes(
    mpiexec: str, launcher: str, variable: str, make_site: MakeSite, nodes: Nodes
) -> None:
    site = machine(make_site, nodes, mpiexec)
    options = [*RENDER, "--nodes", "3", *nodes.options, "--launcher", launcher, "--env", "STEP_S=0.1"]
    train = [*TRAIN, "--global-batch", "12"]
    job_id = site.submit(
        "-k", "doe", render(site, "generic_pbs", *options, "--min-nodes", "2", command=train)
    )
    wait_for(site, " step 50/")
    first, second, third = nodes.names
    site.lose(second)
    nodes.lose(second, variable)
    job = site.wait(job_id, timeout_s=180.0)
    assert (job["Exit_status"], job["run_count"], site.num_jobs()) == (0, 1, 1), site.logs()
    log = site.log(job)
    assert f"no answer from {second}; the ranks use 2 nodes instead of 3 (--min-nodes)" in log
    assert "the number of ranks changed from 3 to 2" in log
    assert "the global batch changed" not in log
    assert (site.work / "runs" / "ddp" / "nodes").read_text().split() == [first, third]
    assert [step for step, _ in losses(site)] == list(range(1, 1600 // 12 + 2))


def test_open_mpi_is_refused_in_the_job(make_site: MakeSite, nodes: Nodes) -> None:
    site = make_site(nodes=nodes.names)
    says_its_version = '#!/bin/bash\necho "mpiexec (Open MPI) 5.0.11"\n'
    site.dotfile(program(site.root / "bin" / "mpiexec", says_its_version).parent, site.pbs_bin)
    script = render(site, "generic_pbs", *RENDER, "--spare-nodes", "1", command=TRAIN)
    job = site.wait(site.submit(script))
    assert job["Exit_status"] == 2
    assert "mpiexec is that of Open MPI, which starts ranks only on nodes in PBS's own node file" in (
        site.log(job)
    )
