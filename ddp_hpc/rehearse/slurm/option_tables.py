"""The options of srun and sbatch of Slurm 26.05."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddp_hpc.rehearse.launchers.options import Table
from ddp_hpc.schedulers.slurm.check_option_values import time_s
from ddp_hpc.schedulers.slurm.sbatch_options import ALIASES, OPTIONS, SRUN_OPTIONS, VERSIONS, SbatchOption


def _table(program: str, options: Mapping[str, SbatchOption]) -> Table:
    values: dict[str, str] = {}
    bare: dict[str, str] = {}
    for option in options.values():
        if option.is_in(VERSIONS[-1]):
            names = filter(None, (option.name, option.letter))
            known = values if option.value == "required" else bare
            known |= dict.fromkeys(names, ALIASES.get(option.name, option.name))
    return Table(program=program, values=values, bare=bare, long_only=False)


SRUN = _table("srun", SRUN_OPTIONS)
SBATCH = _table("sbatch", OPTIONS)


def node_count(table: Table, text: str) -> int:
    """Returns the minimum number of nodes from `N` or `MIN-MAX`."""
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    if not match or int(match[1]) < 1:
        raise table.refuse(f'error: "{text}" is not a valid node count')
    return int(match[1])


def walltime_s(text: str) -> int:
    """Returns the seconds of a time limit; 0 means no limit.

    Raises:
        RefusedError: the text has another format.
    """
    if text.lower() in ("unlimited", "infinite", "0"):
        return 0
    seconds = time_s(text)
    if seconds is None:
        raise SBATCH.refuse("error: Invalid --time specification")
    return seconds


def exported(export: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that --export passes on, such as `ALL,A=1`, `NONE` or `A,B`."""
    words = export.split(",")
    own = dict(word.split("=", 1) for word in words if "=" in word)
    if "ALL" in words:
        return {**environ, **own}
    kept = {"HOME", "USER", "LOGNAME", "PATH", "SHELL"} if export in ("NONE", "NIL") else set(words)
    return {name: value for name, value in environ.items() if name in kept or name.startswith("SLURM")} | own
