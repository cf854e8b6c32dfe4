"""Rendered scripts, and a `python` that records the environment of a rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import clean_environ
from tests.fakes.site import PROJECT, Site, program, words_of

JOBS = PROJECT / "jobs"

# Replaces the interpreter, and records arguments, environment, directory and umask in one directory per rank.
_RECORDER = f"""#!/bin/bash
if [[ $* == "-m ddp_hpc.job "* ]]; then exec {sys.executable} "$@"; fi
rank=$HOME/ranks/${{PALS_RANKID:-none}}
mkdir -p "$rank"
printf '%s\\0' "$@" >"$rank/argv"
env -0 >"$rank/env"
pwd >"$rank/cwd"
umask >"$rank/umask"
if [[ $* == *ddp_hpc.train* && -n $DDP_HPC_RUN_DIR ]]; then echo done 1 >"$DDP_HPC_RUN_DIR/state"; fi
"""
# The script must use it only with --version.
_WRONG_MPIEXEC = """#!/bin/bash
if [[ $* == --version ]]; then echo "HYDRA build details:"; exit 0; fi
touch "$HOME/wrong_mpiexec_was_used"
exit 1
"""


@dataclass(frozen=True)
class Seen:
    """The recorded environment of one rank."""

    argv: Sequence[str]
    env: dict[str, str]
    cwd: str
    umask: str


def recording_conda(site: Site) -> Path:
    """A conda environment with a recording `python` and its own mpiexec."""
    prefix = site.root / "soft" / "conda"
    program(prefix / "bin" / "python", _RECORDER)
    program(prefix / "bin" / "mpiexec", _WRONG_MPIEXEC)
    return prefix


def ranks(site: Site) -> dict[int, Seen]:
    """The records of the recording `python` by rank."""
    found = {}
    for folder in (site.home / "ranks").iterdir():
        env = dict(word.split("=", 1) for word in words_of(folder / "env"))
        cwd, umask = ((folder / name).read_text().strip() for name in ("cwd", "umask"))
        found[int(folder.name)] = Seen(words_of(folder / "argv"), env, cwd, umask)
    return dict(sorted(found.items()))


def render(site: Site, profile: str, *options: str, command: Sequence[str]) -> Path:
    """The script that `ddp-hpc render` writes into the directory of submission."""
    script = site.work / "job.pbs"
    argv = [
        sys.executable,
        "-m",
        "ddp_hpc",
        "render",
        "--profile",
        profile,
        "--name",
        "ddp",
        *options,
        "-o",
        str(script),
    ]
    done = subprocess.run(
        [*argv, "--", *command], cwd=site.work, env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return script
