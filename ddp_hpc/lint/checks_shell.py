"""Check of shell commands that do something else than they seem to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.bash_syntax import is_reached
from ddp_hpc.lint.check_registry import Problem, Subject, check
from ddp_hpc.lint.placeholders import is_template

# The beginning of a command, what is wrong with it, and what to write instead.
_BEGINNINGS = (
    (r"(?:SBATCH|PBS)\s+-", "the # of this directive is missing", "write # before it"),
    (r"setenv\s+\w+\s", "setenv is a command of csh, and bash has none", "write export NAME=VALUE"),
    (r"(?:export\s+)?\$\{?([A-Za-z_]\w*)\}?=", "this does not set the variable", "omit the $"),
    (r"for\s+\w+\s+in\s+\{\w*\.\.\$", "bash expands braces before variables", "use $(seq FIRST LAST)"),
    (r"(?:(?:ba)?sh )?[^\s=\"]*bin/activate$", "this does not change the script's own shell", "use source"),
    (r"[^'\"#|]*\s2>&1 +>>? *(?!/dev/null)[\w./$]", "the errors do not go to this file", "write > FILE 2>&1"),
    (r"(?!echo|printf)[^'\"#]*[\s=][\u201c\u201d]", "bash does not treat these quotes as quotes", 'write "'),
)


@check("JOB034", "warning", "a shell command that does something else")
def _something_else(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if not re.search(r"\b(?:ba)?sh\b", script.shebang) or is_template(script):
        return
    for command in script.commands:
        for beginning, what, remedy in _BEGINNINGS if command.ends not in ("|", "|&", ")") else ():
            match = re.match(beginning, command.text.rstrip())
            # The variable may contain a name, and setenv may be a function.
            name = (match.lastindex and match[1]) if match else None
            defined = rf"(?<![$\w{{]){name}=|\b(?:for|read)\b.*\b{name}\b" if name else r"\bsetenv *\("
            if match and not re.search(defined, script.text) and is_reached(script.text, command.line):
                yield Problem(command.line, what, remedy)
