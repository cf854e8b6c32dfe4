"""Scripts and options that cannot be rehearsed, and scripts that misbehave."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.rehearse import command
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]

NO_SCRIPTS = [
    (b"", "the script is empty"),
    (b"\0\1\2\n", "contains a NUL character"),
    (b"echo hello\n", "is not a job script: it contains neither #PBS nor #SBATCH lines"),
]


@pytest.mark.parametrize(("text", "said"), NO_SCRIPTS, ids=[case[1][:30] for case in NO_SCRIPTS])
def test_an_unsuitable_file_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "job").write_bytes(text)
    with pytest.raises(RequestError, match=re.escape(said)):
        command.main([str(tmp_path / "job")], standalone_mode=False)


@pytest.mark.parametrize(
    ("scheduler", "directive", "said"),
    [
        ("slurm", "--frob=1", "sbatch: error: --frob=1: unknown"),
        ("pbs", "-l walltime=foo", "qsub: Illegal attribute or resource value Resource_List.walltime"),
    ],
)
def test_a_refusal_of_the_scheduler_is_one_line(
    rehearse: Rehearse, script: Script, scheduler: str, directive: str, said: str
) -> None:
    done = rehearse(script(scheduler, directive, "true"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: the script was rejected: ")
    assert said in done.stderr.splitlines()[-1]


def test_a_directory_a_pipe_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing", "/dev/zero"):
        with pytest.raises(RequestError):
            command.main([str(path)], standalone_mode=False)


OPTIONS = [
    (["--nodes", "3"], "--nodes 3 was given, but the script requests 2"),
    (["--ranks-per-node", "65"], "--ranks-per-node 65 was given; on one machine, it must be from 1 to 64"),
    (["--nodes", "2", "--ranks-per-node", "40"], "2 nodes with 40 ranks each are 80 ranks, but at most 64"),
    (["--walltime-s", "0"], "--walltime-s must be a whole number"),
    (["--args", "'"], "has an unclosed quote"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[" ".join(case[0]) for case in OPTIONS])
def test_options_that_do_not_fit_are_refused(script: Script, options: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        command.main([str(script("pbs", "-l select=2", "true")), *options], standalone_mode=False)


@pytest.mark.check
def test_a_script_for_500_nodes_gets_a_few_and_reports_that(rehearse: Rehearse, script: Script) -> None:
    job = script("pbs", "-l select=500:mpiprocs=4", "-j oe", "sort -u $PBS_NODEFILE | wc -l", "true")
    done = rehearse(job, "--nodes", "2")
    assert done.stdout == "2\n"
    assert "2 of 500 nodes" in done.stderr
    job = script("slurm", "--nodes=500", "--ntasks-per-node=4", "srun --ntasks=2000 --ntasks-per-node=4 true")
    done = rehearse(job, "--nodes", "2", "--ranks-per-node", "1")
    assert "starting 2 of 2000 ranks" in done.stdout
    assert done.exit_code == 0


@pytest.mark.check
def test_a_script_that_kills_itself_has_the_exit_code_of_its_scheduler(
    rehearse: Rehearse, script: Script
) -> None:
    done = rehearse(script("pbs", "-l select=1", "kill -KILL $$"))
    assert "Exit_status 137 (failed)" in done.stderr
    assert done.exit_code == 1
    done = rehearse(script("slurm", "--nodes=1", "kill -KILL $$"))
    assert "FAILED, ExitCode 0:9" in done.stderr
    assert done.exit_code == 1


def test_exit_code_75_on_pbs_is_a_request_to_resume_and_not_a_failure(
    rehearse: Rehearse, script: Script
) -> None:
    done = rehearse(script("pbs", "-l select=1", "exit 75"))
    assert "Exit_status 75 (requeue)\n" in done.stderr
    assert done.exit_code == 75
