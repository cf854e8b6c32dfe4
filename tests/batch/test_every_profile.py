"""What holds for every shipped profile, with every launcher its scheduler has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.render import render
from ddp_hpc.batch.schedulers import SCHEDULERS
from ddp_hpc.batch.site import load_site, profile_files
from tests.batch.conftest import clean_environ
from tests.batch.test_written_scripts import SHELLCHECK

NAMES = [path.stem for path in sorted((Path(__file__).parents[2] / "profiles").glob("*.toml"))]
CASES = [(name, launcher) for name in NAMES for launcher in SCHEDULERS[load_site(name).scheduler].launchers]


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_its_scripts_are_good_bash(name: str, launcher: str, tmp_path: Path) -> None:
    site = load_site(name)
    num_nodes = 1 if site.scheduler == "local" else 3
    script = tmp_path / "job.sh"
    script.write_text(render(Job(num_nodes=num_nodes, launcher=launcher), site))

    subprocess.run(["bash", "-n", script], check=True)
    found = subprocess.run([str(SHELLCHECK), str(script)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", NAMES)
def test_it_says_who_keeps_it_and_when_it_was_checked(name: str) -> None:
    site = load_site(name)
    assert site.owner
    assert site.sources or site.scheduler == "local"


def test_all_render_where_the_heavy_libraries_cannot_be_imported() -> None:
    program = """
import sys
for name in ("torch", "mpi4py", "h5py", "numpy"):
    sys.modules[name] = None  # makes an import of it fail
from ddp_hpc.cli import cli
for name in sys.argv[1:]:
    cli.main(["render", "--profile", name], standalone_mode=False)
cli.main(["render", "--step"], standalone_mode=False)
"""
    argv = [sys.executable, "-c", program, *NAMES]
    done = subprocess.run(argv, env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == len(NAMES) + 1


def test_a_profile_in_the_users_folder_wins_over_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "ddp-hpc" / "profiles"
    folder.mkdir(parents=True)
    text = profile_files()["local"].read_text()
    (folder / "local.toml").write_text(text.replace("this machine, no scheduler", "my own"))
    assert load_site("local").title == "my own"
