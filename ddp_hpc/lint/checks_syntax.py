"""Check of the syntax of bash scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.bash_syntax import OpenDocument, bash_complaint, is_reached, open_document
from ddp_hpc.lint.blocks import END_OF, if_without_then, open_block
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain, shown
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.placeholders import is_template

_PLACEHOLDER_IN_COMMAND = re.compile(
    r"<<(?!-|EO[A-Z]?>|END(?:OF\w*)?>|\w*EOF\w*>)[\w-]+>>|<[A-Za-z_.?%](?:[^<>|&;]*[^<>|&;\s])?>|%\(\w+\)s|\{\{|\}\}|\$\$\("
)
_CLOSES = re.compile(r"token `(done|fi|esac|\})'")
# The first statement of most programs in Python.
_PYTHON = re.compile(r"import \w[\w.]*(?: as \w+|,.*)?$|from \w[\w.]* import \w")
_CORRECT = "correct this line, or close a quote, parenthesis or block that begins above"


@check("JOB003", "error", "bash syntax error")
def _broken_bash(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if not re.search(r"\b(?:ba)?sh\b", script.shebang) or is_template(script):
        return
    if subject.path is not None and subject.path.suffix == ".R":
        return  # sourceSlurm of slurmR reads the directives, and starts R
    if complaint := bash_complaint(script.text):
        line, message = complaint
        if not is_reached(script, line):
            return
        for number, text in enumerate(script.lines, start=1):
            match = _PLACEHOLDER_IN_COMMAND.search(text)
            if match and _is_cause(match[0], text, script, number, complaint):
                what = f"{shown(match[0])} is a placeholder"
                yield Problem(number, what, "replace it with a value", is_to_fill_in=True)
                return
        if (document := open_document(message, script.text)) and (document.almost or document.is_harmless):
            yield _not_closed(document)
            return
        if "".join(script.lines[line - 1 : line]).startswith(("<<<<<<<", "=======", ">>>>>>>")):
            yield Problem(line, "this is a conflict marker of git", "resolve the merge conflict")
            return
        what = f"bash -n reports: {plain(message)}"
        yield Problem(line, what, *(_of_document(script, document) or (_remedy(script, complaint), None)))


def _of_document(script: Script, document: OpenDocument | None) -> tuple[str, Severity] | None:
    """Returns the remedy for a here-document whose delimiter has other text on its line, and the severity."""
    if document is None:
        return None
    end, delimiter = plain(document.delimiter), re.escape(document.delimiter)
    # In $( ), bash ends the document at the delimiter with the parenthesis.
    if re.search(rf"(?m)^{delimiter}\)\"?$", script.text):
        return f"write ) in a line of its own, after {end}", "note"
    # If its last line begins with the delimiter, such as `EOF > log`, a here-document has what it shall.
    if last := re.match(rf"{delimiter}(?!\w)\s*([>|&;])?", script.text.rstrip().rpartition("\n")[2]):
        moved = f", and move the rest to the end of line {document.line}" if last[1] else ""
        return f"write only {end} in the last line{moved}", "warning"
    return None


def _remedy(script: Script, complaint: tuple[int, str]) -> str:
    """Returns what to correct; the causes that are the most certain come first."""
    line, message = complaint
    is_at_end, closes = "end of file" in message, _CLOSES.search(message)
    if _PYTHON.match(next((text for text in script.lines if text.strip() and text[0] != "#"), "")):
        return "write Python into a file of its own, or #!/usr/bin/env python3 in line 1"
    if closes and _is_empty(script, line):
        return f"write a command before {closes[1]}, such as : , as there are only comments"
    if re.search(r"token `(?:fi|el)", message) and (without := if_without_then(script.commands)):
        return f"write then after the condition of line {without}"
    if closes and (continued := _continued_before(script, line)):
        return f"remove {continued[1]} at the end of line {continued[0]}"
    block = open_block(script.commands if is_at_end else (c for c in script.commands if c.line <= line))
    if block and (is_at_end or (closes and block[2])):
        end = END_OF.get(block[0], "done")
        return f"close the {block[0]} of line {block[1]} with {end}, on a line of its own"
    is_balanced = all(text.count("$(") <= text.count(")") for text in script.lines[: line - 1])
    if closes and not block and is_balanced:
        begins = {of: word for word, of in END_OF.items()}.get(closes[1], "for, while or until")
        return f"remove {closes[1]}, or add the {begins} that it closes"
    return _CORRECT


def _is_cause(placeholder: str, text: str, script: Script, number: int, complaint: tuple[int, str]) -> bool:
    """Returns whether a placeholder in a line is the cause of what bash reports."""
    if placeholder.startswith("<<"):  # bash reads `<<user>>` as a here-document
        is_closed = placeholder.strip("<>") in script.lines
        return not (is_closed or text.lstrip().startswith("#") or script.is_quoted(number))
    line, message = complaint
    return "'" in placeholder if "EOF" in message else number == line


def _continued_before(script: Script, line: int) -> tuple[int, str] | None:
    """Returns the last line with text before `line`, and the operator with which it continues."""
    last = next((n for n in range(line - 1, 0, -1) if re.match(r"\s*[^#\s]", script.lines[n - 1])), 0)
    match = re.search(r"(&&|\|\|?)\s*(\\?)$", script.lines[last - 1]) if last else None
    return (last, match[1] + " and the backslash" * bool(match[2])) if match else None


def _is_empty(script: Script, line: int) -> bool:
    """Returns whether only comments are between the beginning of a block and the line that ends it."""
    before = [text for text in script.lines[: line - 1] if text.strip() and not text.lstrip().startswith("#")]
    return bool(before) and re.search(r"(?:^|[\s;])(?:do|then|else|\{)\s*(?:#.*)?$", before[-1]) is not None


def _not_closed(document: OpenDocument) -> Problem:
    """Returns the finding on a here-document whose delimiter has blanks, or that ends with the script."""
    line, word = document.line, shown(document.delimiter)
    severity: Severity | None = "note" if document.is_harmless else None
    if not document.almost:
        return Problem(
            line, f"nothing closes this here-document: the line {word} is missing", "add it", severity
        )
    return Problem(
        document.almost,
        f"blanks before or after {word} keep it from closing the here-document of line {line}",
        "remove the blanks",
        severity,
    )
