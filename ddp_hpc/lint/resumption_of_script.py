"""How the program of a job script is resumed; see `ddp_hpc.request.resumption`."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.lint.parse_script import Script
from ddp_hpc.request.resumption import Resumption, resumption_of


def resumption_of_script(script: Script, directory: Path) -> Resumption | None:
    """Returns how the program of a script is resumed that is submitted from `directory`.

    None if `python -m ddp_hpc.job`, which resumes programs, does not run the job.
    """
    command = script.supervised
    if command is None:
        return None
    options = command.words[: command.words.index("--")] if "--" in command.words else command.words
    return resumption_of(
        command.launched or command.argv,
        directory,
        on_signal="on-signal" in options,
        has_progress="--progress" in options,
    )
