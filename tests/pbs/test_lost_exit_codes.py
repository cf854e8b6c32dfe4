"""A launcher whose exit code is lost, as in `mpiexec ... | tee log`, under the supervisor."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.fakes.site import Site, program
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import render

PROGRAM = """import os, sys
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def losing_site(make_site: MakeSite) -> Site:
    """A machine whose mpiexec is Hydra, but always exits with 0."""
    site = make_site(nodes=(socket.gethostname(),))
    site.dotfile(site.root / "bin", site.pbs_bin, Path(sys.prefix) / "bin")
    program(site.root / "bin" / "mpiexec", f'#!/bin/sh\n{sys.prefix}/bin/mpiexec "$@"\nexit 0\n')
    (site.work / "program.py").write_text(PROGRAM)
    return site


@pytest.mark.check
@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "done 0\n"), (3, f"failed 0 rank 1 on {socket.gethostname()} exited with code 3\n")],
)
def test_the_exit_codes_of_the_ranks_decide_whether_a_run_is_done(
    losing_site: Site, code: int, state: str
) -> None:
    command = ["python", "program.py", str(code)]
    render(losing_site, "generic_pbs", "--ranks-per-node", "2", command=command)
    job = losing_site.wait(losing_site.submit("job.pbs"))
    assert job["Exit_status"] == code, losing_site.logs()
    assert (losing_site.work / "runs/ddp/state").read_text() == state
