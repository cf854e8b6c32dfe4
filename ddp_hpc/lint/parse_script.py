"""Parser for job scripts: directives, and the commands of the body.

It covers only as much of bash's grammar as is needed to split the body into commands with line
numbers. Every regular expression here takes time linear in the length of the script.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import dropwhile
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.blocks import conditions_by_line, until_exit
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.schedulers.script_options import ReadOption, ScriptOptions

# Slurm rejects scripts larger than 4 MB (slurm.conf.5, max_script_size). To save time, only the first
# MAX_PARSED_CHARS are parsed: of 29,280 public job scripts, only two are longer.
MAX_CHARS = 4 * 1024 * 1024
MAX_PARSED_CHARS = 256 * 1024
_MAX_TABS = 64  # limit on the tabs before the line that ends a here-document

# Schedulers that read directives, each with the pattern of its directives after the `#`.
_READERS = {name: scheduler.reader for name, scheduler in SCHEDULERS.items() if "reader" in scheduler.roles}
_DIRECTIVES = {
    name: reader.directive_pattern or re.compile(rf"{SCHEDULERS[name].prefix}(?:[ \t]+|$)(.*)", re.DOTALL)
    for name, reader in _READERS.items()
}
DIRECTIVE_PATTERNS = tuple(_DIRECTIVES.values())

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+)
  | (?P<continued>\\\n)
  | (?P<comment>(?<![^\s;&|()])(?<!(?<!\\)\\[ \t])\#[^\n]*)  # an escaped blank begins a word
  | (?P<heredoc><<-?[ \t]*(?:'[^'\n]*'|"[^"\n]*"|\\?[^\s;&|()<>'"\\`]+))
  | (?P<skip><<<|[<>]\([^()\n]*\)|(?:(?<![^\s;&|()])\d)?[<>]+&?)
  | (?P<end>&>>?|&&|\|\||\|&|;;|[\n;&|()])
  | (?P<word>
        [^\s;&|()<>'"\\`$]+
      | '[^']*'
      | "(?:[^"\\$]+|\\.|\$\((?:[^()"'\\]+|\\.|'[^']*'|"(?:[^"\\]|\\.)*+"|\([^()"']*\)){1,99}+\)|\$)*+"
      | "[^"\\]*(?:\\.[^"\\]*)*"
      | `[^`\n]*`
      | \$'[^'\\]*(?:\\.[^'\\]*)*'
      | \$\(\([^()\n]*\)\)
      | \$\([^()\n]*\)
      | \$\{[^{}'"\n]*\}
      | \\.
      | [$`\\]
    )
  | (?P<open>['"])
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_KEYWORDS = frozenset(
    ("if", "then", "else", "elif", "do", "while", "until", "time", "exec", "nohup", "command", "!", "{")
)
_PROGRAM = re.compile(
    r"(?:.*/)?(?:python[0-9.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun|horovodrun|ray|bash|sh|env|singularity|apptainer|"
    r"docker|podman|shifter)|\./.*|.*\.(?:py|sh)"
)
# Options of launchers whose value is a program, and another way to name one.
_TAKE_PROGRAM = ("--prefix", "--task-prolog", "--task-epilog", "--prolog", "--epilog", "-bootstrap-exec")
_WHICH = re.compile(r"(?:\$\(|`)(?:which|command -v)\s+([\w.-]+)[)`]")
_SUPERVISOR = "ddp_hpc.job"
_NQSV = re.compile(r"^[ \t]*#PBS\b.*(?:elapstim_req|(?:cpu|gpu)num_job|--ven|--group)", re.MULTILINE)
# Options of launchers with two values, and some without one.
_TWO_VALUES = re.compile(r"--?(?:g?mca|g?env)")
_NO_VALUE = re.compile(
    r".*=.*|-[A-Za-z]\d+|-[luvKO]|--?(?:verbose|oversubscribe|overcommit|report-bindings|allow-run-as-root|label|"
    r"prepend-rank|exact|exclusive|overlap|unbuffered|nolocal|tag-output|display-map|multi-prog)"
)
LAUNCH_COMMANDS = ("srun", "mpiexec", "mpirun", "aprun", "ibrun", "jsrun")


@dataclass(frozen=True, kw_only=True)
class Directive(ReadOption):
    """One option of one directive line.

    `text` is the line after its prefix. `late` means that it follows the first command, where schedulers
    ignore it.
    """

    scheduler: str
    text: str
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command: its words as bash splits them, with quotes removed and nothing expanded.

    `ends` is the operator after it: `&` if it runs in the background.
    """

    line: int
    text: str
    words: tuple[str, ...]
    ends: str = "\n"

    @cached_property
    def argv(self) -> tuple[str, ...]:
        """The program and its arguments, without the keywords and assignments before it.

        `python -m ddp_hpc.job ... -- COMMAND`, which ends scripts of `ddp-hpc render`, counts as COMMAND.
        """
        words = self.words
        if _SUPERVISOR in words[:8] and "--" in words:
            words = words[words.index("--") + 1 :]
        for index, word in enumerate(words):
            if word not in _KEYWORDS and not _ASSIGNMENT.match(word):
                return words[index:]
        return ()

    @cached_property
    def name(self) -> str:
        """The program without its directory; `mpiexec` also for a variable `$MPIEXEC`."""
        return self.argv[0].rpartition("/")[2].strip("${}").lower() if self.argv else ""

    @cached_property
    def launched(self) -> tuple[str, ...]:
        """The command that a launcher starts, if it can be told apart from the launcher's options."""
        if self.name not in LAUNCH_COMMANDS:
            return ()
        for index, word in enumerate(self.argv[1:], start=1):
            which = None if self.argv[index - 1] in _TAKE_PROGRAM else _WHICH.fullmatch(word)
            program = which[1] if which else word
            if _PROGRAM.fullmatch(program):
                return (program, *self.argv[index + 1 :])
        return ()

    @cached_property
    def own_words(self) -> tuple[str, ...]:
        """The launcher's options, without the command that it starts."""
        values = 0  # that the option before may have
        for index, word in enumerate(self.argv[1:] if not self.launched else (), start=1):
            if word.startswith("-"):
                values = 2 if _TWO_VALUES.fullmatch(word) else 1 - bool(_NO_VALUE.fullmatch(word))
            elif values == 0 and (word[:1] not in "$`{<%" or "/" in word):
                return self.argv[1:index]  # a variable may contain further options
            else:
                values = max(0, values - 1)
        return self.argv[1 : len(self.argv) - len(self.launched)]

    @property
    def after_options(self) -> tuple[str, ...]:
        """What follows the launcher's options: a program that may be unknown, and its arguments."""
        return self.argv[1 + len(self.own_words) :]

    def option(self, *names: str) -> str | None:
        """Returns the value of the first of these launcher options that is given, or None."""
        words = self.own_words
        for index, word in enumerate(words):
            for name in names:
                if word == name:
                    following = words[index + 1] if index + 1 < len(words) else ""
                    return "" if following.startswith("-") else following
                if word.startswith(f"{name}=") or (
                    len(name) == 2 and word.startswith(name) and (word[2:].isdigit() or word[2:3] == "$")
                ):
                    return word[len(name) :].removeprefix("=")
        return None


@dataclass(frozen=True, kw_only=True)
class Script(ScriptOptions):
    """A parsed script. `scheduler` is pbs, slurm, or empty if there are no directives. `shebang` is what runs
    the script: the program of line 1, or else of `qsub -S`.

    `text` is the whole script; the other fields cover its first MAX_PARSED_CHARS characters.
    `commands` ends early if a quote or a here-document is never closed, and at the line `end`, where the
    script always ends. `quoted` has the first and last lines of here-documents and of quotes with several.
    """

    text: str
    lines: tuple[str, ...]
    scheduler: str
    shebang: str
    directives: tuple[Directive, ...] = ()
    commands: tuple[Command, ...] = ()
    assignments: tuple[tuple[int, str, str], ...] = field(default=(), repr=False)
    quoted: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    end: int = sys.maxsize

    def is_quoted(self, line: int) -> bool:
        """Returns whether the line belongs to a here-document or to a quote that began on an earlier line."""
        index = bisect(self.quoted, (line, sys.maxsize)) - 1
        return index >= 0 and line <= self.quoted[index][1]

    def directives_of(self, name: str) -> tuple[Directive, ...]:
        """Returns all directives of the scheduler `name`, including those that it does not read."""
        return tuple(d for d in self.directives if name == d.scheduler)

    @cached_property
    def _read(self) -> tuple[Directive, ...]:
        return tuple(d for d in self.directives_of(self.scheduler) if not d.late)

    def read(self) -> tuple[Directive, ...]:
        """Returns the directives that the scheduler reads: its own, before the first command."""
        return self._read

    def last_assigned(self, name: str) -> str | None:
        """Returns the value of the last assignment of a variable; None if the script does not assign it."""
        return next((value for _, other, value in reversed(self.assignments) if other == name), None)

    @cached_property
    def set_once(self) -> dict[str, str]:
        """The values of variables that the script sets once."""
        values: dict[str, set[str]] = {}
        for _, name, value in self.assignments:
            values.setdefault(name, set()).add(value)
        for command in self.commands:
            if command.words[0] in ("for", "read", "select"):
                values.update({name: {"$"} for name in command.words[1:4]})
        return {name: next(iter(of)) for name, of in values.items() if len(of) == 1 and of != {"$"}}

    @cached_property
    def exports(self) -> tuple[tuple[int, str, str], ...]:
        """The line, the name and the value of each `export NAME=VALUE`."""
        lines = {command.line for command in self.commands if command.argv[:1] == ("export",)}
        return tuple(assignment for assignment in self.assignments if assignment[0] in lines)

    @cached_property
    def supervised(self) -> Command | None:
        """The command `python -m ddp_hpc.job` of `ddp-hpc render`, with what it runs, or None."""
        return next((command for command in self.commands if _SUPERVISOR in command.words[:8]), None)

    @cached_property
    def conditions(self) -> dict[int, str]:
        """The conditions on which the commands of a line depend, as in `conditions_by_line`; none for csh."""
        return {} if "csh" in self.shebang else conditions_by_line(self.commands)

    def sets(self, name: str) -> bool:
        """Returns whether the script's body assigns a value to this variable."""
        return any(assigned == name for _, assigned, _ in self.assignments)

    def launches(self, *names: str) -> list[Command]:
        """Returns the commands that start ranks with one of these launchers, or with any launcher."""
        return [command for command in self.commands if command.name in (names or LAUNCH_COMMANDS)]


def read_script(path: Path, name: str) -> str:
    """Returns the text of a script, with bytes that are not UTF-8 as surrogates; errors call it `name`.

    Raises:
        RequestError: the path is not a regular file.
        OSError: the file cannot be read.
    """
    # Reading from a pipe or a device might never end.
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise RequestError(f"{name} {what}. Give a job script.")
    with path.open("rb") as file:
        return file.read(MAX_CHARS + 1).decode("utf-8", "surrogateescape")


@lru_cache(maxsize=2)  # lint and submit read several facts of one script
def parse_script(text: str) -> Script:
    """Parses a script without running it. Any text can be parsed: no text raises an error."""
    text = text[:MAX_CHARS]
    # Cut at a line end: a directive that is cut would mean something else. JOB002 reports CR LF and marks.
    parsed = text if len(text) <= MAX_PARSED_CHARS else text[: text.rfind("\n", 0, MAX_PARSED_CHARS) + 1]
    parsed = parsed.replace("\r\n", "\n").removeprefix("\ufeff")
    lines = tuple(parsed.split("\n"))
    quoted: list[tuple[int, int]] = []
    commands, end = until_exit(tuple(_commands(parsed, quoted)), lines)
    script = Script(
        text=text,
        lines=lines,
        scheduler="",
        shebang=lines[0][2:].strip() if lines[0].startswith("#!") else "",
        directives=tuple(_directives(lines)),
        commands=commands,
        end=end,
        quoted=tuple(quoted),
        assignments=tuple(_assignments(commands)),
    )
    script = replace(script, scheduler=_scheduler_of(script))
    shell = script.value("-S") or ""  # of qsub; for sbatch, it is a number
    return replace(script, shebang=shell) if shell[:1] == "/" and not script.shebang else script


def _scheduler_of(script: Script) -> str:
    # A script whose directives are all quoted writes and submits another script.
    own = [d for d in script.directives if not (d.late and script.is_quoted(d.line))]
    names = [d.scheduler for d in own if not d.late] or [d.scheduler for d in own]
    if "slurm" not in names and _NQSV.search(script.text):
        return ""  # NQSV reads #PBS lines too, but has other options and resources
    # A script with both #SBATCH and #PBS lines is for Slurm, since qsub would ignore the #SBATCH lines.
    return "slurm" if "slurm" in names else next(iter(names), "")


def _directives(lines: tuple[str, ...]) -> Iterator[Directive]:
    # For each scheduler, its directives before and after the first command.
    lines_of: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    late = False
    for number, line in enumerate(lines, start=1):
        stripped = line.lstrip()
        if stripped.startswith("#"):
            for name, pattern in _DIRECTIVES.items():
                if match := pattern.match(stripped if _READERS[name].reads_indented else line):
                    lines_of.setdefault((name, late), []).append((number, match[1]))
        elif stripped:
            late = True
    read = [
        Directive(**vars(option), scheduler=name, text=texts[option.line], late=is_late)
        for (name, is_late), of_name in lines_of.items()
        for texts in [{number: text.strip() for number, text in of_name}]
        for option in _READERS[name].read_directives(of_name)
    ]
    yield from sorted(read, key=lambda directive: directive.line)


def _commands(text: str, quoted: list[tuple[int, int]]) -> Iterator[Command]:
    """Yields the simple commands in order, and some of those inside `$( )`.

    The first and last lines of here-documents and of quotes that span lines are appended to `quoted`.
    """
    position, line, length = 0, 1, len(text)
    words: list[list[str]] = []  # for each word, its quoted and unquoted pieces
    # joined: the next piece continues the last word. skipping: it is the target of a redirection. depth: of
    # the parentheses around the elements of an array, where a line break is a blank.
    joined = skipping = False
    first = start = depth = 0
    documents: deque[str] = deque()
    while position < length:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup == "open":
            break
        kind, piece = match.lastgroup, match[0]
        begin, position = position, match.end()
        if piece == "(" and (depth or (joined and words and _ASSIGNMENT.fullmatch("".join(words[-1])))):
            depth += 1
        elif piece == ")" and depth:
            depth -= 1
            if words and not depth:
                words.append(["$@"])  # the script may add further words to the array, or write them after it
        elif piece == "\n" and depth == 1:
            kind = "space"
        if kind == "continued":
            line += 1
            continue
        if kind == "word":
            if not words and not skipping:
                first, start = line, begin
            if joined and words and not skipping:
                words[-1].append(_bare(piece))
            elif not skipping:
                words.append([_bare(piece)])
            joined = True
        else:
            skipping = (kind == "skip" and not piece.endswith(")")) or (
                skipping and kind == "space" and not joined
            )
            joined = False
        if kind == "heredoc":
            documents.append(piece)
        elif kind == "end" and not piece.startswith("&>"):
            if words:
                whole = tuple(map("".join, words))
                yield Command(line=first, text=text[start:begin], words=whole, ends=piece)
            words = []
        elif kind == "end":
            skipping = True
        if kind == "word" and "\n" in piece:
            quoted.append((line + 1, line + piece.count("\n")))
        line += piece.count("\n")
        while piece == "\n" and documents:
            closed = _end_of_document(text, position, documents.popleft())
            quoted.append((line, line + text.count("\n", position, closed)))
            line, position = quoted[-1][1], closed
    if words and position >= length:
        yield Command(line=first, text=text[start:], words=tuple(map("".join, words)))


def _bare(piece: str) -> str:
    if piece[0] in "'\"" and len(piece) > 1:
        return piece[1:-1]
    return piece[1:] if piece[0] == "\\" else piece


def _end_of_document(text: str, position: int, opening: str) -> int:
    """Returns the end of the here-document whose body starts at `position`."""
    word = opening.lstrip("<-").strip().strip("'\"\\")
    while (first := text.find(word, position) if word else -1) >= 0:
        begin = first
        while opening.startswith("<<-") and begin > max(0, first - _MAX_TABS) and text[begin - 1] == "\t":
            begin -= 1
        position = first + len(word)
        if text[begin - 1 : begin] in ("", "\n") and text[position : position + 1] in ("", "\n"):
            return position
    return len(text)


def _assignments(commands: tuple[Command, ...]) -> Iterator[tuple[int, str, str]]:
    for command in commands:
        words = list(dropwhile(_KEYWORDS.__contains__, command.words))
        declares = words[:1] in (["export"], ["declare"], ["local"], ["readonly"])
        for word in words[declares:]:
            if match := _ASSIGNMENT.match(word):
                yield command.line, match[0].rstrip("+="), word[match.end() :]
            elif not declares:
                break
