"""Reads the answers of a machine: the output of the script, and the lines of the ranks of the job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.text_table import cut, printable
from ddp_hpc.confirm.checklist import FIRST, LAST, LAUNCHERS, MARK, PYTHON, SOFTWARE, first_line
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.site import Site

# pbsnodes prints more than 1 kB per node, and a machine has up to 10,000 nodes.
MAX_BYTES = 32 * 1024 * 1024
_MAX_RANKS = 4096
_CPUS = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?){0,512}")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank of the job sees; `num_devices` is None if it is unknown. `node` is a number from 1 on."""

    rank: int
    local_rank: int
    node: int
    cpus: str
    num_devices: int | None
    interfaces: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The output of the commands by their keys, and the ranks of the job.

    `is_complete` is False if the script was interrupted.
    """

    sections: dict[str, str]
    ranks: tuple[Rank, ...] = ()
    is_complete: bool = True


def load_answers(path: str, site: Site) -> Answers:
    """Reads answers from a file, or from stdin if `path` is `-`.

    Raises:
        RequestError: the file cannot be read, or does not contain answers for this profile.
    """
    try:
        if path == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"the answers in {printable(path)} cannot be read ({reason})") from None
    if len(content) > MAX_BYTES:
        raise RequestError(
            f"{printable(path)} has more than {MAX_BYTES // 1024**2} MiB, which is too large for answers. "
            "Give the output of the script that ddp-hpc profiles confirm prints."
        )
    return read_answers(content.decode("utf-8", "replace"), site)


def read_answers(text: str, site: Site) -> Answers:
    """Returns the answers in a text.

    Raises:
        RequestError: the text does not contain answers for this profile.
    """
    lines = text.split("\n")
    marks = {line.rstrip("\r").removeprefix(MARK) for line in lines if line.startswith(f"{MARK}{FIRST}")}
    if not marks:
        raise RequestError(
            "this is not the output of a script that ddp-hpc profiles confirm prints: it has no line that "
            f"begins with {MARK + FIRST!r}. Run ddp-hpc profiles confirm {site.name} -o confirm.sh, and then "
            "bash confirm.sh >answers.txt on a login node."
        )
    if marks != {first_line(site)}:
        other = cut(printable(min(marks - {first_line(site)}).removeprefix(FIRST).strip()), 60)
        raise RequestError(
            f"these are answers for another profile ({other}), not for {site.name} {site.scheduler}. Give "
            "the name of that profile, or run the script of this one."
        )
    keys = {question.key for question in scheduler_of_site(site).commands.questions()}
    keys |= {SOFTWARE, PYTHON, LAUNCHERS, LAST}
    by_key: dict[str, list[str]] = {}
    key = ""
    for line in lines:
        name = line.removeprefix(MARK).rstrip("\r") if line.startswith(MARK) else ""
        if name in keys:
            key = name
            by_key[key] = []
        elif key:
            by_key[key].append(line)
    sections = {key: "\n".join(section) for key, section in by_key.items() if key != LAST}
    return Answers(sections=sections, ranks=tuple(_ranks(lines)), is_complete=LAST in by_key)


def _ranks(lines: list[str]) -> Iterator[Rank]:
    """Yields the ranks whose `ddp-hpc env --json --devices` is in a log. Their hosts become numbers."""
    hosts: dict[str, int] = {}
    # Some launchers and schedulers write the rank or the host before each line.
    for line in islice((line for line in lines if '{"launcher": ' in line), _MAX_RANKS):
        try:
            report = json.loads(line[line.index("{") :])
            rank = _rank(report, hosts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        yield rank


def _rank(report: dict[str, Any], hosts: dict[str, int]) -> Rank:
    values, devices, cpus = report["values"], dict(report["devices"]), report["cpus"]
    number = devices.pop("number")
    if not _CPUS.fullmatch(cpus):
        raise ValueError(cpus)
    if number is None and devices:  # without a torch for GPUs, the variables name the devices
        number = len(str(next(iter(devices.values()))).split(","))
    return Rank(
        rank=_count(values["rank"]),
        local_rank=_count(values["local_rank"]),
        node=hosts.setdefault(str(report["hostname"]), len(hosts) + 1),
        cpus=cpus,
        num_devices=None if number is None else _count(number),
        interfaces=tuple(map(str, report["interfaces"])),
        variables={str(name): str(value) for name, value in devices.items()},
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 10**6:
        raise ValueError(value)
    return value
