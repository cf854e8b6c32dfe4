"""The copy of the job script that resumes a run, and the variables that it sets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ddp_hpc.supervisor.script_copy import script_copy

NOTHING = re.compile(b"(?!)")
SCRIPT = b"""#!/bin/bash -l
#PBS -N ddp
# a comment

#PBS -l walltime=00:10:00
echo "$LR"
#PBS -N ignored
"""
VALUES = [
    "0.5",
    "",
    "a b",
    "a,b",
    "it's",
    'say "hi"',
    "x\\y",
    "$HOME",
    "`id`",
    "{}",
    "}",
    "two\nlines",
    "\u00fc",
]


def output(script: bytes, directory: Path, **environ: str) -> str:
    path = directory / "job.sh"
    path.write_bytes(script)
    return subprocess.run(["bash", path], env=environ, capture_output=True, text=True, check=True).stdout


def test_a_script_without_variables_is_copied_unchanged() -> None:
    assert script_copy(SCRIPT, NOTHING, {}) == SCRIPT


@pytest.mark.parametrize("value", VALUES)
def test_each_value_arrives_unchanged_after_three_copies(tmp_path: Path, value: str) -> None:
    copy = SCRIPT
    for _ in range(3):
        copy = script_copy(copy, NOTHING, {"LR": value})
    assert output(copy, tmp_path) == f"{value}\n"
    assert copy.count(b"export LR=") == 1


def test_variables_follow_the_directives(tmp_path: Path) -> None:
    lines = script_copy(SCRIPT, NOTHING, {"LR": "0.5", "EPOCHS": "3"}).splitlines()
    assert lines[:5] == SCRIPT.splitlines()[:5]
    assert [line.partition(b"=")[0] for line in lines[5:7]] == [b"export LR", b"export EPOCHS"]
    assert lines[7:] == SCRIPT.splitlines()[5:]


def test_a_value_that_is_set_when_the_script_starts_has_priority(tmp_path: Path) -> None:
    copy = script_copy(SCRIPT, NOTHING, {"LR": "0.5"})
    assert output(copy, tmp_path, LR="0.1") == "0.1\n"
    assert output(script_copy(copy, NOTHING, {"LR": "0.1"}), tmp_path) == "0.1\n"


def test_the_directive_of_an_array_is_removed() -> None:
    script = SCRIPT.replace(b"#PBS -N ddp\n", b"#PBS -N ddp\n#PBS -J 0-3\n")
    assert script_copy(script, re.compile(rb"^#PBS -J.*\n", re.MULTILINE), {}) == SCRIPT


def test_a_script_that_consists_of_directives_only(tmp_path: Path) -> None:
    assert script_copy(b"#!/bin/bash\n#PBS -N x", NOTHING, {"A": "1"}).startswith(
        b"#!/bin/bash\n#PBS -N x\nexport A=${A-1}"
    )
