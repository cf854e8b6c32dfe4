"""Messages of the library as records of the logger `ddp_hpc`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.base.options import argument_names, options_of
from ddp_hpc.training.config import TrainConfig
from tests.conftest import Ended
from tests.training.forked import Forks

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


def _run(forks: Forks, directory: Path, script: str) -> Ended:
    (directory / "mine.py").write_text(script)
    return forks.script("mine.py", cwd=directory)


@pytest.mark.check
def test_a_handler_of_the_logger_receives_messages_and_errors_instead_of_stderr(
    forks: Forks, tmp_path: Path
) -> None:
    ended = _run(forks, tmp_path, SCRIPT.format(set_up=HANDLER, fails="True"))
    assert ended.exit_code != 0
    log = (tmp_path / "messages.log").read_text()
    assert "INFO world: 2 ranks on 1 node" in log
    assert "world: 2 ranks" not in ended.stderr + ended.stdout
    assert "planted" in log


def test_without_a_handler_messages_are_printed(forks: Forks, tmp_path: Path) -> None:
    ended = _run(forks, tmp_path, SCRIPT.format(set_up="logging.basicConfig()", fails="False"))
    assert ended.exit_code == 0
    assert "world: 2 ranks on 1 node" in ended.stderr


def test_messages_name_the_arguments_of_the_functions() -> None:
    functions = (ddp_hpc.distributed, ddp_hpc.wrap, ddp_hpc.ConnectedWorld.loader, ddp_hpc.snapshots)
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    renamed = {
        option.declared["argument"] for option in options_of(TrainConfig) if "argument" in option.declared
    }
    assert renamed <= arguments | {"max_mib"}
    name_of = argument_names(TrainConfig)
    assert (name_of("snapshot_dir"), name_of("keep"), name_of("timeout")) == ("folder", "keep", "timeout_s")


def test_the_message_of_an_error_that_a_script_raises_does_not_change(forks: Forks, tmp_path: Path) -> None:
    script = (
        "import ddp_hpc\nwith ddp_hpc.distributed():\n    raise ddp_hpc.RequestError('--epochs of mine is 0')"
    )
    ended = _run(forks, tmp_path, script)
    assert ended.exit_code == 2
    assert "error: --epochs of mine is 0" in ended.stderr
