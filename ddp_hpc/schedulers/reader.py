"""The role of a scheduler that reads the directives of users' scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.schedulers.script_options import ReadOption, ScriptOptions, last_directive
from ddp_hpc.sites.site import Site

if TYPE_CHECKING:
    from ddp_hpc.schedulers.scheduler import Scheduler


# Quotes in longer texts are ignored, since shlex takes quadratic time for one long word.
_MAX_QUOTED_CHARS = 16 * 1024
# Formats of walltime in pbs_resources(7).
_NUMBER = r"\d{1,9}"
_MINUTES_SECONDS = r"(\d{1,9}):(\d{1,2})"


class ScriptReader:
    """Reads directives. The defaults are those of a scheduler whose scripts ddp-hpc does not parse."""

    requests_by_resources: ClassVar[bool] = False
    """Whether nodes and GPUs are requested as `resources` of the profile."""

    directive_pattern: ClassVar[re.Pattern[str] | None] = None
    """A pattern that matches a directive and captures the text after its prefix; None if a blank must follow
    the prefix."""
    log_flags: ClassVar[tuple[str, ...]] = ()
    """The options that name log files."""
    walltime_flag: ClassVar[str] = ""
    """The option that requests a walltime; empty if the walltime is a resource (-l walltime)."""
    queue_flag: ClassVar[str] = ""
    """The option that names a queue."""
    walltime_directive: ClassVar[str] = ""
    """The directive that requests a walltime, for messages."""
    walltime_pattern: ClassVar[re.Pattern[str]] = re.compile("")
    """The pattern of all walltimes that the scheduler accepts."""
    bare_walltime_unit_s: ClassVar[int] = 1
    """The unit of a walltime without colons, in seconds."""
    name_flags: ClassVar[frozenset[str]] = frozenset(("-M",))
    """Options whose values do not matter for the job to run: names and mail addresses."""
    expands_log_variables: ClassVar[bool] = False
    """Whether some versions of the scheduler expand variables in the options that name log files."""
    account_flags: ClassVar[tuple[str, ...]] = ("-A", "-P")
    """Options that name the account."""
    array_directive: ClassVar[re.Pattern[bytes]] = re.compile(b"(?!)")
    """A pattern for the job array directive, which is removed from the script of a job that continues one
    task of the array. The default matches nothing: usually, `array_options` override the directive."""

    bare_memory_unit: ClassVar[str] = ""
    """The unit of memory that is requested without a unit."""
    foreign_log_pattern: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Patterns of other schedulers in names of log files, which this one does not replace."""
    submit_directory: ClassVar[str] = "PWD"
    """The variable with the directory from which the job was submitted."""
    port_of_job: ClassVar[str] = "a port that depends on the job ID"
    """A port, as an expression of bash that differs between jobs."""
    submit_with_variable: ClassVar[str] = "NAME=VALUE"
    """How to submit a job that gets an environment variable."""
    starts_login_shell: ClassVar[bool] = False
    """Whether the shell of a job reads the startup files of a login shell."""
    reads_indented: ClassVar[bool] = False
    """Whether the scheduler reads directives with blanks before the prefix."""
    variables: ClassVar[frozenset[str]] = frozenset()
    """The environment variables that the scheduler sets in jobs; empty if they are unknown."""
    own_commands: ClassVar[tuple[str, ...]] = ()
    """Commands that exist only with this scheduler."""
    variables_elsewhere: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Variables of similar schedulers, with an option that those do not have, and the variable to use."""
    variables_of_options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Variables that are set only if a job is given one of these options."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def version_of(self, site: Site) -> str:
        """Returns the version of the scheduler at the site; empty if the profile does not contain it."""
        return ""

    def repeatable_flags_in(self, version: str) -> frozenset[str]:
        """Returns the options that a script may repeat with different values in a version of the
        scheduler.
        """
        return frozenset(("-l", "-W", "-v", "-m"))

    # Methods that read what a user's script requests; None if the script does not request it.

    def read_directives(self, lines: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
        """Yields the options of directives; `lines` has their line numbers and the text after the prefix."""
        for line, text in lines:
            for flag, value in self.split_options(_words(text)):
                yield ReadOption(line=line, flag=flag, value=value, written=flag or value)

    def rejects(self, option: ReadOption) -> bool:
        """Returns whether all versions of the scheduler reject the value of an option."""
        return False

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yields each flag of a directive with its value; a word without an option has an empty flag."""
        yield from ()

    def num_nodes(self, script: ScriptOptions) -> int | None:
        """Returns the number of nodes that the script requests."""
        return None

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        """Returns the number of ranks per node that the script requests."""
        return None

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        """Returns the number of GPUs per node that the script requests."""
        return None

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        """Returns the number of CPUs per rank that the script requests."""
        return None

    def memory(self, script: ScriptOptions) -> Iterator[tuple[int, str, str]]:
        """Yields the line, the name and the value of each request of memory."""
        yield from ()

    def walltime(self, script: ScriptOptions) -> tuple[int, str] | None:
        """Returns the line number and the text of the requested walltime."""
        return last_directive(script, self.walltime_flag)

    def accepts_walltime(self, text: str) -> bool:
        """Returns whether the scheduler accepts a walltime."""
        return bool(self.walltime_pattern.fullmatch(text))

    def walltime_s(self, text: str) -> int | None:
        """Returns a walltime in seconds, as the scheduler reads it; None if it is invalid or unlimited."""
        if not self.accepts_walltime(text):
            return None
        if re.fullmatch(_NUMBER, text):
            return int(text)
        if match := re.fullmatch(_MINUTES_SECONDS, text):
            return int(match[1]) * 60 + int(match[2])
        try:
            return parse_walltime_s(text)
        except RequestError:
            return None

    def names_account(self, script: ScriptOptions) -> bool:
        """Returns whether the script names the account."""
        return any(option.flag in self.account_flags for option in script.read())

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        """Returns the line number and the name of the queue; at some sites it is a partition or a QOS."""
        return last_directive(script, self.queue_flag)

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        """Returns the QOS that is requested in addition to a queue; empty if no QOS is requested."""
        return ""


def _words(text: str) -> list[str]:
    if len(text) <= _MAX_QUOTED_CHARS and ("'" in text or '"' in text):
        with suppress(ValueError):
            return shlex.split(text)
    return text.split()
