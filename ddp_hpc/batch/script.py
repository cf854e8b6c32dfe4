"""Any job script, ours or not, taken apart: its directives, and the commands of its body.

No shell: enough of bash's grammar to know which words stand together on which
line. Every pattern here is linear in the length of the script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile
from pathlib import Path

from ddp_hpc.errors import RequestError

# Slurm takes no script beyond 4 MB (slurm.conf.5, max_script_size); nobody writes such a body by hand.
MAX_CHARS = 4 * 1024 * 1024
MAX_BODY_CHARS = 256 * 1024

PREFIXES = {"pbs": "#PBS", "slurm": "#SBATCH"}

# Short options of sbatch by their long names (sbatch.1), and those that stand without a value.
_SLURM_SHORT = dict(
    zip(
        "AabDMCScdmexBGhHiJLkFwNnoOspqQtvVW",
        re.findall(
            r"\S+",
            "account array begin chdir clusters constraint core-spec cpus-per-task dependency distribution "
            "error exclude extra-node-info gpus help hold input job-name licenses no-kill nodefile nodelist "
            "nodes ntasks output overcommit oversubscribe partition qos quiet time verbose version wait",
        ),
        strict=True,
    )
)
_SLURM_BARE = frozenset(
    re.findall(
        r"\S+",
        "contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue overcommit "
        "oversubscribe parsable quiet reboot requeue spread-job test-only use-min-nodes usage verbose "
        "version wait",
    )
)
_PBS_BARE = frozenset("VXIhfz")
_DIRECTIVE = re.compile(r"#(PBS|SBATCH)(?:[ \t]+|$)(.*)", re.DOTALL)

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+|\\\n)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<heredoc><<-?[ \t]*(?:'[^'\n]*'|"[^"\n]*"|\\?[A-Za-z0-9_.]+))
  | (?P<skip><<<|[<>]\([^()\n]*\)|\d?[<>]+&?)
  | (?P<end>&>>?|&&|\|\||\|&|;;|[\n;&|()])
  | (?P<word>
        [^\s;&|()<>'"\\`$]+
      | '[^']*'
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
    r"(?:.*/)?(?:python[0-9.]*|torchrun|accelerate|bash|sh|env|singularity|apptainer|shifter)|\./.*|.*\.(?:py|sh)"
)
LAUNCHERS = ("srun", "mpiexec", "mpirun", "aprun", "ibrun", "jsrun")


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One option of one directive line: `flag` is `-l` on PBS and the long name, such as `--nodes`, on Slurm.

    `text` is the line after its prefix, `late` says that it stands after the
    first command, where no scheduler reads it.
    """

    line: int
    scheduler: str
    flag: str
    value: str
    text: str
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command: its words as bash would split them, quotes taken off, nothing expanded.

    `ends` is the operator after it: `&` where it goes on in the background.
    """

    line: int
    text: str
    words: tuple[str, ...]
    ends: str = "\n"

    @cached_property
    def argv(self) -> tuple[str, ...]:
        """The words from the program on, without keywords and assignments in front of it."""
        for index, word in enumerate(self.words):
            if word not in _KEYWORDS and not _ASSIGNMENT.match(word):
                return self.words[index:]
        return ()

    @cached_property
    def name(self) -> str:
        """The program without its folder; `mpiexec` also where a variable of that name holds it."""
        return self.argv[0].rpartition("/")[2].strip("${}").lower() if self.argv else ""

    @cached_property
    def launched(self) -> tuple[str, ...]:
        """What a launcher starts, as far as it can be told from the launcher's own options."""
        if self.name not in LAUNCHERS:
            return ()
        for index, word in enumerate(self.argv[1:], start=1):
            if _PROGRAM.fullmatch(word):
                return self.argv[index:]
        return ()

    @cached_property
    def own_words(self) -> tuple[str, ...]:
        """The launcher's options, without what it starts."""
        return self.argv[1 : len(self.argv) - len(self.launched)]

    def option(self, *names: str) -> str | None:
        """The value of the first of these options among the launcher's own; empty where it has none."""
        words = self.own_words
        for index, word in enumerate(words):
            for name in names:
                if word == name:
                    following = words[index + 1] if index + 1 < len(words) else ""
                    return "" if following.startswith("-") else following
                if word.startswith(f"{name}=") or (
                    len(name) == 2 and word.startswith(name) and word[2:].isdigit()
                ):
                    return word[len(name) :].removeprefix("=")
        return None


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script taken apart. `scheduler` is pbs, slurm, or empty where no directive says.

    `commands` ends early where a quote or a here-document is never closed.
    """

    text: str
    lines: tuple[str, ...]
    scheduler: str
    shebang: str
    directives: tuple[Directive, ...] = ()
    commands: tuple[Command, ...] = ()
    assignments: tuple[tuple[int, str, str], ...] = field(default=(), repr=False)

    def read(self) -> tuple[Directive, ...]:
        """The directives that the scheduler reads: its own, before the first command."""
        return tuple(d for d in self.directives if d.scheduler == self.scheduler and not d.late)

    def value(self, *flags: str) -> str | None:
        """What the last directive with one of these flags says."""
        found = [d.value for d in self.read() if d.flag in flags]
        return found[-1] if found else None

    def resources(self) -> Iterator[tuple[Directive, str, str]]:
        """Each resource of PBS's `-l`, with its directive."""
        for directive in self.read():
            if directive.scheduler == "pbs" and directive.flag == "-l":
                for part in directive.value.split(","):
                    name, _, value = part.partition("=")
                    yield directive, name.strip(), value.strip()

    def sets(self, name: str) -> bool:
        """Whether the body gives that variable a value."""
        return any(found == name for _, found, _ in self.assignments)

    def launches(self) -> list[Command]:
        """The commands that start ranks through a launcher."""
        return [command for command in self.commands if command.name in LAUNCHERS]


def read_script(path: Path, name: str) -> str:
    """The text of the script at `path`, with bytes that are no UTF-8 as surrogates; errors call it `name`.

    Raises:
        RequestError: it is no plain file.
        OSError: it cannot be read.
    """
    # A pipe or a device might never end.
    if not path.is_file():
        what = "is not a plain file" if path.exists() else "does not exist"
        raise RequestError(f"{name} {what}; give a job script")
    with path.open("rb") as file:
        return file.read(MAX_CHARS + 1).decode("utf-8", "surrogateescape")


def parse_script(text: str) -> Script:
    """The script taken apart; whatever it holds, nothing is raised and nothing is run."""
    text = text[:MAX_CHARS]
    lines = tuple(line.removesuffix("\r") for line in text.split("\n"))
    directives = tuple(_directives(lines))
    early = [d.scheduler for d in directives if not d.late] or [d.scheduler for d in directives]
    # Where both are written, sbatch reads #PBS lines too and qsub no #SBATCH ones.
    scheduler = "slurm" if "slurm" in early else next(iter(early), "")
    commands = tuple(_commands(text[:MAX_BODY_CHARS]))
    return Script(
        text=text,
        lines=lines,
        scheduler=scheduler,
        shebang=lines[0][2:].strip() if lines[0].startswith("#!") else "",
        directives=directives,
        commands=commands,
        assignments=tuple(_assignments(commands)),
    )


def _directives(lines: tuple[str, ...]) -> Iterator[Directive]:
    late = False
    for number, line in enumerate(lines, start=1):
        if match := _DIRECTIVE.match(line):
            scheduler = "pbs" if match[1] == "PBS" else "slurm"
            options = _slurm_options(match[2]) if scheduler == "slurm" else _pbs_options(match[2])
            for flag, value in options:
                yield Directive(
                    line=number, scheduler=scheduler, flag=flag, value=value, text=match[2].strip(), late=late
                )
        elif line.strip() and not line.lstrip().startswith("#"):
            late = True


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False) if "'" in text or '"' in text else text.split()
    except ValueError:
        return text.split()


def _slurm_options(text: str) -> Iterator[tuple[str, str]]:
    """Long flags with their values; a word that belongs to no option has an empty flag."""
    words = _words(text.partition(" #")[0])
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            yield "", word
            continue
        if not word.startswith("--"):
            flag, value = f"--{_SLURM_SHORT.get(word[1:2], word[1:2])}", word[2:].removeprefix("=")
            equals = value
        takes_value = flag[2:] not in _SLURM_BARE
        if not equals and takes_value and index < len(words) and not words[index].startswith("--"):
            value, index = words[index], index + 1
        yield flag, value


def _pbs_options(text: str) -> Iterator[tuple[str, str]]:
    words = _words(text)
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        if word.startswith("#"):
            return  # a comment, which has a check of its own
        if not word.startswith("-"):
            yield "", word
            continue
        flag, value = (word, "") if word.startswith("--") else (word[:2], word[2:])
        if not value and word[1:2] not in _PBS_BARE and index < len(words):
            value, index = words[index], index + 1
        yield flag, value


def _commands(text: str) -> Iterator[Command]:
    """The simple commands in order; a `$( )` with commands of its own inside may give further ones."""
    position, line, length = 0, 1, len(text)
    words: list[list[str]] = []  # the pieces of each word
    joined = skipping = False  # whether the next piece continues a word, or is the target of `>`
    first = start = 0
    documents: list[str] = []
    while position < length:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup == "open":
            break
        kind, piece = match.lastgroup, match[0]
        begin, position = position, match.end()
        if kind == "word":
            if skipping:
                pass
            elif joined and words:
                words[-1].append(_bare(piece))
            else:
                if not words:
                    first, start = line, begin
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
                yield Command(line=first, text=text[start:begin], words=_whole(words), ends=piece)
            words = []
        elif kind == "end":
            skipping = True
        line += piece.count("\n")
        if piece == "\n" and documents:
            for document in documents:
                closed = _end_of_document(text, position, document)
                line += text.count("\n", position, closed)
                position = closed
            documents = []
    if words and position >= length:
        yield Command(line=first, text=text[start:], words=_whole(words))


def _whole(words: list[list[str]]) -> tuple[str, ...]:
    return tuple("".join(pieces) for pieces in words)


def _bare(piece: str) -> str:
    if piece[0] in "'\"" and len(piece) > 1:
        return piece[1:-1]
    return piece[1:] if piece[0] == "\\" else piece


def _end_of_document(text: str, position: int, opening: str) -> int:
    """Where the here-document that began on the line before `position` ends."""
    word = opening.lstrip("<-").strip().strip("'\"\\")
    while (found := text.find(word, position) if word else -1) >= 0:
        line_start = text.rfind("\n", 0, found) + 1
        indent = text[max(line_start, found - 64) : found]
        position = found + len(word)
        alone = not indent.strip("\t" if opening.startswith("<<-") else "")
        if alone and text[position : position + 1] in ("", "\n"):
            return position
    return len(text)


def _assignments(commands: tuple[Command, ...]) -> Iterator[tuple[int, str, str]]:
    for command in commands:
        words = list(dropwhile(_KEYWORDS.__contains__, command.words))
        declares = words[:1] in (["export"], ["declare"], ["local"], ["readonly"])
        for word in words[declares:]:
            match = _ASSIGNMENT.match(word)
            if match:
                name = match[0].rstrip("+=")
                yield command.line, name, word[match.end() :]
            elif not declares:
                break
