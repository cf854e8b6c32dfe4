"""Prints expressions in texts of the project that readers did not understand, as a note of `make lint`.

`EXPRESSIONS` maps a regular expression to what to write instead. `docs/reference/glossary.md` explains the
special terms of the project, and is the only page that is not checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = "docs/reference/glossary.md"

_COUNTED = (
    r"\d|ms|us|[KMG]i?B|bytes|FLOPs?|GPUs?|CPUs?|cores?|devices?|ranks|tasks|threads|process(?:es)?|samples|"
    r"batch(?:es)?|steps|tokens|times|seconds|minutes|calls|files?|lines?|objects?|jobs|once|twice|one|two|three|four"
)
_COMPARED = "longer|more|less|fewer|greater|larger|later"
_UNITS = (
    r"ranks?|steps?|nodes?|seconds?|minutes?|GPU|CPU|core|device|epoch|batch|line|job|sample|start|commit"
)

EXPRESSIONS = {
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bdealt\b|\bdeals out\b": "shard, partition, distribute",
    r"(?<![-.])\bfolders?\b(?!:)": "directory",
    r"\b(?:go|goes|going|went|gone) on\b": "resume, continue",
    r"\bno number\b": "non-finite, not a number",
    r"\bfound out\b": "detected",
    r"\btold\b(?! apart)|\bthe telling\b|\btells? (?:of|more)\b": "reported",
    rf"\b(?:{_COUNTED}) an? (?:{_UNITS})\b": "per rank, per step, per node, ...",
    rf"(?<![Tt]here )\b(?:is|are|was|were) no (?!(?:{_COMPARED})\b)": "is not a, does not exist",
    r"(?<![Tt]here )\b(?:is|are|was|were) none\b": "does not exist, is not one",
    r"\bthere (?:is|are) not\b": "does not exist",
    r"\branks?(?:' meeting| meet)\b|\bmeeting point\b": "connect, rendezvous",
    r"\bnobody (?:can (?:say|tell|know)|knows|tells)\b": "it is unknown",
    r"\b(?:is|are|was|were) to be\b": "must be",
    r"\bwithout a word\b": "without a message, silently",
    r"\bin (?:its|their|so many) (?:own )?words\b": "message, output",
    r"\bpassed over\b": "skipped, ignored",
    r"\blook(?:s|ed)? whether\b": "check whether",
    r"\bat hand\b": "available",
    r"\bbeliev(?:e|es|ed|ing)\b": "use, accept",
    r"\bso many (?:seconds|times|jobs|steps|bytes)\b": "N seconds, that number of",
    r"\bpretended\b": "simulated",
}
_PATTERNS = [(re.compile(pattern), instead) for pattern, instead in EXPRESSIONS.items()]


@dataclass(frozen=True)
class Text:
    """A piece of text, and the place where a reader finds it."""

    place: str
    text: str


def findings(texts: Iterator[Text]) -> list[str]:
    """Returns one line per expression: place, expression, replacement, and the text around it.

    Code in backticks is not checked.
    """
    lines = []
    for source in texts:
        text = " ".join(re.sub(r"`[^`\n]+`", "…", source.text).split())
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 50) : match.end() + 50]
                lines.append(f"{source.place}: {match[0]!r} (write: {instead}) in: {around}")
    return lines


def pages(name: str, text: str) -> Iterator[Text]:
    """Yields the paragraphs of a page in Markdown, without links and code blocks that name a language."""
    prose = re.sub(r"^( *)```[a-z]+.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\]\([^)\s]*\)|<[^<>\n]*>", "…", prose)
    for paragraph in re.split(r"\n\s*\n|\n(?=\||- )", prose):
        yield Text(name, paragraph)


def strings(name: str, source: str) -> Iterator[Text]:
    """Yields the docstrings, messages and help texts of a module: its strings that contain several words."""
    tree = ast.parse(source)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield Text(f"{name}:{node.lineno}", "".join(map(str, words)))
        elif isinstance(node, ast.Constant) and node not in parts and " " in str(node.value):
            yield Text(f"{name}:{node.lineno}", str(node.value))


def files(*patterns: str) -> Iterator[tuple[str, str]]:
    """Yields the names and the contents of files of the project."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def all_texts() -> Iterator[Text]:
    """Yields the texts of pages, and the docstrings and messages of modules."""
    for name, text in files("*.md", "docs/**/*.md", "tests/**/*.md"):
        if name != GLOSSARY:
            yield from pages(name, text)
    for name, source in files("ddp_hpc/**/*.py", "data_gen/**/*.py"):
        yield from strings(name, source)


if __name__ == "__main__":
    lines = findings(all_texts())
    sys.stdout.write("".join(f"note: {line}\n" for line in lines))
