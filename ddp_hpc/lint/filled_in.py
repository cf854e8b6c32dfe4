"""Whether a program reads a file and replaces a placeholder in it, as a generator of job scripts does."""

from __future__ import annotations

import re

# `sbatch job.sh` and ["sbatch", "job.sh"] submit the file as it is, unlike `sbatch <(sed s/A/B/ job.sh)`.
_SUBMITS = re.compile(r"\b(?:sbatch|qsub)\b[^|;&<>()]*$")
_CALLS = re.compile(r"\b(?:replace|replaceAll|sub|gsub)\(")
# The pattern of `s/NODES/4/`, with any separator.
_SED = re.compile(r"(?<![\w/.-])s([/|#,:@%!+~])((?:(?!\1)[^\n])+)\1")
_FORMATS = re.compile(r"\.format(?:_map)?\(")
_TEMPLATES = re.compile(r"\bTemplate\(|\.(?:safe_)?substitute\(|\.render\(")


def bare(placeholder: str) -> str:
    """Returns the word in a placeholder, such as NODES in `<NODES>` and `${NODES}`."""
    return re.sub(r"\W", "", placeholder)


def reads(program: str, name: str) -> bool:
    """Returns whether a program names a file other than in a comment or to submit it."""
    for match in re.finditer(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", program):
        before = program[program.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not (before.lstrip().startswith("#") or _SUBMITS.search(before)):
            return True
    return False


def replaces(program: str, placeholder: str) -> bool:
    """Returns whether a program replaces a placeholder.

    These ways are known: s/NODES/4/ of sed and perl, replace("NODES", ...) and the like, the arguments of
    str.format, string.Template and Jinja, and envsubst, which replaces the variables that are exported.
    """
    word = re.escape(bare(placeholder))
    whole = rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])"
    is_variable, is_braced = placeholder.startswith("$"), placeholder.startswith("{")
    if any(re.search(whole, match[2]) for match in _SED.finditer(program)):
        return True
    if _CALLS.search(program):
        argument = rf"{_CALLS.pattern}\s*\w*[\"'/][^\"'\n]*{whole}"
        if re.search(argument, program):
            return True
        # A mapping from placeholders to values.
        if not is_variable and re.search(rf"([\"']){re.escape(placeholder)}\1", program):
            return True
    is_given = re.search(rf"\b{word}\s*=(?!=)|([\"']){word}\1", program)
    if is_given and ((is_braced and _FORMATS.search(program)) or _TEMPLATES.search(program)):
        return True
    return bool(is_variable and re.search(rf"\bexport\b.*\b{word}\b", program) and "envsubst" in program)
