"""--after: commands that run after the job, whose exit code stays that of the job."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox, run_cli
from tests.batch.test_requeue import SAY
from tests.batch.test_scripts_run import script
from tests.batch.test_written_scripts import SHELLCHECK

AFTER = ('echo "$code" >after', "false", "echo more >>after")
LOOP = "trap 'echo got >term; exit 9' TERM; touch started; while :; do sleep 0.1; done"


def environ(sandbox: Sandbox) -> dict[str, str]:
    """The environment of PBS job 7 on one node."""
    nodes = sandbox.folder / "nodes"
    nodes.write_text("a\n")
    return {"PBS_JOBID": "7", "PBS_O_WORKDIR": str(sandbox.work), "PBS_NODEFILE": str(nodes)}


@pytest.mark.parametrize(("then", "code"), [(f"{SAY}say done 9", 0), ("exit 3", 3)])
def test_the_commands_run_after_success_and_failure_and_keep_the_exit_code(
    sandbox: Sandbox, then: str, code: int
) -> None:
    sandbox.launcher("mpiexec", then=then)
    done = sandbox.run(script("generic_pbs", after=AFTER), **environ(sandbox))
    assert done.returncode == code, done.stderr
    assert (sandbox.work / "after").read_text() == f"{code}\nmore\n"


def test_a_signal_for_the_script_alone_reaches_the_ranks_before_the_commands(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", then=LOOP)
    text = script("generic_pbs", after=AFTER, command=("python", "train.py"))
    path = sandbox.write(text)
    with subprocess.Popen(
        ["bash", path], cwd=sandbox.work, env=sandbox.environ(**environ(sandbox)), stderr=subprocess.PIPE
    ) as job:
        end = time.monotonic() + 30
        while not (sandbox.work / "started").exists() and time.monotonic() < end:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 9
    assert (sandbox.work / "term").read_text() == "got\n"
    assert (sandbox.work / "after").read_text() == "9\nmore\n"


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs", "local"])
def test_lint_and_shellcheck_accept_the_script(profile: str, tmp_path: Path) -> None:
    text = render(Job(walltime_s=600, after=AFTER), load_site(profile))
    assert [one for one in lint_script(text, load_site(profile)) if one.severity != "note"] == []
    assert SHELLCHECK
    (tmp_path / "job.sh").write_text(text)
    found = subprocess.run([SHELLCHECK, tmp_path / "job.sh"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("line", ["one\ntwo", "a\rb", "a\0b", "#SBATCH --mem=1G"])
def test_a_line_that_is_not_one_command_line_is_refused(line: str) -> None:
    with pytest.raises(RequestError, match="after line"):
        Job(after=(line,))


def test_a_line_that_is_not_bash_is_refused() -> None:
    done = run_cli("render", "--profile", "local", "--after", "if true")
    assert done.returncode == 2
    assert b"--after 'if true' is not valid bash" in done.stderr
