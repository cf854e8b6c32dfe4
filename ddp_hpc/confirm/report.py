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
    rows += [(one.key, one.profile, one.machine, one.verdict) for one in facts]
    cells = [[cut(_clean(cell, environ), _MAX_CELL) for cell in row] for row in rows]
    lines = aligned(cells, num_left=4)
    for verdict, title in ((DIFFERS, "Change in"), (NEW, "Add to")):
        if changes := list(_changes([one for one in facts if one.verdict == verdict])):
            lines += ["", f"{title} the profile:", *(f"  {_clean(line, environ)}" for line in changes)]
    how = (
        "To share the result, run this command again with --json and send its output to the maintainers of "
        f"ddp-hpc, or send a changed profiles/{site.name}.toml with the date of today as `checked`. User "
        "names and host names are removed where they are known. Read the output before you send it."
    )
    return "\n".join([*lines, "", how])


def as_data(
    site: Site, answers: Answers, found: MachineFacts, facts: Sequence[Fact], environ: Mapping[str, str]
) -> dict[str, object]:
    """Returns the comparison and what the machine reports as plain data, without names of users and hosts."""
    queues = [
        {"name": printable(name), "qos": printable(qos), **asdict(limits)}
        for (name, qos), limits in sorted(found.queues.items())
    ]
    nodes = [{name: value for name, value in asdict(one).items() if name != "name"} for one in found.nodes]
    return {
        "profile": site.name,
        "checked": site.checked,
        "version": found.version,
        "facts": [
            {name: _clean(value, environ) for name, value in asdict(one).items() if name != "change"}
            for one in facts
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
