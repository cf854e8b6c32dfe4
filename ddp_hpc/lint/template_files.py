"""Templates of job scripts, which a program fills in before they are submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.placeholders import (
    find_placeholder,
    has_placeholder,
    without_comment,
    without_file_name_patterns,
)

# Names and directories of templates, such as job.sbatch.template, submit.sh.in and templates/job.sh.
_SUFFIX = r"\.(?:templ(?:ate)?|tmpl|tpl|j2|jinja2?|mako|erb|mustache|skel)$"
_NAMED = re.compile(
    rf"{_SUFFIX}|\.(?:in|dist|sample|example)$|\.tmp\b"
    r"|(?<![A-Za-z])(?:(?:job)?[Tt]emplates?|TEMPLATES?|tmpl|skeleton|BLANK)(?![A-Za-z])|^skel\.|[a-z]Template(?![a-z])",
)
# Names that are enough without a placeholder: job_template.sh and job.in.slurm, but not build_template.sh,
# which makes a template of images.
_NAME_OF_TEMPLATE = re.compile(
    r"(?i)(?!.*(?:to|build|make|create|no)[-_]?template)"
    r"(?:(?:.*(?:[^a-z]|(?-i:[a-z](?=T))))?template\d*[)\]]?(?:\.\w+)*|template[-_](?!match).*|.*\.in\.\w+)"
)
_STATEMENT = re.compile(
    r"%include\s*<|\s*(?:\{%-?\s*(?:if|for|set|block|extends|include|macro|raw|else|endif|endfor)\b.*%\}|<%[!=]?\s)"
)
# Placeholders that only programs fill in. The first word of Jinja is a name: `{{.Names}}` is for docker ps.
_OF_PROGRAMS = re.compile(
    r"(?<!\$)\{\{[-=:]?\s*[A-Za-z_][^{}]*\}\} | %\(\w+\)\d*[sd] | @@?[A-Za-z]\w*@@?(?![\w.])"
    r" | @[A-Z][A-Z0-9_]*@ | !?\bTBG_\w+"
    r" | (?<!X)X{3}[^\WX]\w*?X{3}(?![A-Z]) | (?<!x)x{3}[A-Z]\w*?x{3}(?!\w)"
    r" | \#{1,2}[A-Z]\w*\#{1,2} | %%[A-Za-z][\w-]*%%",
    re.VERBOSE,
)
# These may also be for the user, unless there are several.
_OF_EITHER = re.compile(
    r"(?<![$\w{])\{(?:[A-Za-z_][\w.]*(?:\[\w+\]|:\w+)?|\d)\} | (?<=[=\s:])%[sd](?!\w)"
    r" | (?<!\w)__[A-Za-z]\w*__(?!\w) | (?<!\w)_[A-Z][A-Z_]*_(?!\w)"
    r" | %[A-Z][A-Z_]+% | \[\[\w+\]\] | (?<=\w)<[A-Z][A-Z0-9_]*>"
    r" | (?<=[=\s])(?:%[a-z]\w{2,}|@[A-Z]\w+)(?![\w%@.]) | \w+_PLACEHOLDER\b",
    re.VERBOSE,
)
_ALONE = re.compile(r"\s*(?:<[A-Z][A-Z0-9_]*>|_[A-Z][A-Z_]*_)\s*")
_OF_USERS = re.compile(r"your|(?<![a-z])(?:my|insert|change|replace|fill|put|edit)(?![a-z])", re.IGNORECASE)
# In a template: variables that string.Template and envsubst replace, and letters such as XXX and NNN.
_IN_TEMPLATES = re.compile(
    r"\$\{?(?!(?:HOME|USER|SCRATCH|WORK|TMPDIR|PWD|SLURM_\w+|PBS_\w+)\b)[A-Za-z_]\w*\}?"
    r"|(?<!\$)\{[A-Za-z_]\w*\}|(?<![A-Za-z])(?P<same>[A-Z])(?P=same){2,}(?![A-Z])|(?<=[=\s:])(?:![A-Z]\w*|X|\{\d\}|%[sd])(?=$|:)|\?[A-Z]\w+\?"
    r"|(?<=[-=\s:,])(?!(?:ALL|NONE|END|FAIL|BEGIN|NODE|REQUEUE|TIME_LIMIT|ARRAY_TASKS)(?![A-Z]))"
    r"[A-Z][A-Z_]{2,}(?=$|[:,%])"
)
_MAX_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template: its first placeholder with its line, and the lines that contain placeholders.

    `has_statements` means that some of its lines are conditions or loops.
    """

    line: int
    placeholder: str
    lines: frozenset[int]
    has_statements: bool


def template_of(script: Script, path: Path | None) -> Template | None:
    """Returns the template in a file; None if the file is a script.

    It is a template if it contains a placeholder, and if its name or its directory says so, or if the
    placeholder belongs to a template language.
    """
    lines = {n: line[:_MAX_CHARS] for n, line in enumerate(script.lines, start=1)}
    statements = [n for n, line in lines.items() if _STATEMENT.match(line)]
    if statements:
        first = statements[0]
        return Template(line=first, placeholder=lines[first].strip(), lines=frozenset(), has_statements=True)
    directives = {d.line: without_comment(d.text[:_MAX_CHARS]) for d in script.read()}
    found = list(_of_language(script, directives))
    if not found:
        found = [(n, word) for n, text in directives.items() if (word := _in_template(text))]
        if not found or not (path and _is_named(path)):
            return None
    marked = {n for n, _ in found} | {n for n, text in directives.items() if _in_template(text)}
    marked |= {n for n, line in lines.items() if n not in directives and has_placeholder(line)}
    line, placeholder = min(found)
    return Template(line=line, placeholder=placeholder, lines=frozenset(marked), has_statements=False)


def _of_language(script: Script, directives: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Yields the placeholders of template languages, with their lines."""
    several = []
    for number, text in directives.items():
        yield from ((number, m[0]) for m in _OF_PROGRAMS.finditer(text) if not _is_for_users(m[0]))
        is_log = re.match(r"-[oe]\b|--(?:output|error)\b", text)
        matches = _OF_EITHER.finditer(without_file_name_patterns(text) if is_log else text)
        several += [(number, one[0]) for one in matches if not _is_for_users(one[0])]
    alone = [n for n, line in enumerate(script.lines, 1) if _ALONE.fullmatch(line)]
    several += [(n, script.lines[n - 1].strip()) for n in alone if not script.is_quoted(n)]
    if len(several) > 1:
        yield from several
    for command in script.commands:
        # In quotes, two braces may belong to another language, such as awk or an f-string of Python.
        match = re.match(r"[^'\"$]*?(\{\{-?\s*[A-Za-z_][^{}'\"]*\}\})", command.text)
        if match and not script.is_quoted(command.line):
            yield command.line + command.text.count("\n", 0, match.start(1)), match[1]


def _is_for_users(placeholder: str) -> bool:
    return bool(_OF_USERS.search(placeholder))


def _in_template(text: str) -> str:
    """Returns the first placeholder of a directive in a template; empty if there is none."""
    match = _IN_TEMPLATES.search(text) or _OF_EITHER.search(text)
    return find_placeholder(text, is_path=True) or (match[0] if match else "")


def has_name_of_template(path: Path) -> bool:
    """Returns whether the name alone says that the file is a template, such as job.j2 and job_template.sh."""
    return bool(re.search(_SUFFIX, path.name) or _NAME_OF_TEMPLATE.fullmatch(path.name))


def _is_named(path: Path) -> bool:
    return bool(_NAMED.search(path.name)) or any(
        _NAMED.search(parent.name) for parent in islice(path.absolute().parents, 2)
    )
