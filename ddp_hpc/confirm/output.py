"""The result of a comparison as text or JSON, without the names of users and hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from ddp_hpc.base.text_table import aligned, cut, printable
from ddp_hpc.confirm.answers import Answers
from ddp_hpc.confirm.compare import DIFFERS, NEW, Fact
from ddp_hpc.schedulers.machine_facts import MachineFacts
from ddp_hpc.sites.site import Site

_MAX_CELL = 60
_HOME = re.compile(r"/(home|users?)/[^/\s'\"]+")


def as_text(site: Site, facts: Sequence[Fact], environ: Mapping[str, str]) -> str:
    """Returns the table, the lines of TOML to change, and how to send the result."""
    rows = [("fact", "profile", "machine", "result")]
    rows += [(fact.key, fact.profile, fact.machine, fact.verdict) for fact in facts]
    cells = [[cut(_clean(cell, environ), _MAX_CELL) for cell in row] for row in rows]
    lines = aligned(cells, num_left=4)
    for verdict, title in ((DIFFERS, "Change in"), (NEW, "Add to")):
        if changes := list(_changes([fact for fact in facts if fact.verdict == verdict])):
            lines += ["", f"{title} the profile:", *(f"  {_clean(line, environ)}" for line in changes)]
    how = (
        "To share the result, run this command again with --json and send its output to the maintainers of "
        f"ddp-hpc, or send a changed profiles/{site.name}.toml with the date of today as `checked`. User "
        "names and host names are removed where they are known. Read the output before you send it."
    )
    return "\n".join([*lines, "", how])


def as_data(
    site: Site, answers: Answers, machine: MachineFacts, facts: Sequence[Fact], environ: Mapping[str, str]
) -> dict[str, object]:
    """Returns the comparison and what the machine reports as plain data, without names of users and hosts."""
    queues = [
        {"name": printable(name), "qos": printable(qos), **asdict(limits)}
        for (name, qos), limits in sorted(machine.queues.items())
    ]
    nodes = [
        {name: value for name, value in asdict(kind).items() if name != "name"} for kind in machine.nodes
    ]
    return {
        "profile": site.name,
        "checked": site.checked,
        "version": machine.version,
        "facts": [
            {name: _clean(value, environ) for name, value in asdict(fact).items() if name != "change"}
            for fact in facts
        ],
        "queues": queues,
        "nodes": nodes,
        "ranks": [asdict(rank) for rank in answers.ranks],
    }


def _changes(facts: Sequence[Fact]) -> Iterator[str]:
    """Yields the lines of TOML, with the header of each table once."""
    before = ""
    for fact in facts:
        header, *lines = fact.change or ("",)
        if header and (header != before or header == "[[queues]]"):
            yield header
        before = header
        yield from lines


def _clean(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text that cannot control the terminal, without the user's name and home directories."""
    text = _HOME.sub(r"/\1/USER", printable(text))
    names = {environ.get(name, "") for name in ("USER", "LOGNAME")}
    for name in names:
        if len(name) > 2 and name != "root":
            text = re.sub(rf"\b{re.escape(name)}\b", "USER", text)
    return text
