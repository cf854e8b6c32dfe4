"""The environment of ranks under the stand-ins for launchers, and the requests that these refuse."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.discovery.placement_problems import check
from ddp_hpc.discovery.rank_placement import RankPlace
from tests.environments import load
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]
# Variables with ports, a process id, and files of a cluster, which differ here.
NOT_HERE = {"SLURM_CONF", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "SLURM_TASK_PID"}
NOT_HERE |= {"SLURM_WORKING_CLUSTER"}


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


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_a_task_of_srun_has_the_variables_recorded_with_the_real_srun(
    rehearse: Rehearse,
    script: Script,
    tmp_path: Path,
    dump: str,
    mpi: str,
) -> None:
    line = f"srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --mpi={mpi} {dump}"
    job = script("slurm", "--nodes=2", "--ntasks-per-node=2", "--time=10", line)
    done = rehearse(job, "--ranks-per-node", "2")
    assert done.exit_code == 0, done.stdout + done.stderr
    ranks = seen(tmp_path, "SLURM_PROCID")
    same = (
        "PROCID",
        "LOCALID",
        "NODEID",
        "NTASKS",
        "STEP_NUM_TASKS",
        "STEP_TASKS_PER_NODE",
        "GTIDS",
        "MPI_TYPE",
    )
    for rank in range(4):
        recorded = load(f"srun-{mpi}-26", rank)
        names = {name for name in recorded if name.startswith(("SLURM", "SRUN", "PMI_"))}
        names -= {name for name in names if name.startswith("SLURM_PMIX")}
        assert names - NOT_HERE <= ranks[rank].keys()
        for name in (f"SLURM_{name}" for name in same):
            assert ranks[rank].get(name) == recorded.get(name), name
        assert ranks[rank].get("PMIX_RANK") == recorded.get("PMIX_RANK")
        assert ("PMI_RANK" in ranks[rank]) == ("PMI_RANK" in recorded)


def test_the_batch_shell_has_the_variables_of_task_0_as_under_slurm(
    rehearse: Rehearse, script: Script, tmp_path: Path, dump: str
) -> None:
    directives = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=10")
    rehearse(script("slurm", *directives, dump))
    (environ,) = seen(tmp_path, "SLURM_PROCID")
    recorded = load("sbatch-shell-26", 0)
    names = {name for name in recorded if name.startswith("SLURM")} - NOT_HERE
    assert names - environ.keys() <= {"SLURM_MEM_PER_CPU", "SLURM_NODE_ALIASES"}
    assert not {name for name in environ if name.startswith("SLURM")} - recorded.keys()
    for name in ("PROCID", "LOCALID", "NTASKS", "TASKS_PER_NODE", "NNODES", "JOB_GPUS", "GPUS_ON_NODE"):
        assert environ[f"SLURM_{name}"] == recorded[f"SLURM_{name}"], name
    for name in ("STEP_ID", "STEPID", "JOB_EXCLUSIVE", "JOB_OVERSUBSCRIBE", "OOM_KILL_STEP"):
        assert environ.get(f"SLURM_{name}") == recorded.get(f"SLURM_{name}"), name


@pytest.mark.check
def test_slurmstepd_and_srun_write_what_those_of_slurm_write(rehearse: Rehearse, script: Script) -> None:
    lines = [
        "srun -K bash -c 'test $SLURM_PROCID = 0 && exec sleep 60; exit 3'; echo code $?",
        "srun --ntasks=1 nosuch; srun --version",
        "(sleep 1; scancel $SLURM_JOB_ID) & srun sleep 60",
    ]
    log = rehearse(script("slurm", "--nodes=2", "--ntasks-per-node=1", *lines)).stdout
    for line in (
        r"srun: Terminating StepId=JOBID\.0",
        r"STEPD \*\*\* STEP JOBID\.0 ON node1 CANCELLED AT TIME DUE TO TASK FAILURE \*\*\*",
        "srun: error: node1: task 0: Terminated",
        "code 143",
        r"STEPD execve\(\): nosuch: No such file or directory",
        r"slurm 26\.05\.3",
        r"STEPD \*\*\* STEP JOBID\.2 ON node1 CANCELLED AT TIME DUE to SIGNAL Terminated \*\*\*",
        r"STEPD \*\*\* JOB JOBID ON node1 CANCELLED AT TIME DUE to SIGNAL Terminated \*\*\*",
    ):
        pattern = line.replace("STEPD", r"\[TIME\.\d{3}] error:").replace("JOBID", r"\d+")
        pattern = pattern.replace("TIME", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
        assert re.search(f"^{pattern}$", log, re.MULTILINE), log


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


# The options in the script select the kind of mpiexec.
REFUSED = {
    "slurm": [
        # Messages of Slurm 22.05 and MPICH 5.0.
        ("srun --ppn 2 true", "srun: unrecognized option '--ppn'", 255),
        ("srun -y true", "srun: invalid option -- 'y'", 255),
        ("srun --ntasks", "srun: option '--ntasks' requires an argument", 255),
        ("srun -n x true", 'srun: error: Invalid numeric value "x" for --ntasks.', 1),
        ("srun --nodes=2-x true", 'srun: error: "2-x" is not a valid node count', 255),
        ("srun --nodes=3 true", "srun: error: Only allocated 2 nodes asked for 3", 1),
        ("srun --ntasks=9 true", "More processors requested than permitted", 1),
        ("srun", "srun: fatal: No command given to execute.", 1),
        ("mpiexec --frob 2 true", "unrecognized argument frob", 255),
        ("scontrol frob", "invalid keyword: frob", 1),
        ("squeue --frob", "squeue: unrecognized option '--frob'", 1),
        ("scancel --frob", "scancel: unrecognized option '--frob'", 1),
        ("scancel --signal=FOO $SLURM_JOB_ID", "Unknown job signal: FOO", 1),
        ("scontrol requeue 999", "Invalid job id specified for job 999", 1),
        ("srun nosuchprogram", "error: execve(): nosuchprogram: No such file or directory", 2),
        ("sbatch nofile", "sbatch: error: Unable to open file nofile", 1),
    ],
    # Open MPI 5.0.
    "pbs": [
        ("mpiexec --map-by node --ppn 2 true", "  Option: --ppn", 213),
        ("mpiexec --map-by node --cpu-bind none true", "  Option: --cpu-bind", 213),
        ("qsub -Z", "qsub: invalid option -- 'Z'", 2),
    ],
}


@pytest.mark.parametrize("scheduler", REFUSED)
def test_options_unknown_to_the_real_program_are_refused_with_its_message(
    rehearse: Rehearse, script: Script, scheduler: str
) -> None:
    cases = REFUSED[scheduler]
    asks = ["-l select=2", "-j oe"] if scheduler == "pbs" else ["--nodes=2"]
    done = rehearse(script(scheduler, *asks, *(f'{line}; echo "=$?"' for line, _, _ in cases)))
    answers = re.split("^=", done.stdout, flags=re.MULTILINE)
    for number, (line, said, code) in enumerate(cases):
        assert said in done.stdout, line
        assert answers[number + 1].startswith(f"{code}\n"), line


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
    assert "srun: forcing job termination\n" in done.stdout
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
