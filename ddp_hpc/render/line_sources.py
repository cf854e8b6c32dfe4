"""Finds the facts of a profile on which each line of a job script depends, and their sources.

A line depends on a fact if it changes when the script is rendered without this fact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site

# Scripts cannot be rendered without these facts, so they are replaced instead.
_OTHER_VALUES = {"default_walltime": "00:10:00", "launch.default": "torchrun"}
# These describe the profile itself, not the machine.
_NOT_FACTS = frozenset(
    {"name", "file", "extends", "title", "owner", "checked", "confidence", "sources", "notes"}
)


@dataclass(frozen=True, kw_only=True)
class ScriptLine:
    """One line of a script. `facts` are keys of the profile, such as `slurm.constraint`.

    `sources` are indices of the profile's sources that name the tables of these facts.
    """

    text: str
    facts: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


def line_sources(job: Job, site: Site) -> list[ScriptLine]:
    """Returns the lines of the job script, each with the facts of the profile on which it depends.

    Raises:
        RequestError: the job cannot be rendered for the site.
    """
    lines = render(job, site).splitlines()
    facts: list[list[str]] = [[] for _ in lines]
    for key, others in _scripts_without_one_fact(job, site):
        for number in _changed(lines, others):
            facts[number].append(key)
    # Several facts of a table can each be enough for a line.
    for key, others in _scripts_without_one_table(job, site):
        for number in _changed(lines, others):
            facts[number] = facts[number] or [key]
    return [
        ScriptLine(text=line, facts=list(dict.fromkeys(keys)), sources=_sources_of(keys, site))
        for line, keys in zip(lines, facts, strict=True)
    ]


def _changed(lines: list[str], others: list[str]) -> Iterator[int]:
    for tag, start, end, _, _ in SequenceMatcher(None, lines, others, autojunk=False).get_opcodes():
        if tag in ("replace", "delete"):
            yield from range(start, end)


def _sources_of(facts: list[str], site: Site) -> list[int]:
    """Returns the sources of the facts: those that name a fact itself, otherwise those of its table."""
    found: set[int] = set()
    for fact in facts:
        exact = [number for number, source in enumerate(site.sources) if fact in source.of]
        table = fact.partition(".")[0]
        found.update(exact or (number for number, source in enumerate(site.sources) if table in source.of))
    return sorted(found)


def _scripts_without_one_fact(job: Job, site: Site) -> Iterator[tuple[str, list[str]]]:
    """Yields the key of each fact, and the lines of the script without it. A key can occur more than once."""
    # The binding fits one number of devices and one kind of mpiexec, so it hides what depends on these.
    unbound = replace(site, launch=replace(site.launch, cpu_bind=()))
    for table in fields(Site):
        if table.name in _NOT_FACTS:
            continue
        for key, changed in _without_one(table.name, getattr(site, table.name), _default(table)):
            for base in (site, unbound):
                with suppress(RequestError):
                    yield key, render(job, replace(base, **{table.name: changed})).splitlines()
                    break


def _scripts_without_one_table(job: Job, site: Site) -> Iterator[tuple[str, list[str]]]:
    for table in fields(Site):
        if table.name not in _NOT_FACTS and is_dataclass(_default(table)):
            with suppress(RequestError):
                yield table.name, render(job, replace(site, **{table.name: _default(table)})).splitlines()


def _without_one(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if default is None and value is not None:
        yield key, None
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            for name, changed in _without_one(
                f"{key}.{part.name}", getattr(value, part.name), _default(part)
            ):
                with suppress(RequestError):  # other facts of this table require it
                    yield name, replace(value, **{part.name: changed})
    elif isinstance(value, dict):
        for name in value:
            yield f"{key}.{name}", {other: value[other] for other in value if other != name}
    elif isinstance(value, tuple):
        yield from ((key, (*value[:number], *value[number + 1 :])) for number in range(len(value)))
        yield key, ()
    elif isinstance(value, int) and not isinstance(value, bool) and value:
        # A number that nothing can do without is doubled instead: other facts may have to be multiples of it.
        yield from ((key, default), (key, 2 * value))
    elif value != default:
        yield key, _OTHER_VALUES.get(key, default)


def _default(of: Any) -> Any:
    if of.default is not MISSING:
        return of.default
    return of.default_factory() if of.default_factory is not MISSING else ""
