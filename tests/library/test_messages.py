"""Messages of the library: arguments as the user knows them, and texts of the script."""

from __future__ import annotations

import inspect
from pathlib import Path

import ddp_hpc
from ddp_hpc.base.options import argument_names, options_of
from ddp_hpc.training.config import TrainConfig
from tests.training.forked import Forks


def test_messages_name_the_arguments_of_the_functions() -> None:
    functions = (ddp_hpc.distributed, ddp_hpc.wrap, ddp_hpc.ConnectedWorld.loader, ddp_hpc.snapshots)
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    renamed = {
        option.declared["argument"] for option in options_of(TrainConfig) if "argument" in option.declared
    }
    assert renamed <= arguments
    name_of = argument_names(TrainConfig)
    assert (name_of("snapshot_dir"), name_of("keep"), name_of("timeout")) == ("folder", "keep", "timeout_s")


def test_the_message_of_an_error_that_a_script_raises_does_not_change(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import ddp_hpc\nwith ddp_hpc.distributed():\n    raise ddp_hpc.RequestError('--epochs of mine is 0')"
    )
    # With several ranks, only the one that reports the error exits with 2.
    ended = forks.script("mine.py", cwd=tmp_path, ranks=1)
    assert ended.exit_code == 2
    assert "error: --epochs of mine is 0" in ended.stderr
