"""--node-check in scripts, and jobs that leave out nodes that have failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc.queue.failed_nodes import record_failed_node
from ddp_hpc.render.launch_lines import NOT_CHECKED
from ddp_hpc.render.rejection_warnings import advice
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import calls, folder, job
from tests.supervisor.test_any_program import TOUCH, run

__all__ = ["job"]

JOB = Job(num_nodes=2, ranks_per_node=1, cpus_per_node=4, gpus_per_node=0)
SITE = load_site("generic_slurm")


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({}, ""),
        ({"spare_nodes": 1}, ""),
        ({"node_check": "off"}, ""),
        ({"node_check": "warn"}, " --node-check warn"),
        ({"spare_nodes": 1, "node_check": "replace"}, ""),
        ({"spare_nodes": 1, "node_check": "off"}, " --node-check off"),
    ],
)
def test_a_script_has_the_option_if_it_is_not_the_default(changes: dict[str, object], written: str) -> None:
    line = render(replace(JOB, **changes), SITE).rpartition("python -m ddp_hpc.job")[2]
    assert line.count("--node-check") == bool(written)
    assert written in line


@pytest.mark.parametrize(
    ("changes", "is_checked"),
    [
        ({"command": ("python", "train.py")}, True),
        ({"command": ("python", "-m", "ddp_hpc.train")}, True),
        ({"command": ("ddp-hpc", "train")}, True),
        ({"command": ("python", "train.py"), "launcher": "torchrun"}, True),
        ({"command": ("python", "train.py"), "env_style": "none"}, False),
        ({"command": ("./program",)}, False),
        ({"command": ("python", "-m", "mpi4py.bench", "ring")}, False),
    ],
)
def test_a_program_that_cannot_check_the_nodes_is_named_with_what_to_do(
    changes: dict[str, object], is_checked: bool
) -> None:
    assert (NOT_CHECKED not in advice(replace(JOB, spare_nodes=1, **changes), SITE)) == is_checked
    assert NOT_CHECKED not in advice(replace(JOB, **changes), SITE)


def test_a_requeued_job_leaves_failed_nodes_out(job: Sandbox) -> None:
    record_failed_node(folder(job), "n2", "no answer")
    assert run(job, f"{TOUCH} exit 75").returncode == 75
    assert calls(job, "scontrol") == ["requeue 7", "update JobId=7 ExcNodeList=n2"]
    [test] = calls(job, "sbatch")
    assert test.startswith("--test-only --exclude=n2 ")


def test_a_job_is_requeued_before_the_scheduler_is_asked_about_failed_nodes(job: Sandbox) -> None:
    """A busy controller must not use up the time until SIGKILL with these questions."""
    record_failed_node(folder(job), "n2", "no answer")
    for name in ("scontrol", "sbatch"):
        job.program(name, f'#!/bin/bash\necho "$1" >>{job.work}/asked\n')
    run(job, f"{TOUCH} exit 75")
    asked = (job.work / "asked").read_text().split()
    assert asked[-4:] == ["requeue", "--oneliner", "--test-only", "update"]


def test_a_job_that_needs_the_failed_nodes_gets_them_again(job: Sandbox) -> None:
    record_failed_node(folder(job), "n2", "no answer")
    refuses = "#!/bin/bash\necho 'Requested node configuration is not available' >&2\nexit 1\n"
    job.program("sbatch", refuses)
    done = run(job, f"{TOUCH} exit 75")
    assert calls(job, "scontrol") == ["requeue 7"]
    assert (
        b"ddp-hpc: the next job of the run can get n2 again: Requested node configuration is not available\n"
        in done.stdout
    )


def test_if_the_scheduler_refuses_to_leave_a_node_out_the_log_says_why(job: Sandbox) -> None:
    record_failed_node(folder(job), "n2", "no answer")
    job.program("scontrol", "#!/bin/bash\n[[ $1 != update ]] || { echo 'Access denied' >&2; exit 1; }\n")
    done = run(job, f"{TOUCH} exit 75")
    assert b"ddp-hpc: the next job of the run can get n2 again: Access denied\n" in done.stdout


def test_a_successor_leaves_failed_nodes_out(job: Sandbox) -> None:
    record_failed_node(folder(job), "n2", "no answer")
    record_failed_node(folder(job), "n5", "no answer")
    (job.bin / "scontrol").unlink()
    run(job, f"{TOUCH} exit 75")
    assert "--exclude=n2,n5" in calls(job, "sbatch")[-1].split()


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"node_check": "warn"}, ""),
        ({"node_check": "warn", "num_nodes": 1}, "--node-check has no effect"),
        ({"node_check": "off", "num_nodes": 1}, ""),
        ({"node_check": "replace"}, "a bad node ends the job before its ranks start"),
        ({"node_check": "replace", "spare_nodes": 1}, ""),
        ({"node_check": "replace", "min_nodes": 1}, ""),
        ({"idle_timeout_s": 3599.0}, ""),
        ({"idle_timeout_s": 3600.0}, "--idle-timeout 3600 is not shorter than the walltime"),
    ],
)
def test_options_without_an_effect_are_warned_about(changes: dict[str, object], warning: str) -> None:
    lines = "\n".join(advice(replace(JOB, walltime_s=3600, command=("python", "a.py"), **changes), SITE))
    about = ("--node-check", "--idle-timeout")
    assert (warning in lines) if warning else not any(option in lines for option in about)
