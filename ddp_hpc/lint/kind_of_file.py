"""Whether a file is submitted as it is, unlike texts, backup copies, templates and forms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ddp_hpc.lint.check_registry import LintFinding
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.template_files import has_name_of_template

_MANY = 3
"""The number of shebangs after line 1 from which on the file contains several scripts, and of prompts from
which on it contains what a terminal has shown.
"""
_PROMPT = re.compile(r"(?:\(\w{1,30}\) ?)?\[\w{1,30}@[\w.-]{1,40} [^\]\s]{1,80}\][$#] ")
# A sentence of several words.
_PROSE = re.compile(
    r"(?=.* (?:the|of|to|and|with|from|per|for|is|are|has) )[A-Z][a-z]+ [a-z]+(?: [\w,.:;()/-]+){4,}$"
)
# A path for the reader to replace. After a colon, it is one in a container.
_PATH_TO = re.compile(r"(?!\s*(?:echo|printf)\b|.*\$\{\w+:?\?)(?:[^#]|\$#)*(?<![^\s='\"])/path/to/")
_FIXME = re.compile(r"\b(?:FIX|FILL|CHANGE)_?ME\b")
# The suffixes of texts and programs, unless they begin with a shebang.
_OF_TEXTS = frozenset((".txt", ".md", ".Rmd", ".qmd", ".rst", ".org", ".tex", ".py", ".ipynb"))
_OF_BACKUPS = re.compile(r".*(?:~|\.(?:bak|orig|old|save|swp|retired))|\.?#.*#|\.#.*")
# What the tests of a program compare with the scripts that it writes.
_OF_TESTS = re.compile(r"/tests?/(?:test_?files|test_?data|fixtures|files|data)/")
_OF_PROJECTS = (".git", "pyproject.toml", "setup.py")
# Directories in which editors keep earlier versions of files.
_OF_EDITORS = re.compile(r"\.(?:vscode(?:-server)?|history|ipynb_checkpoints|idea)")


def without_unsubmitted(
    findings: Iterable[LintFinding], script: Script, path: Path | None
) -> Iterator[LintFinding]:
    """Yields the findings. Those on what nobody submits, or may not submit, become notes.

    Examples and courses have scripts that users complete, and then see what remains to do. Only errors of
    directives without a placeholder remain errors there.
    """
    findings = list(findings)
    directives, later = {d.line for d in script.read()}, _later_shebangs(script)
    is_not_submitted, weaker = _is_not_submitted(script, path, later), _may_be_notes(script, later)
    is_form = any(one.is_to_fill_in for one in findings) or _asks_to_fill_in(script, directives)
    # The head of other scripts has directives only.
    is_head = path is not None and all(line[:1] in ("", "#") for line in map(str.strip, script.lines))
    for one in findings:
        # Whatever is filled in, sbatch and qsub reject the other directives that are wrong.
        remains = one.severity == "error" and one.line in directives and not one.is_to_fill_in
        is_weaker = is_not_submitted or (is_form and not remains)
        is_weaker |= one.severity in weaker and one.line not in {1, *directives}
        is_weaker |= is_head and one.severity == "warning"
        yield replace(one, severity="note") if is_weaker else one


def _is_not_submitted(script: Script, path: Path | None, later: list[str]) -> bool:
    """Returns whether nobody submits the file: a text, several scripts, a backup copy or a template."""
    # A shebang in one of the next lines is a mistake that SLURM001 reports.
    num_shebangs = script.lines[0].startswith("#!") + len(later)
    has_shebang = num_shebangs == 1 and any(line.startswith("#!") for line in script.lines[:3])
    if path is not None:
        is_other = _has_name_of_other(path) or _is_run_by_bash(script, path.name)
        has_name_of_text = path.suffix in _OF_TEXTS or re.match(r"(?i)readme(?:\.|$)", path.name)
        is_text = has_name_of_text and not (has_shebang and script.read())
        if is_other or is_text:
            return True
    is_conflict = script.lines[0].startswith("<<<<<<<")  # of git merge, which has each shebang twice
    return _is_prose(script.lines, num_shebangs) or (len(later) >= _MANY and not is_conflict)


def _is_run_by_bash(script: Script, name: str) -> bool:
    """Returns whether a comment is a command that starts the script with bash, and none submits it."""
    command = rf"(?mi)^#+\s*(?:usage:?\s*|\$ )?(?:bash|sh)\s+(?:\S*/)?{re.escape(name)}(?![\w-]|\.\w)"
    is_named = name in script.text and re.search(command, script.text) is not None
    return is_named and re.search(r"\b(?:sbatch|qsub)\b", script.text) is None


def _has_name_of_other(path: Path) -> bool:
    """Returns whether the path is that of a backup copy, of a template, or of a file for tests."""
    is_copy = _OF_BACKUPS.fullmatch(path.name) or any(map(_OF_EDITORS.fullmatch, path.absolute().parts[:-1]))
    of_tests = _OF_TESTS.search(path.absolute().as_posix())
    above = Path(of_tests.string[: of_tests.start()] or "/") if of_tests else None
    is_for_tests = above is not None and any(
        (directory / name).exists() for directory in (above, *above.parents) for name in _OF_PROJECTS
    )
    return bool(is_copy) or is_for_tests or has_name_of_template(path)


def _asks_to_fill_in(script: Script, directives: Collection[int]) -> bool:
    """Returns whether a directive says FIXME, or a command has a path such as /path/to/data."""
    if any(_FIXME.search(script.lines[line - 1]) for line in directives):
        return True
    lines = (n for n, line in enumerate(script.lines, 1) if "/path/to/" in line and _PATH_TO.match(line))
    return not all(map(script.is_quoted, lines))


def _is_prose(lines: Sequence[str], num_shebangs: int) -> bool:
    """Returns whether a file begins with a sentence, or contains Markdown or what a terminal has shown."""
    num_prompts = sum(map(bool, map(_PROMPT.match, lines)))
    has_fences = lines[0][:2] != "#!" and sum(line.startswith("```") for line in lines) > 1
    begins = num_shebangs == 0 and any(map(_PROSE.match, lines[:3]))
    return begins or has_fences or num_prompts >= _MANY or _PROMPT.match(lines[0]) is not None


def _may_be_notes(script: Script, later: list[str]) -> tuple[str, ...]:
    """Returns the severities of findings on commands that may be none of a job.

    Before the shebang, there are notes, or what is run before, in another shell; and notes with examples have
    several shebangs, or fences of Markdown.
    """
    first = script.lines[0]
    num_fences = sum(command.text.startswith("```") for command in script.commands)
    if num_fences > 1 or sum(line.startswith(("#SBATCH", "#PBS")) for line in later) > 1:
        return ("error", "warning")
    return ("warning",) if not first.startswith("#!") and ("#!" in first or later) else ()


def _later_shebangs(script: Script) -> list[str]:
    """Returns the lines after shebangs other than that of line 1, and than those of here-documents."""
    return [
        following
        for number, (line, following) in enumerate(pairwise((*script.lines[1:], "")), start=2)
        if re.match(r"#![ \t]*/", line) and not script.is_quoted(number)
    ]
