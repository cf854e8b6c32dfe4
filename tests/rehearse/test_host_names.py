"""Host names that only the processes of a rehearsal can resolve."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Launch
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]
SUFFIX = ".hsn.cm.polaris.alcf.anl.gov"
# A new user namespace in which no mount namespace can be created.
REFUSING = ("unshare", "--user", "--map-root-user", "sh", "-c")
REFUSE = 'echo 0 >/proc/sys/user/max_mnt_namespaces && exec "$@"'

needs_user_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True).returncode != 0,
    reason="this machine does not permit user namespaces",
)


def test_the_names_of_the_fast_network_mean_this_machine_in_a_rehearsal_only(
    rehearse: Rehearse, script: Script, launch: Launch
) -> None:
    ask = f"getent hosts $(hostname){SUFFIX} node2{SUFFIX} node1.rehearsal"
    done = rehearse(script("pbs", "-l select=2", ask), "--profile", "polaris")
    addresses = [line.split()[0] for line in done.stdout.splitlines()]
    assert addresses == ["127.0.0.1"] * 3, done.stdout + done.stderr
    assert (
        f"names on the fast network, such as HOST{SUFFIX}, resolve to this machine (127.0.0.1)" in done.stderr
    )
    assert launch(["getent", "hosts", f"{os.uname().nodename}{SUFFIX}"]).exit_code == 2


@pytest.mark.check
@needs_user_namespaces
def test_if_the_kernel_refuses_a_mount_namespace_the_names_are_said_not_to_exist(
    launch: Launch, script: Script, temp: Path
) -> None:
    words = [sys.executable, "-m", "ddp_hpc", "rehearse", script("pbs", "-l select=1", "echo ran")]
    done = launch([*REFUSING, REFUSE, "sh", *words, "--profile", "polaris"], env={"TMPDIR": str(temp)})
    assert done.stdout == "ran\n", done.stderr
    assert (
        f"names on the fast network, such as HOST{SUFFIX}, do not exist here, because this machine does not "
        "permit mount namespaces; ranks of a program that forms these names itself, instead of using "
        "MASTER_ADDR, cannot connect"
    ) in done.stderr


@pytest.mark.check
@needs_user_namespaces
def test_a_user_who_is_not_root_gets_the_names_and_keeps_the_user_id(tmp_path: Path) -> None:
    # A user who is not root gets a mount namespace only together with a user namespace.
    code = (
        "import os, socket; from ddp_hpc.rehearse.host_names import add_host_names; before = os.getuid()\n"
        "print(add_host_names(['no.such.host']), socket.gethostbyname('no.such.host'), os.getuid() == before)"
    )
    user = ["unshare", "--user", "--map-user=1234", "--map-group=1234"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*user, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.split() == ["True", "127.0.0.1", "True"], done.stderr


@pytest.mark.check
def test_the_program_of_the_tutorial_runs_to_its_end_on_the_names_of_the_fast_network(
    rehearse: Rehearse, script: Script
) -> None:
    words = "--epochs 1 --num-samples 64 --embedding 32"
    lesson = f"python {PROJECT / 'docs/examples/lesson_mpi4py.py'} {words}"
    done = rehearse(script("pbs", "-l select=1", f"mpiexec -n 2 -ppn 2 {lesson}"), timeout_s=120)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "epoch 1 loss" in done.stdout
