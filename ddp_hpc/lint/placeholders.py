"""Placeholders of templates, such as <account>, {{nodes}} or @NODES@, which were not replaced by values."""

from __future__ import annotations

import re
from functools import lru_cache

from ddp_hpc.lint.parse_script import Script

_PLACEHOLDER = re.compile(
    r"""
    \{\{.*?\}\} | \{%.*?%\} | \{\{ | \}\} | \{% | %\} | <%.* | .*%>    # Jinja, Mako, ERB
  | <[^<>\s][^<>]*>? | [^<>]*[^<>\s]>(?![\w/])                  # <account>, also in several words
  | \[\[?[A-Za-z_-][A-Za-z _-]*\]?\]                             # [ACCOUNT]
  | (?<![$\w])\{[A-Za-z_(][^{}]*\} | %\(\w+\)[sd]               # {nodes} or %(nodes)d, for Python
  | (?:(?<!\w)@@?\{?[A-Z][A-Z0-9_]*\}?|@@?\{?[A-Z][A-Z0-9_]*\}?@@?)(?![\w.@])  # @NODES@
  | (?<!\w)@[A-Z][A-Z0-9_]*@(?!\w)
  | (?<!\w)@[a-z]\w*@                                          # @nodes@
  | %%?[A-Za-z][A-Za-z_]+%%? | %s\b                             # %NODES%
  | \#{1,2}[A-Z]\w*\#{1,2} | @@+\w+@@+ | (?<!\w)_[A-Z][A-Z_]*_(?!\w)  # ##NODES##, @@nodes@@, _NODES_
  | (?<!\w)__[A-Za-z]\w*__(?!\w) | !?\bTBG_\w+
  | \#\#[a-z]\w*\#\# | (?<=[=\s])__[a-z]\w*\b | \{\d+\.[A-Za-z][^{}]*\} | \bx{3}[A-Z]\w*x{3}\b
  | \bX{3,}\b | \bX{3}\w+X{3}\b | \b(?:x{3,6}|y{3,6}|z{3,6})\b
  | \b(?:YOUR|[Yy]our|INSERT|CHANGE|REPLACE|FILL|PUT|REQUESTED)[_ -]\w+ | \b(?:MYACCOUNT|youracc(?:oun)?t)\b
  | \b(?:CHANGEME|CHANGE_ME|FIXME|TODO|TBD)\b
  | \.\.\.$ | (?<=\s)\.\.\.(?=\s) | (?<![\w${-])(?:[Pp]roject|[Aa]ccount|[Pp]artition)[_-][Nn]ame(?![\w-])
    """,
    re.VERBOSE,
)
# The pattern characters of file names, with a width: %j, %4t, %A_%a.
_FILE_NAME_PATTERN = re.compile(r"%\d*[AaJjNnstuxbc](?![A-Za-z][A-Za-z_]*%)|(?<![A-Za-z_])%%(?![A-Za-z])")
_COMMENT = re.compile(r"(?:^|\s)#(?!#?[A-Z]\w*#).*")
# Placeholders that cannot be names: a job may well be called xxx or TODO.
_MARKED = re.compile(
    r"\$(?:\d|\w+|\{[^{}]*\}|\([^()]*\))?|\{\{.*|\{%.*|<%.*|<[A-Za-z_](?![^<>]*@[^<>]*>)[^<>]*>?|\{[A-Za-z_]\w*\}|"
    r"@[A-Z]\w*@|\byour[\w.-]*(?=@)|^__[A-Za-z]\w*__$"
)
# Letters such as MEMORY and 1-X as the value of an option of sbatch, or of a resource of PBS.
_FOR_NUMBER = re.compile(
    r"(?:--(?:mem|nodes|ntasks|cpus|time|array)[\w-]*[= ]\s*|-[nct]\s+|-N\s+(?=[XY]\b)|"
    r"-l\s+(?:\S*[,:])?(?:walltime|nodes|ncpus|mem|ppn|select)=)"
    r"(?!UNLIMITED|INFINITE|[KMGT]B)(?:\d+-)?(?:[A-Z][A-Z_]*|x{1,3})(?=$|[\s:,])"
)
# What a program replaces where a number, a size or a time belongs: num_cores, 1-n_jobs%4, self.cores,
# 1-==jobs==, XXXtime, xTime:00:00, CORES, HH:MM:SS, processes and totalnodes.
_NAME_FOR_VALUE = re.compile(
    r"(?:\d+-)?(?:_*[A-Za-z]+_\w+|_+[A-Za-z]+|[a-z]+\.[a-z]+|==\w+==|X{3}[a-z]+|x[A-Z][a-z]+(?::\d\d){1,2}"
    r"|\w*_(?:[Oo]f|[Tt]he|[Tt]o|[Yy]our?)_[\w.-]+"
    r"|(?:n|num|number|total)?(?:nodes?|cores?|cpus?|tasks?|process(?:es|ors?)?|procs?|ranks?|threads|jobs|memory)"
    r"|(?!NONE|NULL|NAN|INF|[KMGT]B)[A-Z]{2,}(?::[A-Z]{2,}){0,2})(?:%\w+)?"
)
# A script for a template engine: bash could not run these lines.
_TEMPLATE_LINE = re.compile(r"\s*(?:\{%|<%|\{\{#|#\{|@\(.*\)@)|.*\{\{[^{}]+\}\}", re.DOTALL)
_MAX_CHARS = 500


def has_placeholder(text: str, *, is_path: bool = False) -> bool:
    """Returns whether a value in a directive is, or contains, a placeholder."""
    return bool(find_placeholder(text, is_path=is_path))


@lru_cache(maxsize=64)  # each option of a directive has the text of the whole line
def find_placeholder(text: str, *, is_path: bool = False) -> str:
    """Returns the first placeholder in a value of a directive; empty if there is none."""
    text = text[:_MAX_CHARS]
    match = _PLACEHOLDER.search(without_file_name_patterns(text) if is_path else text)
    return match[0] if match else ""


def stands_for_number(text: str) -> bool:
    """Returns whether a directive has letters such as X or MEMORY where a number or a size belongs."""
    return bool(_FOR_NUMBER.match(text[:_MAX_CHARS]))


def stands_for_value(text: str) -> bool:
    """Returns whether a value, which is no name, looks like a variable that a program replaces."""
    return bool(_NAME_FOR_VALUE.fullmatch(text[:_MAX_CHARS]))


def is_named_twice(text: str) -> bool:
    """Returns whether a value has a name between two $, such as $jobname$, which a program replaces."""
    return re.search(r"\$[A-Za-z]\w*\$(?!\w)", text[:_MAX_CHARS]) is not None


def without_file_name_patterns(text: str) -> str:
    """Returns text with a digit in place of each pattern for file names, such as %A, %a and %4t."""
    return _FILE_NAME_PATTERN.sub("0", text)


@lru_cache(maxsize=64)
def without_comment(text: str) -> str:
    """Returns a directive without the comment after it; `#NODES#` is a placeholder."""
    return _COMMENT.sub("", text)


def marked_placeholder(text: str) -> str:
    """Returns the first variable or marked placeholder in a name, such as `<account>`; empty if none."""
    match = _MARKED.search(text[:_MAX_CHARS])
    return match[0] if match else ""


def is_template(script: Script) -> bool:
    """Returns whether the body of the script is written for a template engine such as Jinja."""
    return any(_TEMPLATE_LINE.match(line[:_MAX_CHARS]) and not _is_bash(line) for line in script.lines)


def _is_bash(line: str) -> bool:
    # `${{` occurs in GitHub workflows, and `{{` may be part of a quoted program, for example in awk.
    return line.lstrip().startswith("#") and not line.startswith("#SBATCH") and "{%" not in line
