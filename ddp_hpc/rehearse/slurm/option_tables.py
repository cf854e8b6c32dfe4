"""The options of srun and sbatch of Slurm 26.05, and the messages about invalid options."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddp_hpc.rehearse.launchers.options import RefusedError, Table
from ddp_hpc.schedulers.slurm.sbatch_options import ALIASES, OPTIONS, SRUN_OPTIONS, VERSIONS, SbatchOption

BAD_OPTION = '{program}: {{what}}\nTry "{program} --help" for more information'
_REFUSED = 255


def _table(program: str, options: Mapping[str, SbatchOption]) -> Table:
    with_value: dict[str, tuple[str, ...]] = {}
    without_value: dict[str, tuple[str, ...]] = {}
    for option in options.values():
        if option.is_in(VERSIONS[-1]):
            table = with_value if option.value == "required" else without_value
            name = ALIASES.get(option.name, option.name)
            table[name] = (*table.get(name, ()), *filter(None, (option.name, option.letter)))
    return Table(
        values=with_value,
        bare=without_value,
        long_only=False,
        bad_option=BAD_OPTION.format(program=program),
        bad_number=f'{program}: error: Invalid numeric value "{{text}}" for --{{name}}.',
        exit_codes=(_REFUSED, 1),
    )


SRUN = _table("srun", SRUN_OPTIONS)
SBATCH = _table("sbatch", OPTIONS)


def node_count(program: str, text: str) -> int:
    """Returns the minimum number of nodes from `N` or `MIN-MAX`."""
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    if not match or int(match[1]) < 1:
        raise RefusedError(f'{program}: error: "{text}" is not a valid node count', _REFUSED)
    return int(match[1])


def walltime_s(text: str) -> int:
    """Returns the seconds of `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; 0 means no limit.

    Raises:
        RefusedError: the text has another format.
    """
    if text.lower() in ("unlimited", "infinite", "0"):
        return 0
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,7}))?(?::(\d{1,7}))?", text)
    if not match:
        raise RefusedError("sbatch: error: Invalid --time specification", _REFUSED)
    days, parts = match[1], [int(part) for part in match.groups()[1:] if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
