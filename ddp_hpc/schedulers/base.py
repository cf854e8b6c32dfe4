"""The interface that every scheduler implements, and checks of values for all schedulers.

The rest of the project uses the methods of a `Scheduler` and never its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.sites.site import Site, queue_entries
from ddp_hpc.units import format_walltime, parse_walltime_s

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.job_state import JobState

Directives = dict[str, str | Sequence[str]]
"""The values of the directives for a script's template, by name."""

Severity = Literal["error", "warning", "note"]

_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+,=&|/()*-]*")
# Walltimes of sbatch(1), --time, and pbs_resources(7), walltime. Only Slurm accepts days with hours.
_NUMBER = re.compile(r"\d{1,9}")
_MINUTES_SECONDS = re.compile(r"(\d{1,9}):(\d{1,2})")
_DAYS_HOURS = re.compile(r"(\d{1,6})-(\d{1,2})(?::(\d{1,2}))?")

# The default requests one chunk per node; it is used if the profile does not define resources.
_CHUNK = "select={nodes}:ncpus={cpus}:mpiprocs={ranks}"


class DirectiveLine(Protocol):
    """One option of a directive line in a user's script."""

    @property
    def line(self) -> int:
        """The number of its line, from 1."""
        ...

    @property
    def flag(self) -> str:
        """`-l` on PBS; the long name, such as `--nodes`, on Slurm."""
        ...

    @property
    def value(self) -> str:
        """The text after the flag."""
        ...


class ScriptOptions(Protocol):
    """The options of a user's script, as its scheduler reads them."""

    @property
    def lines(self) -> Sequence[str]:
        """The lines of the script, without line breaks."""
        ...

    def read(self) -> Sequence[DirectiveLine]:
        """Returns the directives before the first command."""
        ...

    def value(self, *flags: str) -> str | None:
        """Returns the value of the last directive with one of these flags."""
        ...

    def resources(self) -> Iterator[tuple[DirectiveLine, str, str]]:
        """Each resource in the `-l` directives of PBS: its directive, name and value."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScriptProblem:
    """One problem in a script: its line, a description and a fix."""

    line: int
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class ScriptCheck:
    """A lint check that applies only to scripts of the scheduler that defines it."""

    id: str
    severity: Severity
    title: str
    run: Callable[[ScriptOptions], Iterator[ScriptProblem]]


@dataclass(frozen=True, kw_only=True)
class ShellVariable:
    """A variable that a job script exports, with the reason for it."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class JobCommands:
    """The functions that query and cancel the jobs of one scheduler."""

    title: str
    """The scheduler's name for messages."""
    program: str
    """The program that queues a script."""
    asks: str
    """The program whose presence on the PATH shows that this machine has the scheduler."""
    job_id_pattern: re.Pattern[str]
    """The pattern that only the job ids of this scheduler contain."""
    read_job: Callable[[str], JobState | None]
    """The state of a job; None if the scheduler does not know it."""
    job_id_of: Callable[[str], str | None]
    """The job id in the output of `program`."""
    cancel: Callable[[str], str]
    """Cancels a job; returns the scheduler's error message, empty on success."""


class Scheduler:
    """One scheduler. The defaults are those of a machine without a scheduler."""

    name: ClassVar[str]
    """The scheduler's name in profiles."""
    title: ClassVar[str]
    """The scheduler's name in messages."""

    # Attributes of rendered scripts.
    template: ClassVar[str]
    submit_program: ClassVar[str]
    launchers: ClassVar[tuple[str, ...]]
    has_queue: ClassVar[bool] = True
    """False if a script runs immediately on the machine on which it is started."""
    can_requeue: ClassVar[bool] = False
    """Whether a script can requeue or resubmit itself at the end of its walltime."""
    kill_delay_s: ClassVar[int] = 0
    """The usual time between SIGTERM and SIGKILL at the end of a job; 0 if unknown."""
    job_id_in_shell: ClassVar[str] = "$job_id"
    """The job's id, as the script's shell expands it; empty if there is none."""
    agent_launcher: ClassVar[str] = ""
    """The launcher that starts torchrun's agent on every node; empty if the script itself starts it."""
    mpiexec_needs_hosts: ClassVar[bool] = False
    """Whether mpiexec needs a list of the job's hosts."""
    why_omp_num_threads: ClassVar[str] = ""
    """An additional reason why scripts for this scheduler set OMP_NUM_THREADS."""
    interactive_command: ClassVar[str] = ""
    """The command that requests an interactive allocation; empty if `find_allocation` does not support it."""
    can_chain: ClassVar[bool] = False
    """Whether several jobs can be queued at once, each of which waits for the previous one."""
    is_account_on_command_line: ClassVar[bool] = False
    """Whether the account can only be given on the command line, because no directive can name it."""
    requests_by_resources: ClassVar[bool] = False
    """Whether nodes and GPUs are requested as resources, whose units the profile defines."""

    # Attributes for reading a user's script.
    prefix: ClassVar[str] = ""
    """The prefix of directive lines."""
    log_flags: ClassVar[tuple[str, ...]] = ()
    """The options that name log files."""
    walltime_directive: ClassVar[str] = ""
    """The directive that requests a walltime."""
    walltime_pattern: ClassVar[re.Pattern[str]] = re.compile("")
    """The formats of a walltime that the scheduler accepts."""
    walltime_form: ClassVar[str] = "HH:MM:SS, such as 01:30:00"
    """How messages explain a walltime that the scheduler accepts."""
    bare_walltime_unit_s: ClassVar[int] = 1
    """The unit of a walltime without colons, in seconds."""
    is_ambiguous_walltime: ClassVar[bool] = True
    """Whether two fields are minutes and seconds, which people mistake for hours and minutes."""
    reads_loose_directives: ClassVar[bool] = False
    """Whether directives are also read after the first command, and with a blank after the #."""
    free_text_flags: ClassVar[frozenset[str]] = frozenset(("-v", "--export", "--comment", "--wrap"))
    """Options whose value may contain a literal dollar sign or ~."""
    repeatable_flags: ClassVar[frozenset[str]] = frozenset(("-l", "-W", "-v", "-m"))
    """Options that a script may repeat with different values."""
    account_flags: ClassVar[tuple[str, ...]] = ("-A", "-P")
    """Options that name the account."""
    checks: ClassVar[tuple[ScriptCheck, ...]] = ()
    """Lint checks for this scheduler's scripts, in addition to those in ddp_hpc/lint."""

    # Attributes for jobs, and for this machine.
    job_id_variable: ClassVar[str] = ""
    """The environment variable with the job's id; empty if jobs are not recognized by one."""
    end_time_variable: ClassVar[str] = ""
    """The environment variable with the end of the job, in seconds since the Unix epoch."""
    commands: ClassVar[tuple[str, ...]] = ()
    """The commands that a login node must have; the first one submits a script."""
    stand_in: ClassVar[str] = ""
    """The module that defines the stand-in as QUEUE; empty if ddp_hpc/rehearse defines it or none exists."""

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """Returns the values of the script's directives.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        raise NotImplementedError

    def refuse_qos(self, site: Site) -> str:
        """Returns the reason why the site does not support a QOS; empty if it does."""
        return f"a QOS is requested from Slurm, but {site.title} has {self.title}"

    def account_placeholder(self, site: Site) -> str:
        """Returns the argument for a project on the command line that submits a script."""
        option = site.account.option
        return f"{option}PROJECT" if option.endswith("=") else f"{option} PROJECT"

    def account_flag(self, site: Site) -> str:
        """Returns the flag of the account, such as `-A` or `-W group_list`."""
        return site.account.option

    def account_arguments(self, account: str, option: str) -> list[str]:
        """Returns the arguments that set the account on submission; `option` comes from the profile."""
        *before, last = (option or "-A").split()
        return [*before, f"{last}{account}"] if last.endswith("=") else [last, account]

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        """Returns the command line that queues a script.

        `after` is the id of a job that must end first, `variables` has the format `A=1,B=2`.
        """
        raise NotImplementedError

    def submit_line(self, options: str = "") -> str:
        """Returns the command of a shell that submits the script whose path follows it."""
        return f"{self.submit_program} {options}".rstrip()

    def launch_words(self, site: Site, layout: Layout) -> Sequence[str]:
        """Returns the command of a launcher that belongs to this scheduler; empty for any other launcher.

        The placeholders {num_nodes} and {num_ranks} stand for the numbers of the running job.
        """
        return ()

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[ShellVariable]:
        """Returns the variables that mpiexec needs to start ranks under this scheduler."""
        return []

    def exclude_host(self, host: str) -> str:
        """Returns the command that submits a job without this host; empty if there is none."""
        return ""

    # Methods that read the requests of a user's script; None means that the script does not contain the
    # request.

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yields flags and values of one directive line; a word without an option has an empty flag."""
        yield from ()

    def num_nodes(self, script: ScriptOptions) -> int | None:
        """Number of nodes."""
        return None

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        """Number of ranks per node."""
        return None

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        """Number of GPUs per node."""
        return None

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        """Number of CPUs per rank."""
        return None

    def walltime(self, script: ScriptOptions) -> tuple[int, str] | None:
        """Line and text of the walltime."""
        return None

    def walltime_s(self, text: str) -> int | None:
        """Returns the seconds of a walltime, as the scheduler reads it; None if it is invalid."""
        if not self.walltime_pattern.fullmatch(text):
            return None
        if _NUMBER.fullmatch(text):
            return int(text) * self.bare_walltime_unit_s
        if match := _MINUTES_SECONDS.fullmatch(text):
            return int(match[1]) * 60 + int(match[2])
        if match := _DAYS_HOURS.fullmatch(text):
            days, hours, minutes = (int(part or 0) for part in match.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60
        try:
            return parse_walltime_s(text)
        except RequestError:
            return None

    def names_account(self, script: ScriptOptions) -> bool:
        """Returns whether the script names the account."""
        return any(one.flag in self.account_flags for one in script.read())

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        """Line and name of the queue, partition or QOS, depending on the site."""
        return None

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        """Returns the QOS that is requested in addition to a partition."""
        return ""

    # Methods for jobs.

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Returns the allocation of this process; None if this scheduler has not allocated it.

        Raises:
            RequestError: the scheduler's variables are invalid.
        """
        return None

    def read_end_s(self, job_id: str, ask: Callable[..., str]) -> tuple[float, str] | None:
        """Returns the end of a running job in seconds since the Unix epoch, and the command that reported it.

        `ask` runs a command once and returns its output, which is empty if the command failed.
        """
        return None

    def job_commands(self) -> JobCommands | None:
        """Returns the commands for jobs; None if jobs of this scheduler cannot be monitored."""
        return None


def directive_value(what: str, value: str) -> str:
    """Returns `value` if it can be written into a directive line.

    A directive line is not shell code: schedulers read it to the end of the line and expand nothing.
    Therefore values are checked and never quoted.

    Raises:
        RequestError: it contains blanks, line breaks, quotes, `$` or other unsupported characters.
    """
    if not _VALUE.fullmatch(value):
        raise RequestError(
            f"{what} {value!r} cannot be written into a directive. Use letters, digits and _.:@+,=&|/()*- "
            "without blanks or quotes."
        )
    return value


def optional_value(what: str, value: str) -> str:
    """Returns `value` like `directive_value`, but also accepts an empty value."""
    return directive_value(what, value) if value else ""


def walltime_of(layout: Layout, site: Site) -> str:
    """Returns the walltime as HH:MM:SS.

    Raises:
        RequestError: neither the job nor the site has a walltime.
    """
    if layout.walltime_s is None:
        raise RequestError(f"no walltime was given and {site.title} has no default. Use --walltime HH:MM:SS.")
    return format_walltime(layout.walltime_s)


def refuse_unused(site: Site, given: Sequence[tuple[str, str]]) -> None:
    """Rejects options that this scheduler cannot use.

    Raises:
        RequestError: one of them has a value.
    """
    for option, value in given:
        if value:
            raise RequestError(
                f"{option} {value} was given, but the scheduler of profile {site.name} has no such option. "
                f"Remove {option}."
            )


def resource_values(job: Job, site: Site, layout: Layout, of_site: Sequence[str]) -> list[str]:
    """Returns the values of qsub's `-l` for this job, from the queue or otherwise from the site."""
    of_queue = next((queue.resources for queue in queue_entries(site, layout.queue)), ())
    resources = of_queue or of_site or (_CHUNK + (":ngpus={devices}" if layout.devices else ""),)
    numbers = resource_numbers(job, site, layout)
    return [directive_value("resource", text.format_map(numbers)) for text in resources]


def resource_numbers(job: Job, site: Site, layout: Layout) -> dict[str, int]:
    """Returns the values of the placeholders in a profile's `resources`."""
    cpus = job.cpus_per_node or site.node.threads or site.node.cores or layout.ranks_per_node
    return {
        "nodes": job.num_nodes,
        "ranks": layout.ranks_per_node,
        "devices": layout.devices,
        "cpus": cpus,
        "all_ranks": job.num_nodes * layout.ranks_per_node,
        "all_devices": job.num_nodes * layout.devices,
        "all_cpus": job.num_nodes * cpus,
    }


def cpus_per_task(layout: Layout) -> int:
    """Returns the number of CPUs of a Slurm task: those of one rank, or of a node for torchrun's agent."""
    per_rank = layout.cpus_per_rank or 1
    return per_rank * layout.ranks_per_node if layout.launcher == "torchrun" else per_rank


def whole_number(text: str | None) -> int | None:
    """Returns `text` as a whole number, or None if it is not one."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
