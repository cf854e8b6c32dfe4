"""The environment of a program that is watched with --idle-timeout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.discovery.silent_rank import RankWatch
from ddp_hpc.discovery.world import World
from tests.conftest import clean_environ

NAME = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PRINT = f"import os; print(os.environ.get('{NAME}', ''), end='')"


@pytest.fixture
def world() -> World:
    return World(rank=0, world_size=2, local_rank=0, local_size=2, hostname="n1", launcher="torchrun")


def pipe_of_program(watch: RankWatch, **environ: str) -> str:
    argv, env = [sys.executable, "-c", PRINT], watch.environ(clean_environ(environ))
    return subprocess.run(argv, env=env, close_fds=False, check=True, capture_output=True, text=True).stdout


def test_the_pipe_of_nccl_has_a_new_name_in_a_directory_of_this_user(tmp_path: Path, world: World) -> None:
    watch = RankWatch(tmp_path, "1 7", 60.0, world, {})
    stem = Path(pipe_of_program(watch))
    assert stem.name == "rank_"
    assert stem.parent.stat().st_mode & 0o777 == 0o700


def test_a_program_that_cannot_see_the_directory_of_the_pipe_gets_no_name(
    tmp_path: Path, world: World
) -> None:
    """torch would end a program in a container in which the directory does not exist."""
    watch = RankWatch(tmp_path, "1 7", 60.0, world, {})
    shutil.rmtree(Path(pipe_of_program(watch)).parent)
    assert pipe_of_program(watch) == ""


def test_the_pipe_of_the_user_is_kept(tmp_path: Path, world: World) -> None:
    own = {NAME: "/nowhere/mine"}
    assert pipe_of_program(RankWatch(tmp_path, "1 7", 60.0, world, own), **own) == "/nowhere/mine"
