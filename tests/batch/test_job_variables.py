"""The table of schedulers' variables: every row is known to all parts of ddp-hpc, by its defaults alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.job_variables import (
    JOB_VARIABLES,
    JobVariables,
    job_id_of,
    node_file_hosts,
    read_node_file,
)
from ddp_hpc.discovery.world import World, discover
from ddp_hpc.launch.find_allocation import find_allocation
from ddp_hpc.rendezvous.address import rendezvous_point
from ddp_hpc.schedulers.allocation import Allocation
from ddp_hpc.schedulers.deadline import Deadline, find_deadline, job_and_start, kill_delay_s
from ddp_hpc.schedulers.registry import SCHEDULERS, scheduler_of_job, scheduler_of_site
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.site import load_site
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.torchrun.step import plan_step
from tests.batch.conftest import Sandbox
from tests.batch.test_launch import planned, refused

# A scheduler of which only the variables are known.
NEW = "new"
NEW_VARIABLES = JobVariables(job_id="NEW_JOB_ID", node_file="NEW_NODEFILE")
TWO_NODES = World(rank=2, world_size=4, local_rank=0, local_size=2, hostname="n1", launcher="pmi")


@pytest.fixture(autouse=True)
def new_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(name=NEW, title="New", submit_program="newsub", roles=())
    monkeypatch.setitem(SCHEDULERS, NEW, scheduler)
    monkeypatch.setitem(JOB_VARIABLES, NEW, NEW_VARIABLES)


def job_environ(name: str, directory: Path) -> dict[str, str]:
    """The variables of a job on the nodes n2 and n1, in this order; the first node has one line more."""
    row = {**JOB_VARIABLES, NEW: NEW_VARIABLES}[name]
    nodes = directory / "nodes"
    nodes.write_text("n2\nn2\nn1\nn2\nn1\n\n")
    environ = {row.job_id: "17", **dict.fromkeys(row.node_lists, "n2,n1")}
    return {**environ, row.node_file: str(nodes)} if row.node_file else environ


@pytest.mark.parametrize("name", [*JOB_VARIABLES, NEW])
def test_a_job_of_each_scheduler_is_known_everywhere(tmp_path: Path, name: str) -> None:
    environ = job_environ(name, tmp_path)
    assert job_id_of(environ) == "17"
    assert scheduler_of_job(environ) is SCHEDULERS[name]
    assert job_and_start(environ)[0] == "17"
    assert rendezvous_point(TWO_NODES, {**environ, "DDP_HPC_LAUNCH": "a"}).host == "n2"
    if JOB_VARIABLES[name].node_file:
        assert plan_step([], environ).num_nodes == 2
        found = find_allocation(environ)
        assert (found.scheduler, found.job_id, found.num_nodes) == (name, "17", 2)
        assert "this job runs one rank" in discover(environ).notes[0]


def test_the_lines_of_a_node_are_its_tasks(tmp_path: Path) -> None:
    environ = job_environ("pbs", tmp_path)
    assert find_allocation(environ) == Allocation(scheduler="pbs", job_id="17", num_nodes=2, tasks_per_node=2)
    (tmp_path / "nodes").write_text("n2\nn1\n")
    assert find_allocation(environ).tasks_per_node == 0  # perhaps none were requested


def test_a_node_file_that_cannot_be_read_is_an_error_only_where_it_is_needed(tmp_path: Path) -> None:
    missing = {"PBS_NODEFILE": str(tmp_path / "missing")}
    assert node_file_hosts(missing) == []
    assert node_file_hosts({}) == []
    assert read_node_file({}).total() == 0
    with pytest.raises(RequestError, match=r"PBS_NODEFILE=.*missing cannot be read .*first node"):
        plan_step([], missing)


def test_the_end_of_a_job_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"NEW_JOB_ID": "17", "NEW_END": "1900000000"}
    new = SCHEDULERS[NEW]
    assert find_deadline(environ) is None
    assert JobClock(new.inside_job.running_job(environ), new, 60.0, environ).is_reported is False
    assert kill_delay_s(environ) is None  # unknown, instead of 0
    monkeypatch.setitem(JOB_VARIABLES, NEW, JobVariables(job_id="NEW_JOB_ID", end_s="NEW_END"))
    assert find_deadline(environ) == Deadline(1900000000.0, "NEW_END")
    assert JobClock(new.inside_job.running_job(environ), new, 60.0, environ).end_s == 1900000000.0


def test_launch_without_a_writer_uses_this_node_and_says_so(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec")
    sandbox.program("sbatch", "")  # the machine of the tests can have it
    environ = sandbox.environ(**job_environ(NEW, sandbox.folder))
    launch = planned(environ, num_ranks=2)
    assert launch.why == (
        "profile local: only this node is used, although this shell is inside 2 nodes of new job 17"
    )
    assert launch.num_nodes == 1
    assert refused(environ, "perlmutter").endswith("Omit --profile, or use local for this node only.")
    assert "unknown launcher 'newrun'" in refused(environ, "local", launcher="newrun")


def test_a_profile_of_a_scheduler_without_a_writer_is_refused(tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    text = Path("profiles/generic_slurm.toml").read_text()
    profile.write_text(text.replace('"slurm"', f'"{NEW}"'))
    with pytest.raises(RequestError, match=r"is for New, for which ddp-hpc writes no job scripts\. Use"):
        scheduler_of_site(load_site(str(profile)))
