"""The test cluster behaves like a real cluster, on which the other tests rely."""

import subprocess
from pathlib import Path

import pytest

from .cluster import Cluster, ClusterError, JobEnd
from .configuration import has_cgroup_v1

pytestmark = pytest.mark.slurm


def test_srun_starts_a_task_on_each_node(cluster: Cluster) -> None:
    done = cluster.run(["srun", "--nodes=2", "--ntasks-per-node=1", "hostname"])
    assert sorted(done.stdout.split()) == cluster.node_names


def test_every_host_knows_the_address_of_every_node(cluster: Cluster) -> None:
    for host in ["head", *cluster.node_names]:
        for name, address in cluster.addresses.items():
            assert cluster.run(["getent", "hosts", name], node=host).stdout.split()[0] == address


def test_a_node_can_connect_to_another_one(cluster: Cluster) -> None:
    first, second = cluster.node_names
    listen = f"import socket; s = socket.create_server(('{second}', 5000)); c, _ = s.accept(); c.send(b'hi')"
    with subprocess.Popen(
        cluster.command(["python", "-c", listen], node=second), env=cluster.environment()
    ) as server:
        call = (
            "import socket, time\n"
            "for _ in range(100):\n"
            f"    try: c = socket.create_connection(('{second}', 5000), 2); break\n"
            "    except OSError: time.sleep(0.05)\n"
            "print(c.recv(2).decode(), c.getsockname()[0])"
        )
        done = cluster.run(["python", "-c", call], node=first, timeout=20)
        server.wait(20)
    assert done.stdout.split() == ["hi", cluster.addresses[first]]


def test_a_step_has_a_step_id_and_a_rank(cluster: Cluster) -> None:
    script = 'echo "$SLURM_STEP_ID $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID"'
    done = cluster.run(["srun", "--nodes=2", "--ntasks-per-node=2", "sh", "-c", script])
    assert sorted(done.stdout.splitlines()) == ["0 0 0 0", "0 1 1 0", "0 2 0 1", "0 3 1 1"]


def test_a_batch_shell_looks_like_rank_0_but_has_no_step_id_of_a_task(cluster: Cluster) -> None:
    text = '#!/bin/sh\necho "$SLURM_PROCID of $SLURM_NTASKS, step ${SLURM_STEP_ID-none}"\n'
    job_id = cluster.sbatch(text, "--nodes=2", "--ntasks-per-node=2")
    assert cluster.wait(job_id) == JobEnd("COMPLETED", 0)
    # Slurm 22.05 sets no ID, and 26.05 sets -5.
    assert cluster.job_output(job_id) in ("0 of 4, step none\n", "0 of 4, step -5\n")


def test_sbatch_accepts_a_file_arguments_variables_and_a_directory(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job with a blank.sh"
    script.write_text('#!/bin/sh\n#SBATCH --output=out-%j.txt\necho "$GREETING from $(pwd)"\nexit 7\n')
    job_id = cluster.sbatch(script, "--partition=long", env={"GREETING": "hello 'you'"}, cwd=tmp_path)
    assert cluster.wait(job_id) == JobEnd("FAILED", 7)
    assert (tmp_path / f"out-{job_id}.txt").read_text() == f"hello 'you' from {tmp_path}\n"
    assert cluster.job_output(job_id) == f"hello 'you' from {tmp_path}\n"


def test_the_exit_code_of_a_job_killed_by_a_signal_is_128_plus_its_number(cluster: Cluster) -> None:
    job_id = cluster.sbatch("#!/bin/sh\nkill -KILL $$\n")
    assert cluster.wait(job_id) == JobEnd("FAILED", 137)


def test_a_refused_submission_contains_the_reason(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="invalid partition specified: nosuch"):
        cluster.sbatch("#!/bin/sh\n", "--partition=nosuch")


def test_the_exit_code_of_a_command_is_returned(cluster: Cluster) -> None:
    assert cluster.run(["srun", "sh", "-c", "exit 3"]).returncode == 3
    assert cluster.run(["sh", "-c", "exit 4"], node=cluster.node_names[1]).returncode == 4


def test_the_callers_environment_is_not_passed_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("PMI_RANK", "5")
    script = 'echo "${SLURM_PROCID-none} ${PMI_RANK-none} $MINE"'
    assert cluster.run(["sh", "-c", script], env={"MINE": "yes"}).stdout == "none none yes\n"


def test_a_command_that_takes_too_long_is_ended_with_its_job(cluster: Cluster) -> None:
    script = "echo started; exec sleep 1000"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        cluster.run(["srun", "--nodes=2", "sh", "-c", script], timeout=2)
    assert caught.value.output == "started\nstarted\n"
    assert cluster.run(["squeue", "--noheader", "--states=running"]).stdout == ""


def test_waiting_too_long_cancels_the_job_and_shows_its_output(cluster: Cluster) -> None:
    job_id = cluster.sbatch("#!/bin/sh\necho still here\nexec sleep 1000\n")
    with pytest.raises(ClusterError, match=r"after 2 s: RUNNING .*\nstill here"):
        cluster.wait(job_id, timeout=2)
    assert cluster.wait(job_id).state == "CANCELLED"


@pytest.mark.skipif(not has_cgroup_v1(), reason="without cgroup v1 Slurm loses sight of such processes")
def test_a_job_ends_with_all_its_processes_even_detached_ones(cluster: Cluster) -> None:
    job_id = cluster.sbatch("#!/bin/sh\nsetsid sleep 98765 >/dev/null 2>&1 &\nsleep 0.3\n")
    assert cluster.wait(job_id).state == "COMPLETED"
    cluster.wait_idle()
    found = "".join(cluster.run(["ps", "-eo", "args"], node=node).stdout for node in cluster.node_names)
    assert "slurmd" in found
    assert "sleep 98765" not in found


def test_simulated_gpus_are_allocated_one_by_one(cluster: Cluster) -> None:
    argv = ["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1"]
    done = cluster.run([*argv, "sh", "-c", 'echo "$SLURM_LOCALID $CUDA_VISIBLE_DEVICES"'])
    assert sorted(done.stdout.splitlines()) == ["0 0", "0 0", "1 1", "1 1"]


def test_a_node_can_be_started_again_after_a_power_loss(cluster: Cluster) -> None:
    lost = cluster.node_names[1]
    cluster.power_off(lost)
    with pytest.raises(ClusterError, match=f"node {lost} is not up"):
        cluster.run(["true"], node=lost)
    cluster.power_on(lost)
    cluster.wait_idle()
    done = cluster.run(["srun", f"--nodelist={lost}", "hostname"])
    assert done.stdout == f"{lost}\n"
