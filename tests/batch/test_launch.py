"""`ddp-hpc launch`: the rendered script's launch line, in the shell of an allocation or on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.process_control import is_running
from ddp_hpc.discovery.visible_gpus import gpus_here
from ddp_hpc.launch.find_allocation import find_allocation
from ddp_hpc.launch.launch_here import Launch, plan
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox, clean_environ
from tests.batch.test_scripts_run import pbs
from tests.environments import load
from tests.fakes.site import PBS_MPIEXEC

PROGRAM = ("true", "two words", "$(touch hacked)", "a'b\"c", "line\nbreak", "", "--lr", "0.1")


def slurm(num_nodes: int, **extra: str) -> dict[str, str]:
    """A shell of a Slurm job whose nodes have 64 CPUs."""
    cpus = f"64(x{num_nodes})"
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "SLURM_SUBMIT_DIR": "/",
        **extra,
    }


def planned(
    environ: dict[str, str], profile: str = "", num_ranks: int | None = None, **job: object
) -> Launch:
    return plan(Job(**{"command": ("true",), **job}), profile, num_ranks, environ)  # type: ignore[arg-type]


def options(launch: Launch) -> list[str]:
    """The arguments between the launcher and the program."""
    return list(launch.argv[1 : launch.argv.index("true")])


def refused(environ: dict[str, str], profile: str = "", num_ranks: int | None = None, **job: object) -> str:
    with pytest.raises(RequestError) as caught:
        planned(environ, profile, num_ranks, **job)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The launch line


@pytest.mark.parametrize(
    ("profile", "version", "job"),
    [
        ("polaris", "PALS", {"ranks_per_node": 2, "fallback": "no-nccl", "env": {"NCCL_DEBUG": "A B$(id)'"}}),
        ("polaris", "PALS", {"launcher": "torchrun"}),
        ("generic_pbs", "HYDRA build details", {"cpus_per_node": 64, "ranks_per_node": 4}),
        ("generic_pbs", "mpirun (Open MPI) 5.0.7", {"cpus_per_node": 64, "ranks_per_node": 4}),
        ("perlmutter", "", {"mpi": "cray_shasta"}),
        ("perlmutter", "", {"launcher": "torchrun"}),
        ("perlmutter", "HYDRA", {"launcher": "mpiexec", "ranks_per_node": 2}),
    ],
)
def test_the_launcher_gets_the_same_arguments_and_environment_as_from_a_rendered_script(
    sandbox: Sandbox, profile: str, version: str, job: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_hpc.launch.capacity.cpus_here", lambda: 64)
    program = ("python", "a.py", "$x y") if job.get("launcher") == "torchrun" else PROGRAM
    site, asked = load_site(profile), Job(**{"num_nodes": 2, "command": program, **job})  # type: ignore[arg-type]
    started = "srun" if site.scheduler == "slurm" and asked.launcher != "mpiexec" else "mpiexec"
    sandbox.launcher(started, version=version)
    sandbox.program("torchrun_script.sh", "")
    (sandbox.work / "a.py").touch()
    monkeypatch.chdir(sandbox.work)
    given = pbs(sandbox, "a", "b")  # with the module command of the site
    if site.scheduler == "slurm":
        given = {**slurm(2), "SLURM_SUBMIT_DIR": str(sandbox.work), "BASH_ENV": given["BASH_ENV"]}
        given["SLURM_JOB_CPUS_PER_NODE"] = f"{site.node.threads}(x2)"  # whole nodes
    environ = sandbox.environ(**given, LD_LIBRARY_PATH="/mine")

    done = sandbox.run(render(asked, site), **given, LD_LIBRARY_PATH="/mine")
    assert done.returncode == 0, done.stderr
    words, seen = sandbox.words(), sandbox.seen()
    for passed in (f"{sandbox.work}/torchrun_script.sh", f"{sandbox.bin}/torchrun_script.sh"):
        words = ["torchrun_script.sh" if word == passed else word for word in words]
    # Only scripts set these variables.
    of_a_chain = {"DDP_HPC_RUN_DIR", "DDP_HPC_DEADLINE", "DDP_HPC_ATTEMPT"}
    of_a_chain |= {"DDP_HPC_THIS_ATTEMPT", "DDP_HPC_PROGRESS_FILE"}
    different = {"DDP_HPC_LAUNCH"}
    words = " ".join(f"[{word}]" for word in words)
    for name in of_a_chain:
        words = words.replace(f"[-x] [{name}] ", "")

    launch = plan(asked, profile, None, environ)
    subprocess.run(launch.argv, env=launch.environ(environ), check=True, cwd=sandbox.work)
    mine = [word.replace(f"{sandbox.bin}/torchrun", "torchrun") for word in sandbox.words()]
    assert " ".join(f"[{word}]" for word in mine) == words
    ours = sandbox.seen()
    exported = (
        {name for name in seen if name not in environ}
        - of_a_chain
        - {"SHLVL", "PWD", "OLDPWD", "_", "LC_CTYPE"}
    )
    if name := ours.get("DDP_HPC_KILL_DELAY_S"):
        # The supervisor of a script needs part of this time for requesting the next job.
        assert 0 < float(seen["DDP_HPC_KILL_DELAY_S"]) < float(name)
    different.add("DDP_HPC_KILL_DELAY_S")
    exported -= different
    assert {name: ours.get(name) for name in exported} == {name: seen[name] for name in exported}
    same = {name: value for name, value in launch.exports.items() if name not in different}
    assert {name: seen.get(name) for name in same} == same
    assert not of_a_chain & ours.keys()


@pytest.fixture
def profile_with(tmp_path: Path) -> Callable[[str], str]:
    """Writes a user's profile that extends generic_slurm with these lines, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(f'extends = "generic_slurm"\n{text}\n')
        return str(path)

    return write


def test_variables_that_the_site_unsets_are_removed(
    sandbox: Sandbox, profile_with: Callable[[str], str]
) -> None:
    sandbox.launcher("srun")
    environ = sandbox.environ(**slurm(1), BAD="1", GOOD="1", PATHS="old")
    profile = profile_with(
        '[env]\nunset = ["BAD", "ABSENT", "PATHS"]\nmulti_node_prepend = { PATHS = ["/x"] }'
    )
    launch = planned(environ, profile)
    assert launch.line().startswith("env -u BAD -u PATHS ")
    assert "ABSENT" not in launch.line()
    assert {"BAD", "PATHS", "GOOD"} & launch.environ(environ).keys() == {"GOOD"}
    launch = planned(environ | slurm(2), profile)
    assert launch.environ(environ)["PATHS"] == "/x", "nothing of the old value"


def test_a_program_in_a_container_is_not_searched_on_the_path(
    sandbox: Sandbox, profile_with: Callable[[str], str]
) -> None:
    sandbox.launcher("srun")
    profile = profile_with('[launch]\ndefault = "srun"\nwrap = ["apptainer", "exec", "my image.sif"]')
    launch = planned(sandbox.environ(**slurm(1)), profile, command=("program-of-the-image",))
    assert launch.argv[-4:] == ("apptainer", "exec", "my image.sif", "program-of-the-image")


def test_ranks_overlap_with_the_shell_of_srun_pty(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    environ = sandbox.environ(**slurm(1, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1"))
    assert planned(environ).exports["SLURM_OVERLAP"] == "1"
    assert "SLURM_OVERLAP" not in planned(sandbox.environ(**slurm(1))).exports


def test_the_dry_run_prints_one_line_that_bash_can_run(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    environ = sandbox.environ(**slurm(2))
    argv = [sys.executable, "-m", "ddp_hpc", "launch", "--env", "A=x y", "--dry-run", "--", *PROGRAM]
    done = subprocess.run(argv, env=environ, cwd=sandbox.work, capture_output=True, check=True)
    assert done.stdout.count(b"\n") == 1
    assert done.stdout.startswith(b"env ")
    assert b"'A=x y'" in done.stdout
    assert not sandbox.record.exists(), "a dry run starts nothing"
    subprocess.run(["bash", "-c", done.stdout], env=environ, cwd=sandbox.work, check=True)
    assert tuple(sandbox.words()[-len(PROGRAM) :]) == PROGRAM
    assert sandbox.seen()["A"] == "x y"
    assert not (sandbox.work / "hacked").exists()


def test_the_command_begins_with_the_first_word_that_is_not_an_option(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    environ = sandbox.environ(**slurm(1), PATH=f"{sandbox.bin}:{Path(sys.executable).parent}:/usr/bin:/bin")
    command = ["python", "-m", "ddp_hpc.train", "-n", "3", "--dry-run"]
    argv = [sys.executable, "-m", "ddp_hpc", "launch", "-n", "8", *command]
    subprocess.run(argv, env=environ, cwd=sandbox.work, check=True)
    assert sandbox.words()[-6:] == command
    assert "--ntasks=8" in sandbox.words()


# Number of ranks


def test_all_gpus_of_all_nodes_of_the_profile_are_used(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", version="PALS")
    # A node is listed once per mpiproc.
    launch = planned(sandbox.environ(**pbs(sandbox, "a", "a", "b", "b", "c", "c")), "polaris")
    assert options(launch)[:4] == ["-n", "12", "--ppn", "4"]
    assert "12 ranks on 3 nodes of pbs job 12.pbs-srv" in launch.about


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (8, ["--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=16"]),
        (6, ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--cpus-per-task=16"]),
        (3, ["--nodes=1", "--ntasks=3", "--ntasks-per-node=3", "--cpus-per-task=16"]),
        (1, ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=16"]),
    ],
)
def test_n_ranks_are_distributed_evenly_over_the_minimum_number_of_nodes(
    sandbox: Sandbox, num_ranks: int, expected: list[str]
) -> None:
    sandbox.launcher("srun")
    launch = planned(sandbox.environ(**slurm(2, SLURM_GPUS_ON_NODE="4")), num_ranks=num_ranks)
    assert options(launch)[:4] == expected


@pytest.mark.parametrize(
    ("extra", "num_ranks", "job", "message"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 9, {}, "2 nodes of slurm job 7 with 4 GPUs per node can run 8 ranks"),
        ({}, 129, {}, "with 64 CPUs per node can run 128 ranks"),
        ({}, 5, {"ranks_per_node": 2}, "2 ranks per node can run 4 ranks"),
        ({"SLURM_GPUS_ON_NODE": "4"}, None, {"ranks_per_node": 8}, "NCCL requires one device per rank"),
        ({}, 0, {}, "-n must be at least 1 (got 0)"),
        (
            {"SLURM_GPUS_ON_NODE": "4"},
            7,
            {"launcher": "torchrun", "command": ("a.py",)},
            "torchrun starts the same number of ranks on each node. Use -n 8",
        ),
    ],
)
def test_a_launch_larger_than_the_allocation_is_refused(
    sandbox: Sandbox, extra: dict[str, str], num_ranks: int | None, job: dict[str, object], message: str
) -> None:
    sandbox.launcher("srun")
    assert message in refused(sandbox.environ(**slurm(2, **extra)), num_ranks=num_ranks, **job)


# Selection of the allocation and the profile


def test_the_nodes_of_sbatch_and_salloc_are_detected() -> None:
    for case, gpus in (("sbatch-shell", 2), ("salloc-shell", 0)):
        found = find_allocation(load(case, 0))
        assert (found.scheduler, found.num_nodes, found.tasks_per_node) == ("slurm", 2, 2)
        assert (found.cpus_per_node, found.gpus_per_node) == (2, gpus)


@pytest.mark.parametrize("case", ["srun-pmix", "mpich-one-host", "openmpi-one-host", "pals-pmix"])
def test_a_launch_inside_a_rank_is_refused(case: str) -> None:
    with pytest.raises(RequestError, match="Run ddp-hpc launch once, without"):
        find_allocation(load(case, 1))


@pytest.mark.parametrize(("profile", "get_one"), [("polaris", "qsub -I"), ("perlmutter", "salloc")])
def test_no_ranks_are_started_on_a_login_node(sandbox: Sandbox, profile: str, get_one: str) -> None:
    assert f"Get one with {get_one}, or use --profile local" in refused(sandbox.environ(), profile)


def test_without_a_scheduler_this_machine_is_used(sandbox: Sandbox) -> None:
    sandbox.program("sbatch", "")  # the machine of the tests can have it
    launch = planned(sandbox.environ(), num_ranks=3)
    assert launch.why.startswith("profile local: this shell is not in an allocation")
    assert launch.argv[1:3] == ("-n", "3")
    assert launch.exports["DDP_HPC_PROFILE"] == "local"
    assert launch.about.startswith("3 ranks on this machine, by ")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("GPU-1b,GPU-2c", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_hides_gpus(visible: str, count: int) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": visible}) == count


# Missing programs


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-program", "no-such-program was not found"),
        ("./plain", r"\./plain is not executable \(run chmod"),
        ("--lr", "the launcher would read as its own option"),
        ("", "the command is empty"),
    ],
)
def test_a_missing_program_is_detected_before_ranks_are_started(
    sandbox: Sandbox, program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.launcher("srun")
    (sandbox.work / "plain").touch()
    monkeypatch.chdir(sandbox.work)
    with pytest.raises(RequestError, match=message) as caught:
        planned(sandbox.environ(**slurm(1)), command=(program,))
    assert "\n" not in str(caught.value)


def test_a_missing_launcher_is_named(sandbox: Sandbox) -> None:
    environ = sandbox.environ(**slurm(1))
    for name in ("bash", "true"):
        (sandbox.bin / name).symlink_to(f"/bin/{name}")
    environ["PATH"] = str(sandbox.bin)
    assert "srun was not found on the PATH" in refused(environ)
    assert "no mpiexec of an MPI library found on the PATH" in refused(environ, launcher="mpiexec")
    sandbox.program("mpiexec", "#!/bin/bash\nexit 1\n")  # like that of PBS
    assert "no mpiexec of an MPI library found on the PATH" in refused(environ, launcher="mpiexec")
    environ["DDP_HPC_MPIEXEC"] = "/no/mpiexec"
    assert "DDP_HPC_MPIEXEC=/no/mpiexec is not an executable program" in refused(environ, launcher="mpiexec")


def test_the_machines_mpiexec_is_preferred_over_that_of_a_python_environment(sandbox: Sandbox) -> None:
    own = sandbox.launcher("mpiexec", folder=sandbox.folder / "venv" / "bin")
    environ = sandbox.environ(**slurm(1), VIRTUAL_ENV=str(sandbox.folder / "venv"))
    environ["PATH"] = f"{own.parent}:{environ['PATH']}"
    assert planned(environ, launcher="mpiexec").argv[0] == str(own)
    site = sandbox.launcher("mpiexec")
    assert planned(environ, launcher="mpiexec").argv[0] == str(site)


def test_the_mpiexec_of_pbs_is_never_used(sandbox: Sandbox) -> None:
    pbs = sandbox.program("mpiexec", PBS_MPIEXEC)
    own = sandbox.launcher("mpiexec", folder=sandbox.folder / "venv" / "bin")
    environ = sandbox.environ(**slurm(1), VIRTUAL_ENV=str(sandbox.folder / "venv"))
    for path in (f"{pbs.parent}:{own.parent}", f"{own.parent}:{pbs.parent}"):
        environ["PATH"] = f"{path}:/usr/bin:/bin"
        assert planned(environ, launcher="mpiexec").argv[0] == str(own)
    environ["DDP_HPC_MPIEXEC"] = str(pbs)
    assert "is PBS's own mpiexec, not an MPI launcher" in refused(environ, launcher="mpiexec")


# The launcher replaces this process


def launching(sandbox: Sandbox, *command: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "ddp_hpc", "launch", *command]
    environ = sandbox.environ(**slurm(1))
    return subprocess.Popen(
        argv, env=environ, cwd=sandbox.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_the_exit_code_is_that_of_the_launcher(sandbox: Sandbox) -> None:
    sandbox.launcher("srun", then="exit 37")
    process = launching(sandbox, "true")
    assert process.communicate(timeout=30)[0] == b""
    assert process.returncode == 37


def test_signals_reach_the_launcher_and_are_not_ignored_by_it(sandbox: Sandbox) -> None:
    sandbox.launcher(
        "srun", then="trap 'exit 5' TERM; grep SigIgn /proc/$$/status; while :; do sleep 0.02; done"
    )
    process = launching(sandbox, "true")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert not int(line.split()[1], 16) >> (signal.SIGPIPE - 1) & 1, "as Python does"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5


def test_ranks_on_this_machine_connect_through_the_local_mpiexec(tmp_path: Path) -> None:
    program = "import os; print(os.environ['PMI_RANK'], os.environ['PMI_SIZE'], os.environ['A'])"
    argv = [sys.executable, "-m", "ddp_hpc", "launch", "--profile", "local", "-n", "2", "--env", "A=b c"]
    environ = clean_environ(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    done = subprocess.run(
        [*argv, "--", "python", "-c", program], env=environ, cwd=tmp_path, capture_output=True, timeout=60
    )
    assert sorted(done.stdout.splitlines()) == [b"0 2 b c", b"1 2 b c"], done.stderr


RANK = """import os, signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank is", os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["usual", "stubborn"])
def test_ctrl_c_ends_all_ranks_without_tracebacks_and_exits_with_130(tmp_path: Path, kind: str) -> None:
    """As in a terminal, which sends SIGINT to the process group."""
    (tmp_path / "rank.py").write_text(RANK)
    argv = [sys.executable, "-m", "ddp_hpc", "launch", "--profile", "local", "-n", "2", "--", "python"]
    with subprocess.Popen(
        [*argv, "rank.py", kind],
        env=clean_environ(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        while kind == "stubborn" and process.poll() is None:
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in out + err
    assert err.splitlines()[-1] == b"interrupted"
    assert not any(is_running(rank) for rank in ranks)


def test_a_rank_reads_from_the_terminal(tmp_path: Path) -> None:
    """With a debugger, for example. The terminal stops processes in the background that read from it."""
    terminal, other_end = os.openpty()
    argv = [sys.executable, "-m", "ddp_hpc", "launch", "--profile", "local", "-n", "1", "--", "python", "-c"]
    with subprocess.Popen(
        [*argv, "print('got', input())"],
        env=clean_environ(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"),
        cwd=tmp_path,
        stdin=other_end,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        os.write(terminal, b"this line\n")
        assert b"got this line\n" in process.communicate(timeout=60)[0]
