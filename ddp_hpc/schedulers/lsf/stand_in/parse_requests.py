"""Parses the requests in a script and on the command line of bsub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddp_hpc.rehearse.job_arrays import parse_indices
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.schedulers.lsf import times
from ddp_hpc.schedulers.lsf.parse_directives import is_known, split_words
from ddp_hpc.schedulers.lsf.stand_in.cluster import REFUSED

_DIRECTIVE = re.compile(r"\s*#\s*BSUB\s+(?=-)(.*)")
_WALLTIME = re.compile(r"(?:\d{1,6}:)?\d{1,9}(?:/[\w.-]+)?")
_PTILE = re.compile(r"span\[ *(?:ptile *= *(\d{1,6})|hosts *= *1)")


def directives(script: str) -> dict[str, str]:
    """Returns the options of the script's #BSUB lines: the last value of each option, and all values of -R.

    Unlike sbatch, bsub also reads directives that follow the first command (bsub, job_script).
    """
    found: dict[str, str] = {}
    for line in script.split("\n"):
        if match := _DIRECTIVE.match(line):
            with suppress(ValueError):  # ignore an unclosed quote
                found = merged(found, options(shlex.split(match[1], comments=True)))
    return found


def options(words: Sequence[str]) -> dict[str, str]:
    """Returns the options and their values by flag.

    Raises:
        RefusedError: bsub does not have an option, or a word does not belong to an option.
    """
    found: dict[str, str] = {}
    for flag, value in split_words(words):
        if not flag:
            raise RefusedError(
                f"bsub: the stand-in runs scripts from stdin, not the command {value}", REFUSED
            )
        if not is_known(flag):
            # The wording of this message is an assumption.
            raise RefusedError(f"{flag}: Illegal option. Job not submitted.", REFUSED)
        found = merged(found, {flag: value})
    return found


def merged(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Returns the merged options; `other` has precedence, but resource requirements are joined (bsub -R)."""
    both = {**one, **other}
    if "-R" in one and "-R" in other:
        both["-R"] = f"{one['-R']} && {other['-R']}"
    return both


def walltime_s(text: str) -> int:
    """Returns the run limit in seconds; 0 for an empty text.

    Raises:
        RefusedError: the text does not have the format [hour:]minute[/host].
    """
    if not _WALLTIME.fullmatch(text or "0"):
        raise RefusedError(f"{text}: Bad RUNLIMIT specification. Job not submitted.", REFUSED)
    return times.walltime_s(text or "0")


def name_and_indices(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns the name of the job, and the indices if it is an array, as in `name[1-4]%2`.

    Raises:
        RefusedError: an array has invalid indices, or the index 0.
    """
    name, bracket, indices = text.partition("[")
    if not bracket:
        return name, ()
    # The wording of this message is an assumption.
    error = RefusedError(f"{text}: Bad job name. Job not submitted.", REFUSED)
    match = re.fullmatch(r"([^\]]*)\](?:%[1-9][0-9]*)?", indices)
    found = parse_indices(match[1] if match else "", error)
    if found[0] == 0:
        raise error
    return name, found


def slots_per_node(given: Mapping[str, str]) -> list[int]:
    """Returns the number of slots on each requested node; with -nnodes, one slot per node.

    Without span, the stand-in places all slots on one node; this is an assumption, as LSF can use any hosts.

    Raises:
        RefusedError: the number of slots or nodes is invalid.
    """
    for flag in ("-nnodes", "-n"):
        text = given.get(flag, "1").split(",")[0]
        if not re.fullmatch(r"[1-9][0-9]{0,6}", text):
            raise RefusedError(f"Bad argument for option {flag}. Job not submitted.", REFUSED)
    if "-nnodes" in given:
        return [1] * int(given["-nnodes"])
    slots = int(given.get("-n", "1").split(",")[0])
    span = _PTILE.search(given.get("-R", ""))
    per_node = int(span[1]) if span and span[1] and int(span[1]) else slots
    full, rest = divmod(slots, per_node)
    return [per_node] * full + [rest] * bool(rest)
