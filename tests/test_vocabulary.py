"""Text that users and developers read is free of expressions that readers did not understand.

`EXPRESSIONS` maps a regular expression to what to write instead. `docs/reference/glossary.md` explains the
special terms of the project, and is the only page that is not checked.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click
import pytest

from data_gen.cli import cli as data_gen_cli
from ddp_hpc.cli import cli
from ddp_hpc.lint import run_checks

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
# Abbreviations that need no explanation, and placeholders for values in help texts.
_ABBREVIATIONS = {
    "CUDA",
    "FLOP",
    "GIB",
    "GiB",
    "HTML",
    "ID",
    "IDX",
    "JSON",
    "MIB",
    "MLP",
    "MNIST",
    "MiB",
    "TERM",
    "TOML",
}
_PLACEHOLDER = re.compile("ARGS|COMMAND|DIR|FILE|HH|INPUT|JOB|KEY|LINE|MM|MODEL|RANK|SIZE|SS|VALUE|WAIT")
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
    found = []
    for one in texts:
        text = " ".join(re.sub(r"`[^`\n]+`", "…", one.text).split())
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 50) : match.end() + 50]
                found.append(f"{one.place}: {match[0]!r} (write: {instead}) in: {around}")
    return found


def pages(name: str, text: str) -> Iterator[Text]:
    """Yields the paragraphs of a page in Markdown, without links and code blocks that name a language."""
    prose = re.sub(r"^( *)```[a-z]+.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\]\([^)\s]*\)|<[^<>\n]*>", "…", prose)
    for paragraph in re.split(r"\n\s*\n|\n(?=\||- )", prose):
        yield Text(name, paragraph)


def templates(name: str, text: str) -> Iterator[Text]:
    """Yields the lines of a template, with consecutive comments as one text, without expressions of Jinja."""
    plain = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "…", text, flags=re.DOTALL)
    for block in re.sub(r"\n[ \t]*#+ ?", " ", plain).splitlines():
        yield Text(name, block)


def help_texts(name: str, command: click.Command) -> Iterator[Text]:
    """Yields the help texts of a command, its options and its subcommands."""
    for text in (command.help, command.epilog, command.short_help):
        yield Text(f"{name} --help", text or "")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield Text(f"{name} {parameter.opts[0]}", f"{parameter.help or ''} {parameter.metavar or ''}")
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            if (found := command.get_command(context, sub)) is not None:
                yield from help_texts(f"{name} {sub}", found)


def docstrings_and_messages(name: str, source: str) -> tuple[list[Text], list[Text]]:
    """Returns the docstrings and comments of a module, and its other strings that contain several words."""
    documentation, messages = [], []
    tree = ast.parse(source)
    parts: set[ast.AST] = set()  # of docstrings and f-strings
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documentation.append(Text(f"{name}:{node.lineno}", node.value.value))
            parts.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            words = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            messages.append(Text(f"{name}:{node.lineno}", "".join(map(str, words))))
    messages += [
        Text(f"{name}:{node.lineno}", node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and node not in parts
    ]
    return documentation + list(comments(name, source)), messages


def comments(name: str, source: str) -> Iterator[Text]:
    """Yields the comments of a module, with those on consecutive lines as one text."""
    block, last = Text(f"{name}:0", ""), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("#")
        if token.start[0] == last + 1:
            block = Text(block.place, f"{block.text} {comment}")
        else:
            yield block
            block = Text(f"{name}:{token.start[0]}", comment)
        last = token.start[0]
    yield block


def modules() -> Iterator[tuple[list[Text], list[Text]]]:
    for package in ("ddp_hpc", "data_gen"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield docstrings_and_messages(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def files(*patterns: str) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def show(found: list[str]) -> str:
    return "\n".join(["write this differently (see CONTRIBUTING.md):", *found])


def test_pages_use_plain_english() -> None:
    markdown = [one for one in files("*.md", "docs/**/*.md", "tests/**/*.md") if one[0] != GLOSSARY]
    assert len(markdown) > 100
    found = findings(text for one in markdown for text in pages(*one))
    assert not found, show(found)


def all_help_texts() -> list[Text]:
    commands = {"ddp-hpc": cli, "data_gen": data_gen_cli}
    for name in ("train", "export", "sample"):
        commands[f"ddp_hpc.{name}"] = import_module(f"ddp_hpc.{name}").command
    return [text for one in commands.items() for text in help_texts(*one)]


def test_help_texts_use_plain_english() -> None:
    texts = all_help_texts()
    assert {"ddp-hpc submit --dry-run", "ddp_hpc.train --lr"} <= {text.place for text in texts}
    found = findings(iter(texts))
    assert not found, show(found)


def test_abbreviations_in_help_texts_are_in_the_glossary() -> None:
    glossary = (ROOT / GLOSSARY).read_text(encoding="utf-8")
    for text in all_help_texts():
        # In help texts, words in capitals are placeholders for values, like those of the usage line.
        for word in re.findall(
            r"\b(?=[A-Za-z]*[A-Z][a-z]*[A-Z])[A-Za-z]{2,5}s?\b", text.text.partition("\b")[0]
        ):
            known = _PLACEHOLDER.fullmatch(word) or word.removesuffix("s") in _ABBREVIATIONS
            assert known or re.search(rf"\b{word}\b", glossary), (
                f"{text.place}: {word} is not in the glossary"
            )


def test_templates_and_profiles_use_plain_english() -> None:
    found = findings(text for one in files("templates/*", "profiles/*.toml") for text in templates(*one))
    assert not found, show(found)


def test_lint_titles_use_plain_english() -> None:
    found = findings(Text(one.id, one.title) for one in run_checks.CHECKS.values())
    assert not found, show(found)


def test_messages_use_plain_english() -> None:
    found = findings(text for _, messages in modules() for text in messages)
    assert not found, show(found)


def test_docstrings_and_comments_use_plain_english() -> None:
    found = findings(text for documentation, _ in modules() for text in documentation)
    assert not found, show(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "Nothing to mend.",
        "The samples are dealt to the ranks.",
        "The run folder is kept.",
        "The run goes on in the next job.",
        "going on after step 60",
        "A loss that is no number ends the run.",
        "It was found out by the heartbeat.",
        "The script is told.",
        "It takes 12 ms a step on 4 GPUs a node.",
        "It prints 300 samples a second, one line a rank.",
        "This is no rank.",
        "There the ranks meet.",
        "The file is to be read.",
    ],
)
def test_a_planted_expression_is_found_wherever_it_is(sentence: str) -> None:
    comment = f"# {sentence[:20]}\n# {sentence[20:]}"
    module = f'"""{sentence}"""\n\n{comment}\nraise ValueError(f"{{name}}: {sentence}")\n'
    documentation, messages = docstrings_and_messages("module.py", module)

    @click.command("planted", help=sentence)
    @click.option("--option", help=sentence)
    def planted(option: str) -> None: ...

    assert len(findings(iter(documentation[:1]))) >= 1
    assert len(findings(iter(messages))) >= 1
    assert len(findings(help_texts("planted", planted))) >= 2
    assert len(findings(pages("page.md", f"# A page\n\n- {sentence}\n"))) >= 1
    assert len(findings(templates("job.sh.j2", f"echo ready\n# {sentence}\n"))) >= 1


def test_a_planted_expression_is_found_across_the_lines_of_a_comment() -> None:
    assert len(findings(comments("module.py", "x = 1\n# The run goes\n# on with the next job.\n"))) == 1


def test_correct_english_is_not_reported() -> None:
    text = """A rank failed, and a step took longer than a second. There is no profile for a node like this.
    If there is none, use one rank per node. The job is no longer known. `folder=None` is an option of it.
    It saves a step, starts a rank, and keeps one file per rank. A number is not finite. It is gone.
    This page depends on one option. Commands are recommended, not amended. The store has no open port.
    This shows on which nodes a job runs. Remove the node if it has none. The check shared-folder failed."""
    assert findings(iter([Text("text", text)])) == []
