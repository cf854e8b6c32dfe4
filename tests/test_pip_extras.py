"""The pip commands in messages about missing packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_hpc.base import pip_extras
from tests.conftest import PROJECT, clean_environ


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--max-steps", "1"],
        ["export", "snapshots", "model.pt"],
        ["sample", "snapshots"],
        ["bench", "io"],
        ["bench", "comm"],
    ],
)
def test_commands_that_need_torch_print_the_pip_command_in_a_base_installation(
    words: list[str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for package in ("click", "jinja2", "markupsafe"):
        [origin] = find_spec(package).submodule_search_locations
        (base / package).symlink_to(origin)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ddp_hpc", *words],
        env=clean_environ({"PYTHONPATH": f"{PROJECT}:{base}"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    name = " ".join(word for word in words if word in ("bench", "io", "comm", words[0]))
    command = pip_extras.install_command("train")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].removeprefix("[rank 0/1] ") == (
        f"error: ddp-hpc {name} requires torch, which is not installed; run {command}"
    )
