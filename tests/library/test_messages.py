"""Messages of the library as records of the logger `ddp_hpc`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import Launch

SCRIPT = """
import logging
{set_up}
import ddp_hpc
with ddp_hpc.distributed():
    if {fails}:
        raise ValueError("planted")
"""
HANDLER = """
handler = logging.FileHandler("messages.log")
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
logging.getLogger("ddp_hpc").addHandler(handler)
logging.getLogger("ddp_hpc").setLevel(logging.INFO)
"""


def test_a_handler_of_the_logger_receives_messages_and_errors_instead_of_stderr(
    launch: Launch, mpiexec: Path, tmp_path: Path
) -> None:
    script = SCRIPT.format(set_up=HANDLER, fails="True")
    ended = launch([mpiexec, "-n", "2", sys.executable, "-c", script], cwd=tmp_path, timeout_s=60)
    assert ended.exit_code != 0
    log = (tmp_path / "messages.log").read_text()
    assert "INFO world: 2 ranks on 1 node" in log
    assert "world: 2 ranks" not in ended.stderr + ended.stdout
    assert "planted" in log


def test_without_a_handler_messages_are_printed(launch: Launch, mpiexec: Path, tmp_path: Path) -> None:
    script = SCRIPT.format(set_up="logging.basicConfig()", fails="False")
    ended = launch([mpiexec, "-n", "2", sys.executable, "-c", script], cwd=tmp_path, timeout_s=60)
    assert ended.exit_code == 0
    assert "world: 2 ranks on 1 node" in ended.stderr
