"""The supervisor checks the nodes before a start; a stand-in for srun gives the results of the ranks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import pytest

from ddp_hpc.node_check.results import EARLIER, Problem, RankResult, Results
from ddp_hpc.queue.failed_nodes import failed_nodes, record_failed_node
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import calls, folder, job
from tests.batch.test_scripts_run import script, slurm
from tests.supervisor.test_any_program import TOUCH

__all__ = ["job"]

# Check number N has the results in the file results-N. The program is started otherwise.
CHECK = """
[[ "$*" != *ddp_hpc.supervisor.guard* ]] || exit 0
if [[ -n ${DDP_HPC_NODE_CHECK:-} ]]; then
  n=$(cat checks 2>/dev/null || echo 0); echo $((n + 1)) >checks
  [[ $(cat $DDP_HPC_NODE_CHECK/launch) == "$DDP_HPC_LAUNCH" ]] || exit 9
  echo "$*" >"args-$n"
  if [[ -e hook ]]; then . ./hook; fi
  [[ ! -e results-$n ]] || cp "results-$n" $DDP_HPC_NODE_CHECK/results.json
  exit 3
fi
n=$(cat starts 2>/dev/null || echo 0); echo $((n + 1)) >starts
echo "$*" >args-start
"""
GPU = Problem("product", "GPU 0 computed a wrong matrix product")


def write_results(job: Sandbox, number: int, problems: dict[str, Problem], nodes: str = "n1 n2") -> None:
    ranks = [
        RankResult(rank=rank, host=host, local_size=1, problems=(problems[host],) if host in problems else ())
        for rank, host in enumerate(nodes.split())
    ]
    results = Results(world_size=len(ranks), ranks=tuple(ranks))
    (job.work / f"results-{number}").write_text(json.dumps(asdict(results)))


def run(
    job: Sandbox,
    then: str = "exit 0",
    nodes: str = "n[1-2]",
    left_s: float = 3600,
    inherited: Mapping[str, str] = MappingProxyType({}),
    **options: object,
) -> subprocess.CompletedProcess[bytes]:
    """Slurm job 7, whose srun checks the nodes and then runs the bash text `then`."""
    job.launcher("srun", then=CHECK + then)
    environ = {**inherited, "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + left_s))}
    environ["SLURM_JOB_NODELIST"] = nodes
    command = ("./program.py",)
    return job.run(
        script("generic_slurm", command=command, num_nodes=2, **options), **slurm(job, 2, **environ)
    )


def count(job: Sandbox, name: str) -> int:
    path = job.work / name
    return int(path.read_text()) if path.exists() else 0


def names(run_dir: Path) -> list[str]:
    return [each.node for each in failed_nodes(run_dir)]


def test_without_spare_nodes_nothing_is_checked(job: Sandbox) -> None:
    assert run(job).returncode == 0
    assert (count(job, "checks"), count(job, "starts")) == (0, 1)


def test_an_inherited_request_does_not_replace_the_program(job: Sandbox) -> None:
    assert run(job, inherited={"DDP_HPC_NODE_CHECK": "/tmp"}).returncode == 0
    assert (count(job, "checks"), count(job, "starts")) == (0, 1)


def test_with_spare_nodes_a_bad_node_is_replaced_and_the_new_one_is_checked(job: Sandbox) -> None:
    write_results(job, 0, {"n2": GPU})
    write_results(job, 1, {}, "n1 n3")
    done = run(job, nodes="n[1-3]", spare_nodes=1)
    assert done.returncode == 0, done.stderr
    assert f"ddp-hpc: node n2: {GPU.text}; replaced by n3\n" in done.stdout.decode()
    assert b"ddp-hpc: 2 nodes checked in 0 s\n" in done.stdout
    arguments = [(job.work / f"args-{number}").read_text().split()[0] for number in (0, 1, "start")]
    assert arguments == ["--nodelist=n1,n2", "--nodelist=n1,n3", "--nodelist=n1,n3"]
    assert names(folder(job)) == ["n2"]


def test_if_the_new_node_is_bad_too_the_ranks_are_not_started(job: Sandbox) -> None:
    folder(job, state="requeue 60 no time left\n", attempts="1 6 0 1700000000\n")
    write_results(job, 0, {"n2": GPU})
    write_results(job, 1, {"n3": GPU}, "n1 n3")
    done = run(job, nodes="n[1-3]", spare_nodes=1)
    assert (done.returncode, count(job, "starts"), calls(job, "scontrol")[0]) == (75, 0, "requeue 7")
    assert (
        f"ddp-hpc: stopped at step 60 before its ranks were started: node n3: {GPU.text}; too few nodes are "
        "left; this job is requeued, and attempt 1 begins\n"
    ) in done.stdout.decode()
    assert names(folder(job)) == ["n2", "n3"]
    assert (folder(job) / "state").read_text() == "requeue 60 no time left\n", "another job can resume it"
    assert (folder(job) / "attempts").read_text() == "1 6 0 1700000000\n"


def test_a_warning_names_the_bad_node_and_the_ranks_are_started(job: Sandbox) -> None:
    write_results(job, 0, {"n2": GPU})
    done = run(job, node_check="warn")
    assert (done.returncode, count(job, "starts")) == (0, 1)
    assert done.stderr.decode() == f"warning: node n2: {GPU.text}\n"
    assert names(folder(job)) == []


def test_a_problem_of_all_nodes_is_said_in_one_line(job: Sandbox) -> None:
    problem = Problem("torch", "torch cannot be imported (No module named 'torch')")
    write_results(job, 0, {"n1": problem, "n2": problem})
    done = run(job, nodes="n[1-3]", spare_nodes=1)
    assert (done.returncode, count(job, "starts"), count(job, "checks")) == (0, 1, 1)
    assert done.stderr.decode() == (
        f"warning: node check: {problem.text}, on 2 of 2 nodes; no node is replaced\n"
    )


def test_if_the_check_cannot_run_the_ranks_are_started(job: Sandbox) -> None:
    done = run(job, node_check="replace")
    assert (done.returncode, count(job, "starts")) == (0, 1)
    assert done.stderr.decode() == (
        "warning: node check: it could not run: srun exited with code 3 without results; no node is "
        "replaced\n"
    )


def test_results_of_an_earlier_check_do_not_count(job: Sandbox) -> None:
    directory = folder(job) / "node_check"
    directory.mkdir()
    write_results(job, 5, {"n2": GPU})
    (job.work / "results-5").rename(directory / "results.json")
    done = run(job, node_check="replace")
    assert b"it could not run" in done.stderr


@pytest.mark.check
def test_a_launcher_that_waits_after_the_results_is_ended(
    job: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(job, 0, {"n2": GPU})
    (job.work / "hook").write_text("cp results-0 $DDP_HPC_NODE_CHECK/results.json; exec sleep 300\n")
    begin_s = time.monotonic()
    done = run(job, node_check="warn")
    assert (done.returncode, count(job, "starts")) == (0, 1)
    assert time.monotonic() - begin_s < 40


def test_a_job_that_is_cancelled_during_the_check_starts_no_ranks(job: Sandbox) -> None:
    write_results(job, 0, {"n2": GPU})
    (job.work / "hook").write_text("kill -TERM $PPID; sleep 1\n")
    done = run(job, node_check="replace")
    assert (done.returncode, count(job, "starts")) == (143, 0)
    assert names(folder(job)) == []
    text = "before its ranks were started; the job received SIGTERM before the end of its walltime, so no"
    assert text in done.stdout.decode()
    assert not (folder(job) / "attempts").exists(), "a start without ranks is not an attempt"
    command, why = (folder(job) / "resume").read_text().splitlines()
    assert command.endswith(f"sbatch {folder(job) / 'job.sh'}")
    assert text in why


def test_a_job_whose_walltime_ends_during_the_check_is_not_run_again(job: Sandbox) -> None:
    (job.work / "hook").write_text("kill -TERM $PPID; sleep 1\n")
    done = run(job, node_check="replace", left_s=20.0)
    assert (done.returncode, count(job, "starts"), calls(job, "scontrol")[1:]) == (1, 0, [])
    assert (
        b"error: this job had too little time to check its nodes, and stopped before its ranks were started; "
        b"increase the walltime, then resume with: cd "
    ) in done.stderr


def test_without_spare_nodes_another_job_runs_without_the_bad_node(job: Sandbox) -> None:
    write_results(job, 0, {"n2": GPU})
    done = run(job, node_check="replace")
    assert (done.returncode, count(job, "starts"), names(folder(job))) == (75, 0, ["n2"])
    assert calls(job, "scontrol")[0] == "requeue 7"
    assert b"stopped before its ranks were started: node n2: GPU 0 computed a wrong matrix product" in (
        done.stdout
    )
    assert b"; this job is requeued, and attempt 1 begins\n" in done.stdout


def test_a_job_that_gets_a_node_again_that_had_failed_is_not_run_again(job: Sandbox) -> None:
    folder(job)
    record_failed_node(folder(job), "n2", GPU.text)
    write_results(job, 0, {"n2": GPU})
    done = run(job, node_check="replace")
    assert (done.returncode, count(job, "starts"), calls(job, "scontrol")) == (1, 0, [])
    assert (
        "error: this job was allocated a node that had failed before, and stopped before its ranks were "
        f"started: node n2: {GPU.text}"
    ) in done.stderr.decode()


def test_the_nodes_are_checked_before_a_restart_too(job: Sandbox) -> None:
    for number in (0, 1):
        write_results(job, number, {})
    done = run(job, f"{TOUCH} [[ $n != 0 ]] || kill -9 $$", node_check="warn")
    assert (done.returncode, count(job, "starts"), count(job, "checks")) == (0, 2, 2), done.stdout


def test_if_a_node_is_bad_before_a_restart_the_job_ends_as_without_restarts(job: Sandbox) -> None:
    write_results(job, 0, {})
    write_results(job, 1, {"n2": GPU})
    done = run(job, f"{TOUCH} kill -9 $$", node_check="replace")
    assert (count(job, "starts"), count(job, "checks")) == (1, 2)
    why = f"node n2: {GPU.text}; the job has no spare nodes"
    assert f"ddp-hpc: the ranks are not started again in this job: {why}\n" in done.stdout.decode()


def test_a_restart_needs_enough_time_after_the_check_too(job: Sandbox) -> None:
    for number in (0, 1):
        write_results(job, number, {})
    short = "while ((n == 1 && SLURM_JOB_END_TIME - $(date +%s) >= 120)); do sleep 0.2; done\n"
    (job.work / "hook").write_text(short)
    done = run(job, f"{TOUCH} kill -9 $$", node_check="warn", left_s=127.0)
    assert count(job, "starts") == 1
    assert b"s of the walltime are left, and a restart needs 120 s" in done.stdout


def test_programs_that_cannot_check_the_nodes_are_started_with_a_warning(job: Sandbox) -> None:
    done = run(job, node_check="warn", env_style="none")
    assert (done.returncode, count(job, "starts"), count(job, "checks")) == (0, 1, 0)
    assert b"warning: the nodes are not checked before a start, because the program is not" in done.stderr


# Ranks that a killed launcher may have left on other nodes


def without_list_of_steps(job: Sandbox) -> None:
    """Slurm does not say whether steps are left."""
    job.program("scontrol", "#!/bin/bash\n[[ $* != *'show step'* ]] || exit 1\n")


def killed_once(job: Sandbox, **options: object) -> subprocess.CompletedProcess[bytes]:
    """The launcher is killed in its first start."""
    without_list_of_steps(job)
    return run(job, f"{TOUCH} ((n)) && exit 0; kill -9 $$", **options)


@pytest.mark.check
def test_if_steps_may_be_left_the_check_ends_them_before_the_restart(job: Sandbox) -> None:
    write_results(job, 0, {})
    (job.work / "hook").write_text("echo ${DDP_HPC_EARLIER_LAUNCHES:-} >>earlier\n")
    done = killed_once(job)
    assert (done.returncode, count(job, "checks"), count(job, "starts")) == (0, 1, 2), done.stdout
    [earlier] = (job.work / "earlier").read_text().split()
    assert f"DDP_HPC_LAUNCH={earlier}" not in job.words(), "the second start has another value"


@pytest.mark.check
@pytest.mark.parametrize(
    "problems",
    [
        {"n2": Problem(EARLIER, "process 7 of an earlier start of the ranks could not be killed")},
        None,
    ],
)
def test_if_the_check_does_not_end_them_the_ranks_are_not_started_again(
    job: Sandbox, problems: dict[str, Problem] | None
) -> None:
    if problems is not None:
        write_results(job, 0, problems)
    done = killed_once(job)
    assert (count(job, "checks"), count(job, "starts")) == (1, 1)
    assert (
        b"not started again in this job: the launcher was killed, and its ranks may still be running, "
        b"because the node check, which kills them, was incomplete: " in done.stdout
    )


@pytest.mark.check
def test_a_program_that_cannot_check_nodes_is_not_started_again(job: Sandbox) -> None:
    done = killed_once(job, env_style="none")
    assert (count(job, "checks"), count(job, "starts")) == (0, 1)
    assert (
        b"not started again in this job: the launcher was killed, and its ranks may still be running\n"
        in done.stdout
    )
