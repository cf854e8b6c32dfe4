"""Whether a file is submitted as it is: texts, notes, copies and what only other programs use is not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ddp_hpc.lint.check_registry import LintFinding
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.programs_beside import is_only_used_by_others

_MANY = 3
"""The number of shebangs after line 1 from which on the file contains several scripts."""
# A sentence of several words.
_PROSE = re.compile(
    r"(?=.* (?:the|of|to|and|with|from|per|for|is|are|has) )[A-Z][a-z]+ [a-z]+(?: [\w,.:;()/-]+){4,}$"
)
_OF_NOTES = re.compile(r"```|https?://\S+$")
# The suffixes of files that are no job scripts, unless they begin with a shebang.
_OF_TEXTS = frozenset((".txt", ".md", ".Rmd", ".qmd", ".rst", ".org", ".tex", ".py", ".ipynb"))
# Programs in other languages, whatever their first line says, copies that editors and users keep, and
# templates.
_OF_OTHERS = re.compile(
    r".*(?:~|\.(?:R|pl|m|c|cpp|f90|bak|orig|old|save|swp|backup|templ(?:ate)?|tmpl|tpl|j2|jinja2?|mako))"
)


def weakened(findings: Iterable[LintFinding], script: Script, path: Path | None) -> Iterator[LintFinding]:
    """Yields the findings on a file, as notes where the file is not submitted, or may not be."""
    findings = list(findings)
    first, directives = {1}, {d.line for d in script.directives}
    read = first | {d.line for d in script.read()}
    is_text, may_be_notes = _is_text(script, path), _may_be_notes(script)
    is_problem = any(one.severity != "note" for one in findings)
    is_used = path is not None and is_problem and not is_text and is_only_used_by_others(path)
    for one in findings:
        is_on_directive = is_used and one.line in first | directives
        is_on_command = one.severity in may_be_notes and one.line not in read
        yield replace(one, severity="note") if is_text or is_on_directive or is_on_command else one


def _is_text(script: Script, path: Path | None) -> bool:
    """Returns whether nobody submits the file, as it is a text, a program, a copy, or several scripts."""
    later = _later_shebangs(script)
    # A shebang in one of the next lines is a mistake that SLURM001 reports.
    num_shebangs = script.lines[0].startswith("#!") + len(later)
    is_one_script = num_shebangs == 1 and any(line.startswith("#!") for line in script.lines[:3])
    has_name_of_text = path is not None and (
        path.suffix in _OF_TEXTS or re.match(r"readme(?:\.|$)", path.name, re.IGNORECASE) is not None
    )
    is_other = path is not None and _OF_OTHERS.fullmatch(path.name)
    is_prose = num_shebangs == 0 and any(map(_PROSE.match, script.lines[:3]))
    is_conflict = script.lines[0].startswith("<<<<<<<")  # of git merge, which has each shebang twice
    has_several = len(later) >= _MANY and not is_conflict
    return bool(is_other) or is_prose or has_several or (has_name_of_text and not is_one_script)


def _may_be_notes(script: Script) -> tuple[str, ...]:
    """Returns the severities of findings on commands that may be none of a job.

    Before the shebang, there are notes, or what is run before, in another shell; and notes with examples have
    several shebangs, fences of Markdown, or the address of a page in a line of its own.
    """
    first, after_later = script.lines[0], _later_shebangs(script)
    are_notes = any(_OF_NOTES.match(command.text) for command in script.commands)
    if are_notes or sum(line.startswith(("#SBATCH", "#PBS")) for line in after_later) > 1:
        return ("error", "warning")
    return ("warning",) if not first.startswith("#!") and ("#!" in first or after_later) else ()


def _later_shebangs(script: Script) -> list[str]:
    """Returns the lines after shebangs other than that of line 1, and than those of here-documents."""
    return [
        following
        for number, (line, following) in enumerate(pairwise((*script.lines[1:], "")), start=2)
        if re.match(r"#![ \t]*/", line) and not script.is_quoted(number)
    ]
