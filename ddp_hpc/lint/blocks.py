"""Blocks of bash, such as those of `if` and `for`, around the commands of a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_hpc.lint.parse_script import Command, Script

_OPENS = frozenset(("if", "case", "for", "while", "until", "select", "{"))
CLOSES = frozenset(("fi", "esac", "done", "}"))
END_OF = {"if": "fi", "case": "esac", "{": "}"}
# What asks whether the script runs in a job, in which one, or on which computer.
_WHERE = re.compile(
    r"(?<![\w/.-])\$\{?(?:SLURM_JOB(?:_?ID|_NAME|_PARTITION)?|PBS_(?:JOB(?:ID|NAME)|ENVIRONMENT|QUEUE))\b|mom_priv|"
    r"-v (?:SLURM_JOB_?ID|PBS_JOBID)\b|\bhostname\b|"
    r"\b(?:command -v|which|type|hash)\s+(?:srun|sbatch|qsub|mpirun|mpiexec|aprun|jsrun|bsub)\b|"
    r"\$\{?(?i:host(?:_?name)?|machine|cluster|platform|system|batch_system)(?:_?(?i:name))?\b|"
    r"(?<![\w./$-])(?:(?i:in)_)?(?i:slurm|pbs)\b(?![./-])"
)
# The first argument of a script often says so, too.
_FIRST_ARGUMENT = re.compile(r"case\s.*\$\{?1\b")
# Of a condition, and of those around a line.
_MAX_CHARS = 500
_MAX_DEPTH = 10
_TESTS = frozenset(("[", "[[", "test", "command", "which", "type", "hash", "grep"))
_KEYWORDS = _OPENS | CLOSES | {"then", "else", "elif", "do", "!", "time", "coproc"}


def with_depth(commands: Iterable[Command]) -> Iterator[tuple[Command, int]]:
    """Yields each command with the number of blocks around it, without those of parentheses."""
    depth = 0
    for command in commands:
        for word in _keywords(command):
            depth += (word in _OPENS) - (word in CLOSES)
        yield command, depth


def conditions_by_line(commands: Iterable[Command]) -> dict[int, str]:
    """Maps the line of each command that depends on conditions to their texts.

    These are the commands of each `if`, `elif` and `case` around it, and the tests before && and || in the
    same line. For the branch of `else`, they are those of its `if`, although they are false there.
    """
    conditions: dict[int, str] = {}
    blocks: list[str] = []
    seen: set[int] = set()
    chain, is_condition = "", False
    for command in commands:
        for word in _keywords(command):
            if word in CLOSES:
                del blocks[-1:]
            elif word in _OPENS:
                blocks.append(chain if word == "{" else "")
                chain = "" if word == "{" else chain
            is_condition = word in ("if", "elif", "case") or (is_condition and word not in ("then", "else"))
        if is_condition and blocks:
            blocks[-1] = f"{blocks[-1]}{command.text}\n"[:_MAX_CHARS]
            is_condition = command.words[0] != "case"
        around = "".join((*blocks[-_MAX_DEPTH:], chain))
        # What comes before && in a line, as in `cd $DIR && make`, does not depend on it.
        if around and (chain or command.line not in seen) and command.name != "exit":
            conditions[command.line] = around
        seen.add(command.line)
        is_test = command.ends in ("&&", "||") and (chain or _TESTS & {*command.words[:2]})
        chain = f"{chain}{command.text}\n"[:_MAX_CHARS] if is_test else ""
    return conditions


def asks_where(script: Script) -> bool:
    """Returns whether any condition of the script asks where it runs, for example whether it is in a job."""
    return any(map(_WHERE.search, {*script.conditions.values()}))


def may_run_elsewhere(script: Script, line: int) -> bool:
    """Returns whether a line may run only outside of jobs or on another computer, as its conditions ask."""
    conditions = script.conditions.get(line, "")
    return bool(_WHERE.search(conditions) or _FIRST_ARGUMENT.search(conditions))


def open_block(commands: Iterable[Command]) -> tuple[str, int, bool] | None:
    """Returns the word that begins the first block that is not closed, its line, and whether the end of
    another block comes first; None if all blocks are closed.
    """
    open_: list[tuple[str, int]] = []
    for command in commands:
        for word in _keywords(command):
            if word in _OPENS:
                open_.append((word, command.line))
            elif word in CLOSES and open_:
                if END_OF.get(open_[-1][0], "done") != word:
                    return *open_[-1], True
                open_.pop()
    return (*open_[-1], False) if open_ else None


def if_without_then(commands: Iterable[Command]) -> int:
    """Returns the line of the first `if` or `elif` whose `then` is missing; 0 if there is none."""
    begun = 0
    for command in commands:
        word = command.words[0]
        if word in ("fi", "else") and begun:
            return begun
        if word in ("if", "elif", "then"):
            begun = 0 if word == "then" else command.line
    return 0


def reads_pipe(script: Script, command: Command) -> bool:
    """Returns whether a command reads the output of another one."""
    index = script.commands.index(command)
    return index > 0 and script.commands[index - 1].ends in ("|", "|&")


def is_in_background(lines: Sequence[str], line: int) -> bool:
    """Returns whether the block around a line, or a function with it, seems to run in the background."""
    own = lines[line - 1].rstrip()
    if own.endswith("&") and re.match(r"[^#]*\)[^#&]*&$", own):
        return True
    depth = 0
    for text in lines[line:]:
        depth += bool(re.match(r"\s*(?:for|while|until|if|case|select|\{|\()(?:\s|$)", text))
        if closes := re.match(r"\s*(?:\)|\}|done\b|fi\b|esac\b)([^#]*)", text):
            depth -= 1
            if depth < 0 and re.search(r"(?<!&)&\s*$", closes[1]):
                return True
            depth = max(depth, 0)
    if not lines[line - 1][:1].isspace():
        return False
    functions = (re.match(r"\s*(?:function\s+)?([\w-]+)\s*\(\)", text) for text in lines[:line])
    names = "|".join(re.escape(found[1]) for found in functions if found)
    starts_function = re.compile(rf"\s*(?:{names})(?:\s[^#&]*)?&\s*(?:#.*)?$")
    return bool(names) and any(map(starts_function.match, lines[line:]))


def _keywords(command: Command) -> Iterator[str]:
    words = command.words[2:] if command.words[0] == "function" else command.words
    return takewhile(_KEYWORDS.__contains__, words)


def until_exit(commands: Iterable[Command], lines: Sequence[str]) -> tuple[tuple[Command, ...], int]:
    """Returns the commands up to an `exit` or `exec PROGRAM` that always ends the script, and its line.

    Without such a command, these are all commands, and a larger number than that of any line. Such a command
    begins a line without a blank, is an `exit` at its end, or is the last one before the `=#` that closes a
    comment of Julia. It is outside of all blocks and parentheses, and depends on no other command.
    """
    reached, before, edges = [], "\n", _edges_of_parentheses(lines)
    for command, depth in with_depth(commands):
        reached.append(command)
        is_whole = depth == 0 and {before, command.ends} <= {"\n", ";"}
        is_last = is_whole and _ends_script(command, lines[command.line - 1 : command.line + 1])
        # After an exit in a subshell, the script goes on.
        before_it = [closes for number, closes in edges if number <= command.line] if is_last else []
        if is_last and before_it[-1:] != [False]:
            return tuple(reached), command.line
        before = command.ends
    return tuple(reached), sys.maxsize


def _ends_script(command: Command, lines: Sequence[str]) -> bool:
    """Returns whether a command is `exit`, or `exec` with a program, given its line and the next one."""
    first, *others = command.words
    # Without a program, exec only redirects, for example to a file with a number in {fd}.
    is_exec = first == "exec" and bool(others) and not others[0].startswith("{")
    # In a program that is for Python, too, exec can stand in quotes.
    is_at_edge = lines[0].lstrip("'").startswith(first) or re.search(r"; *exit( \d+)?$", lines[0])
    return (first == "exit" or is_exec) and (bool(is_at_edge) or lines[-1].startswith("=#"))


def _edges_of_parentheses(lines: Sequence[str]) -> list[tuple[int, bool]]:
    """Returns the numbers of the lines that end with ( or begin with ), and whether they begin with it."""
    return [
        (number, line.startswith(")"))
        for number, line in enumerate(lines, start=1)
        if line.startswith(")") or line.rstrip().endswith("(")
    ]
