"""Scripts as users get them, and a `python` that records what a rank would have seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import clean_environ
from tests.fakes.site import PROJECT, Site, program, words_of

JOBS = PROJECT / "jobs"

# Stands in for the interpreter: one folder a rank with words, environment, folder and umask.
_RECORDER = """#!/bin/bash
rank=$HOME/ranks/${PALS_RANKID:-none}
mkdir -p "$rank"
printf '%s\\0' "$@" >"$rank/argv"
env -0 >"$rank/env"
pwd >"$rank/cwd"
umask >"$rank/umask"
"""
# Any other use than a question for its version would be a mistake of the script.
_WRONG_MPIEXEC = """#!/bin/bash
if [[ $* == --version ]]; then echo "HYDRA build details:"; exit 0; fi
touch "$HOME/wrong_mpiexec_was_used"
exit 1
"""


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    argv: Sequence[str]
    env: dict[str, str]
    cwd: str
    umask: str


def recording_conda(site: Site) -> Path:
    """A conda environment whose `python` records, and which brings an mpiexec of its own."""
    prefix = site.root / "soft" / "conda"
    program(prefix / "bin" / "python", _RECORDER)
    program(prefix / "bin" / "mpiexec", _WRONG_MPIEXEC)
    return prefix


def ranks(site: Site) -> dict[int, Seen]:
    """What the recording `python` wrote, by rank."""
    found = {}
    for folder in (site.home / "ranks").iterdir():
        env = dict(word.split("=", 1) for word in words_of(folder / "env"))
        cwd, umask = ((folder / name).read_text().strip() for name in ("cwd", "umask"))
        found[int(folder.name)] = Seen(words_of(folder / "argv"), env, cwd, umask)
    return dict(sorted(found.items()))


def render(site: Site, profile: str, *options: str, command: Sequence[str]) -> Path:
    """The script that `ddp-hpc render` writes into the folder from which the user submits."""
    script = site.work / "job.pbs"
    argv = [sys.executable, "-m", "ddp_hpc", "render", "--profile", profile, *options, "-o", str(script)]
    done = subprocess.run(
        [*argv, "--", *command], cwd=site.work, env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return script
