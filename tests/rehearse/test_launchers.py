"""The environment of ranks under the stand-ins for launchers, and the requests that these refuse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.discovery.placement_problems import check
from ddp_hpc.discovery.rank_placement import RankPlace
from tests.environments import load
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]


def seen(tmp_path: Path, key: str) -> list[dict[str, str]]:
    """The environments that DUMP has written, sorted by a variable."""
    found = [json.loads(path.read_text()) for path in (tmp_path / "seen").iterdir()]
    return sorted(found, key=lambda environ: int(environ[key]))


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """A command that records the environment of a rank."""
    (tmp_path / "seen").mkdir()
    program = tmp_path / "dump.py"
    program.write_text(
        "import json, os, sys\n"
        f"open(f'{tmp_path}/seen/{{os.getpid()}}', 'w').write(json.dumps(dict(os.environ)))\n"
    )
    return f"python {program}"


# The variables that tell a task its place in the step.
OF_TASK = "PROCID LOCALID NODEID NTASKS STEP_NUM_TASKS STEP_TASKS_PER_NODE GTIDS MPI_TYPE"


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_a_task_of_srun_has_the_variables_recorded_with_the_real_srun(
    rehearse: Rehearse, script: Script, tmp_path: Path, dump: str, mpi: str
) -> None:
    line = f"srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --mpi={mpi} {dump}"
    job = script("slurm", "--nodes=2", "--ntasks-per-node=2", "--time=10", line)
    done = rehearse(job, "--ranks-per-node", "2")
    assert done.exit_code == 0, done.stdout + done.stderr
    ranks = seen(tmp_path, "SLURM_PROCID")
    for rank in range(4):
        recorded = load(f"srun-{mpi}-26", rank)
        for name in (f"SLURM_{name}" for name in OF_TASK.split()):
            assert ranks[rank].get(name) == recorded.get(name), name
        assert ("PMI_RANK" in ranks[rank]) == ("PMI_RANK" in recorded)


def test_the_batch_shell_has_the_variables_recorded_under_slurm(
    rehearse: Rehearse, script: Script, tmp_path: Path, dump: str
) -> None:
    directives = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=10")
    rehearse(script("slurm", *directives, dump))
    (environ,) = seen(tmp_path, "SLURM_PROCID")
    recorded = load("sbatch-shell-26", 0)
    assert not {name for name in environ if name.startswith("SLURM")} - recorded.keys()
    for name in ("PROCID", "LOCALID", "NTASKS", "TASKS_PER_NODE", "NNODES", "JOB_GPUS", "GPUS_ON_NODE"):
        assert environ[f"SLURM_{name}"] == recorded[f"SLURM_{name}"], name


def test_open_mpi_passes_only_named_variables_to_other_nodes(
    rehearse: Rehearse, script: Script, tmp_path: Path, dump: str
) -> None:
    launch = f"mpiexec -n 4 --map-by ppr:2:node -x PATH -x KNOWN {dump}"
    lines = ["-l select=2", "export KNOWN=1 UNKNOWN=1 PATH", launch]
    done = rehearse(script("pbs", *lines), "--ranks-per-node", "2")
    assert done.exit_code == 0, done.stdout + done.stderr
    ranks = seen(tmp_path, "OMPI_COMM_WORLD_RANK")
    places = [(rank["OMPI_COMM_WORLD_LOCAL_RANK"], rank["OMPI_COMM_WORLD_SIZE"]) for rank in ranks]
    assert places == [("0", "4"), ("1", "4"), ("0", "4"), ("1", "4")]
    assert [rank.get("UNKNOWN", "") + rank["KNOWN"] for rank in ranks] == ["11", "11", "1", "1"]


REFUSED = [
    ("srun --ppn 2 true", "srun: unrecognized option '--ppn'"),
    ("srun --ntasks", "srun: option '--ntasks' requires an argument"),
    ("srun -n x true", 'srun: error: Invalid numeric value "x" for --ntasks.'),
    ("srun --nodes=3 true", "srun: error: Only allocated 2 nodes asked for 3"),
    ("srun --ntasks=9 true", "More processors requested than permitted"),
    ("mpiexec --frob 2 true", "mpiexec: unrecognized option '--frob'"),
    ("scontrol requeue 999", "Invalid job id specified for job 999"),
]


def test_what_the_real_program_refuses_is_refused(rehearse: Rehearse, script: Script) -> None:
    lines = [f'{line} && echo "ran: {line}"' for line, _ in REFUSED]
    done = rehearse(script("slurm", "--nodes=2", *lines))
    assert "ran: " not in done.stdout
    for line, said in REFUSED:
        assert said in done.stdout, line


@pytest.mark.check
def test_srun_lets_the_other_tasks_live_without_kill_on_bad_exit(rehearse: Rehearse, script: Script) -> None:
    task = "bash -c 'if ((SLURM_PROCID)); then exit 3; fi; sleep 1.5; echo lived'"
    done = rehearse(script("slurm", "--nodes=2", f"srun {task}", 'echo "code $?"'))
    assert "lived\n" in done.stdout
    assert "srun: error: node2: task 1: Exited with exit code 3" in done.stdout
    assert done.stdout.endswith("code 3\n")


@pytest.mark.check
def test_srun_kills_all_tasks_on_sigterm(rehearse: Rehearse, script: Script) -> None:
    task = "bash -c 'trap \"echo heard\" TERM; for ((i = 0; i < 100; i++)); do sleep 0.1; done'"
    lines = [f"srun {task} &", "sleep 1", "kill -TERM $!", "wait $!", 'echo "code $?"']
    done = rehearse(script("slurm", "--nodes=1", *lines), timeout_s=20.0)
    assert "heard" not in done.stdout
    assert done.stdout.endswith("code 137\n")


@pytest.mark.check
def test_scancel_signals_the_tasks_and_not_srun(rehearse: Rehearse, script: Script) -> None:
    task = "bash -c 'trap \"echo heard; exit 0\" TERM; for ((i = 0; i < 100; i++)); do sleep 0.1; done'"
    lines = [f"srun {task} &", "sleep 1", "scancel --signal=TERM $SLURM_JOB_ID", "wait $!", 'echo "code $?"']
    done = rehearse(script("slurm", "--nodes=1", *lines), timeout_s=20.0)
    assert "heard\n" in done.stdout
    assert done.stdout.endswith("code 0\n")


@pytest.mark.check
def test_mpi_works_under_srun_only_with_pmi2(rehearse: Rehearse, script: Script) -> None:
    size = "python -c 'from mpi4py import MPI; print(\"size\", MPI.COMM_WORLD.Get_size(), flush=True)'"
    done = rehearse(script("slurm", "--nodes=2", f"srun --mpi=pmi2 {size}", f"srun --mpi=none {size}"))
    assert done.stdout.count("size 2\n") == 2
    assert done.stdout.count("size 1\n") == 2


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Limits this process and those that it starts to one CPU, as a login node can limit a user."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


PLACE = """import json, os
from dataclasses import asdict
from ddp_hpc.discovery.rank_placement import Device, own_place
from ddp_hpc.discovery.world import discover
cpus = sorted(os.sched_getaffinity(0))
print(json.dumps(asdict(own_place(discover(os.environ), Device(), cpus, {}, os.environ))), flush=True)
"""


@pytest.mark.check
@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize(
    ("scheduler", "lines"),
    [
        ("slurm", ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4096", "srun python place.py")),
        ("pbs", ("-l select=2:ncpus=64", "cd $PBS_O_WORKDIR", "mpiexec -n 4 -ppn 2 python place.py")),
    ],
)
def test_the_cpus_of_the_login_node_cause_no_warning(
    rehearse: Rehearse, script: Script, tmp_path: Path, scheduler: str, lines: tuple[str, ...]
) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    done = rehearse(script(scheduler, *lines))
    places = [RankPlace(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(places) == 4, done.stdout + done.stderr
    assert check(places, "gloo") == []
