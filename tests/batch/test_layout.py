"""Ranks, cores and devices per node, and warnings about the limits of queues."""

from __future__ import annotations

import re

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.rejection_warnings import advice
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import lay_out
from ddp_hpc.sites.site import load_site

TRAIN = ("python", "-m", "ddp_hpc.train")


def test_the_default_is_one_rank_per_device() -> None:
    assert lay_out(Job(), load_site("polaris")).ranks_per_node == 4
    assert lay_out(Job(ranks_per_node=2), load_site("polaris")).ranks_per_node == 2
    assert lay_out(Job(gpus_per_node=8), load_site("generic_slurm")).ranks_per_node == 8
    assert lay_out(Job(), load_site("generic_slurm")).ranks_per_node == 1


def test_a_bound_rank_has_no_more_threads_than_the_cores_it_is_bound_to() -> None:
    assert lay_out(Job(ranks_per_node=1), load_site("polaris")).threads_per_rank == 8
    assert lay_out(Job(ranks_per_node=1, launcher="torchrun"), load_site("polaris")).threads_per_rank == 32


@pytest.mark.parametrize(
    ("job", "has_logs"),
    [
        (Job(num_nodes=2), False),
        (Job(num_nodes=2, rank_logs=True), True),
        (Job(num_nodes=3), True),
        (Job(num_nodes=3, rank_logs=False), False),
        (Job(num_nodes=3, command=("python", "train.py")), True),
        (Job(num_nodes=3, command=("python", "train.py"), env_style="none"), False),
        (Job(num_nodes=3, command=("python", "train.py"), env_style="none", launcher="torchrun"), True),
        (Job(num_nodes=3, command=("./run.sh",)), True),
    ],
)
def test_the_ranks_of_large_jobs_have_logs_of_their_own(job: Job, has_logs: bool) -> None:
    assert ("export DDP_HPC_RANK_LOGS=1" in render(job, load_site("polaris"))) is has_logs


@pytest.mark.parametrize(
    ("job", "profile", "said"),
    [
        (Job(ranks_per_node=8), "polaris", "Polaris (ALCF) has 4 devices per node"),
        (
            Job(ranks_per_node=3),
            "polaris",
            "4 devices cannot be divided evenly among 3 ranks per node. Use --ranks-per-node 1, 2, 4",
        ),
        (
            Job(ranks_per_node=5, cpus_per_node=4),
            "generic_slurm",
            "5 ranks per node were requested on 4 cores",
        ),
        (Job(gpus_per_node=2), "polaris", "allocates whole nodes with 4"),
        (Job(cpus_per_node=256), "perlmutter", "has 128"),
    ],
)
def test_a_request_beyond_the_size_of_a_node_is_refused(job: Job, profile: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        lay_out(job, load_site(profile))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("job", "profile", "said"),
    [
        (Job(launcher="torchrum"), "polaris", 'did you mean "torchrun"'),
        (Job(launcher="srun"), "polaris", "does not work under PBS. Use mpiexec or torchrun."),
        (Job(launcher="srun"), "local", "does not work under profile local. Use mpiexec or torchrun."),
        (Job(launcher="mpiexec", mpi="pmi2"), "generic_slurm", "--mpi pmi2 is an option of srun"),
        (Job(name="sixteencharacter"), "generic_pbs", "PBS accepts at most 15"),
        (Job(num_nodes=2), "local", "profile local consists of this machine only"),
        (Job(queue="debug"), "local", "--queue debug was given"),
        (Job(filesystems="home"), "generic_slurm", "--filesystems home was given"),
        (
            Job(qos="debug"),
            "polaris",
            "Polaris (ALCF) uses PBS, and only Slurm has a QOS. Remove --qos.",
        ),
        (Job(qos="debug"), "perlmutter", "--queue sets the QOS. Remove --qos."),
        (Job(gpus_per_node=4), "crux", "Crux (ALCF) has none"),
        (Job(max_attempts=5), "local", "--max-attempts 5 was given"),
        (Job(num_nodes=2, min_nodes=1), "polaris", "--min-nodes 1 was given"),
        (
            Job(num_nodes=2, min_nodes=1, command=(*TRAIN, "--mesh=tp=8")),
            "perlmutter",
            "--min-nodes 1 is not possible: --mesh tp=8 needs 8 ranks, but 4 were started",
        ),
        (Job(num_nodes=2, spare_nodes=1), "polaris", "--spare-nodes 1 was given"),
        (Job(num_nodes=2, spare_nodes=1, launcher="mpiexec"), "generic_slurm", "Use --launcher srun"),
        (
            Job(num_nodes=2, spare_nodes=1, launcher_arg=("--cpu-bind=cores --exclude n7",)),
            "generic_slurm",
            "--launcher-arg --exclude cannot be combined with --spare-nodes",
        ),
        (
            Job(num_nodes=2, spare_nodes=1, directive=("-G 12",)),
            "generic_slurm",
            "--spare-nodes 1 was given, but --gpus is the number of GPUs of the whole job",
        ),
        (
            Job(rank_logs=True, env_style="none", command=("python", "train.py")),
            "polaris",
            "omit --rank-logs or --env-style none",
        ),
        (
            Job(launcher="torchrun", command=("./run.sh",)),
            "polaris",
            "can only start Python programs, not './run.sh'",
        ),
        (
            Job(launcher="torchrun", command=("python", "-c", "1")),
            "polaris",
            "cannot pass it the argument '-c'",
        ),
    ],
)
def test_an_option_that_the_scheduler_or_launcher_lacks_is_refused(job: Job, profile: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(job, load_site(profile))
    assert said in str(caught.value)


def polaris_advice(**job: object) -> list[str]:
    return advice(Job(account="P", **job), load_site("polaris"))  # type: ignore[arg-type]


def test_restarts_are_attempts_too() -> None:
    warned = [line for line in slurm_advice(restarts=5, max_attempts=5) if "also counts restarts" in line]
    assert len(warned) == 1
    assert not [line for line in slurm_advice(restarts=5, max_attempts=6) if "restarts" in line]


def slurm_advice(**job: object) -> list[str]:
    return advice(Job(**job), load_site("generic_slurm"))  # type: ignore[arg-type]


def test_spare_nodes_of_a_job_with_one_node_cause_a_warning() -> None:
    [line] = [line for line in slurm_advice(num_nodes=1, spare_nodes=1) if "--spare-nodes" in line]
    assert "not if the node dies, because the supervisor runs on it" in line
    assert not [line for line in slurm_advice(num_nodes=2, spare_nodes=1) if "--spare-nodes" in line]


def test_a_job_within_the_limits_of_its_queue_causes_no_warning() -> None:
    assert polaris_advice(num_nodes=2, queue="debug", walltime_s=3600) == []


@pytest.mark.parametrize(
    ("num_nodes", "hours", "fits"), [(24, 3, True), (24, 4, False), (25, 6, True), (9, 1, False)]
)
def test_a_queue_can_have_longer_walltimes_for_larger_jobs(num_nodes: int, hours: int, fits: bool) -> None:
    assert (polaris_advice(num_nodes=num_nodes, queue="prod", walltime_s=hours * 3600) == []) is fits


def test_a_request_over_the_limits_is_warned_about_with_the_date_of_the_fact() -> None:
    (line,) = polaris_advice(num_nodes=3, queue="debug", walltime_s=3600)
    checked = load_site("polaris").checked
    assert line == (
        f"3 nodes for 01:00:00 exceed the limits of queue debug on {checked} (1-2 nodes for 00:05:00 to "
        "01:00:00), "
        "so the scheduler may reject the job"
    )


def lines_about_queues(profile: str, **job: object) -> list[str]:
    return [line for line in advice(Job(**job), load_site(profile)) if "queue" in line]  # type: ignore[arg-type]


def test_a_request_for_more_gpus_than_the_queue_gives_is_warned_about() -> None:
    (line,) = lines_about_queues("kestrel", queue="debug-gpu", walltime_s=3600)
    assert re.match(
        r"1 node with 4 GPUs for 01:00:00 exceed the limits of queue debug-gpu on \S+ "
        r"\(1-2 nodes and 2 GPUs up to 01:00:00\)",
        line,
    )


@pytest.mark.parametrize("job", [{"num_nodes": 2}, {"walltime_s": 73 * 3600}, {"gpus_per_node": 9}])
def test_a_request_that_no_queue_of_the_scheduler_takes_is_refused(job: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="takes 1 node and 8 GPUs up to 72:00:00"):
        lay_out(Job(**{"gpus_per_node": 2, **job}), load_site("cx3"))  # type: ignore[arg-type]


def test_a_site_where_jobs_request_single_gpus_gives_one_unless_another_number_is_requested() -> None:
    assert lay_out(Job(), load_site("cx3")).devices == 1
    assert lay_out(Job(gpus_per_node=0), load_site("cx3")).devices == 0
    assert lay_out(Job(), load_site("generic_pbs")).devices == 0


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (8, False)])
def test_if_pbs_counts_ranks_the_queue_counts_one_gpu_per_rank(ranks: int, fits: bool) -> None:
    assert (lines_about_queues("abci3", queue="rt_HG", ranks_per_node=ranks) == []) is fits


@pytest.mark.parametrize(
    ("job", "fits"),
    [
        ({"walltime_s": 24 * 3600}, True),
        ({"walltime_s": 1800, "qos": "boost_qos_dbg"}, True),
        ({"walltime_s": 1801, "qos": "boost_qos_dbg"}, False),
        ({"qos": "boost_qos_debug"}, False),
    ],
)
def test_limits_can_depend_on_a_qos_in_addition_to_the_partition(job: dict[str, object], fits: bool) -> None:
    assert (lines_about_queues("leonardo", **job) == []) is fits


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("perlmutter", "with constraint gpu may reject a job without GPUs"),
        ("derecho", "may reject a job without GPUs"),
        ("abci3", ""),
        ("cx3", ""),
        ("crux", ""),
    ],
)
def test_a_job_without_gpus_on_nodes_with_gpus_is_warned_about(profile: str, said: str) -> None:
    lines = advice(Job(account="P", gpus_per_node=0), load_site(profile))
    assert (said in lines[-1]) if said else (lines == [])


def test_a_job_without_gpus_goes_to_the_queue_for_them() -> None:
    assert lay_out(Job(account="P", gpus_per_node=0), load_site("abci3")).queue.name == "rt_HC"


def test_the_torchrun_agent_gets_all_gpus_if_the_step_requests_them() -> None:
    asked = render(Job(launcher="torchrun"), load_site("frontier"))
    (line,) = [line for line in asked.splitlines() if line.startswith("  srun ")]
    assert line.endswith(" --gpus-per-task=8 \\")
    assert "--gpu-bind" not in line


@pytest.mark.parametrize(
    ("launcher", "line"),
    [("", '  ibrun -np "$num_ranks" \\'), ("torchrun", '  ibrun -np "$num_nodes" \\')],
)
def test_ibrun_starts_ranks_and_agents_at_tacc(launcher: str, line: str) -> None:
    asked = render(Job(num_nodes=2, launcher=launcher), load_site("stampede3")).splitlines()
    assert line in asked
    assert f"#SBATCH --ntasks-per-node={1 if launcher else 4}" in asked
    assert not [one for one in asked if "mpiexec" in one]


def test_a_missing_account_is_reported_and_the_script_shows_how_to_set_it() -> None:
    site = load_site("polaris")
    assert advice(Job(), site)[-1].startswith("Polaris (ALCF) requires an account")
    assert "submit it with: qsub -A PROJECT SCRIPT\n" in render(Job(), site)
    assert "PROJECT" not in render(Job(account="mine"), site)
