"""Unchanged programs as ranks of one world under ddp-hpc exec."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Ended, Launch

from .conftest import OPENMPI_SETTINGS, errors, printed

BIN = Path(sys.executable).parent
TRAINS = Path(__file__).with_name("trains.py")
EXEC = ("-m", "ddp_hpc.exec")
LAUNCH = (sys.executable, "-m", "ddp_hpc", "launch", "--profile", "local")
# The variables of torchrun 2.13 for two ranks on one node.
ONE_NODE = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def assert_one_world(ended: Ended) -> str:
    """Two ranks in one world, whose mean gradient is that of both. The port at which they met."""
    ranks = printed(ended)
    assert [(each["rank"], each["size"], each["gradient"]) for each in ranks] == [(0, 2, 0.5), (1, 2, 0.5)]
    for number, each in enumerate(ranks):
        assert {name: each[name] for name in ONE_NODE} == ONE_NODE
        assert each["RANK"] == each["LOCAL_RANK"] == str(number)
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    assert "warning: " not in ended.stderr
    return str(ranks[0]["MASTER_PORT"])


def test_launch_makes_one_world_of_an_unchanged_program(launch: Launch) -> None:
    assert_one_world(launch([*LAUNCH, "-n", "2", "--", "python", TRAINS], timeout_s=60))


def test_a_rank_has_the_umask_of_the_job_script(launch: Launch) -> None:
    """A daemon of another node has started the rank with its own umask."""
    rank = f"umask 077; exec {sys.executable} -m ddp_hpc.exec bash -c umask"
    assert launch(["bash", "-c", rank], env={"DDP_HPC_UMASK": "0027"}).stdout == "0027\n"
    assert launch(["bash", "-c", rank], env={"DDP_HPC_UMASK": "x"}).stdout == "0077\n"


@pytest.mark.check
def test_ranks_of_open_mpi_are_one_world(launch: Launch, openmpi_mpiexec: Path) -> None:
    argv = [openmpi_mpiexec, "-n", "2", BIN / "ddp-hpc", "exec", "--", "python", TRAINS]
    assert_one_world(launch(argv, env=OPENMPI_SETTINGS, timeout_s=60))


@pytest.mark.check
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=[pytest.mark.soak])])
def test_two_simultaneous_launches_are_two_worlds(launch: Launch, mpiexec: Path, times: int) -> None:
    argv = [mpiexec, "-n", "2", sys.executable, *EXEC, "python", TRAINS]
    for _ in range(times):
        both = [launch.start(argv) for _ in range(2)]
        assert len({assert_one_world(launch.end(each, 90)) for each in both}) == 2


def test_a_program_without_a_process_group_causes_a_warning_with_the_solution(launch: Launch) -> None:
    program = "import time; time.sleep(1); print('trained')"
    ended = launch([*LAUNCH, "-n", "2", "--", "python", "-c", program])
    assert (ended.exit_code, ended.stdout) == (0, "trained\ntrained\n")
    (line,) = [line for line in ended.stderr.splitlines() if "warning: " in line]
    assert "2 ranks were started, but rank 0's program has not opened a process group" in line
    assert "init_process_group()" in line


def test_the_warning_is_printed_while_a_long_program_runs(
    launch: Launch, mpiexec: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    program = f"while ! grep -q warning: {log}; do sleep 0.1; done"
    limited = (
        "from ddp_hpc import exec; from ddp_hpc.discovery import rank_program; "
        "rank_program._WATCH_LIMIT_S = 0.5; exec.main()"
    )
    rank = [sys.executable, "-c", limited, "bash", "-c", program]
    ended = launch(["bash", "-c", f'"$@" 2> {log}', "bash", mpiexec, "-n", "2", *rank], timeout_s=60)
    assert ended.exit_code == 0
    assert log.read_text().count("warning: 2 ranks were started") == 1


@pytest.mark.check
def test_a_ddp_hpc_program_under_exec_still_detects_its_launcher(launch: Launch, mpiexec: Path) -> None:
    program = (
        "import ddp_hpc, torch\n"
        "with ddp_hpc.distributed() as world:\n"
        "    print(world.rank, world.sum(torch.ones(1)).item(), flush=True)\n"
    )
    ended = launch([mpiexec, "-n", "2", sys.executable, *EXEC, "python", "-c", program], timeout_s=60)
    assert sorted(ended.stdout.splitlines()) == ["0 2.0", "1 2.0"], ended.stderr
    assert "world: 2 ranks on 1 node (hydra)" in ended.stderr


@pytest.mark.check
def test_a_missing_program_is_reported_at_once_in_one_line(launch: Launch, mpiexec: Path) -> None:
    ended = launch([mpiexec, "-n", "3", sys.executable, *EXEC, "nonesuch"])
    assert ended.exit_code == 2
    (line,) = errors(ended)
    assert "nonesuch was not found" in line


def test_the_program_replaces_the_process_without_importing_torch(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is none')")
    root = Path(__file__).parents[2]
    program = "echo $$ $RANK $WORLD_SIZE; kill -TERM $$; sleep 9"
    process = launch.start(
        [sys.executable, *EXEC, "sh", "-c", program], env={"PYTHONPATH": f"{tmp_path}:{root}"}
    )
    ended = launch.end(process)
    assert ended.stdout == f"{process.pid} 0 1\n"
    assert ended.exit_code == -signal.SIGTERM


def test_variables_of_torchrun_are_left_unchanged(launch: Launch) -> None:
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    env |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_PORT": "7"}
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(launch([sys.executable, *EXEC, sys.executable, "-c", program], env=env).stdout)
    assert {name: seen[name] for name in env} == env
    assert not [name for name in seen if name == "DDP_HPC_EXEC" and seen[name]]
