"""The base class of all schedulers, and checks of the values in directives.

The rest of the project calls the methods of a `Scheduler` and never compares its name.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import QUEUE_OPTIONS, flag_of
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.raw_options import raw_directive
from ddp_hpc.sites.site import Site, queue_entries
from ddp_hpc.units import format_walltime, parse_walltime_s

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.device_share import DeviceShare
    from ddp_hpc.schedulers.job_state import JobState
    from ddp_hpc.schedulers.machine_facts import MachineFacts, Question
    from ddp_hpc.schedulers.running_job import RunningJob

Directives = dict[str, str | Sequence[str]]
"""The values of directives; the keys are the variable names in the templates of job scripts."""

Fault = Literal["", "stray", "unclosed", "colon", "unknown", "ambiguous", "no value", "extra value"]

# Quotes in longer texts are ignored, since shlex takes quadratic time for one long word.
_MAX_QUOTED_CHARS = 16 * 1024

_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+,=&|/()*-]*")
# Formats of walltime in pbs_resources(7).
_NUMBER = re.compile(r"\d{1,9}")
_MINUTES_SECONDS = re.compile(r"(\d{1,9}):(\d{1,2})")
# The name of a resource or attribute in the value of an option, such as `select` in `-l select=2:ncpus=4`.
_NAME_IN_VALUE = re.compile(r"(?:^|[,&\s])([A-Za-z_]\w*)(?==)")

# The `select` request for profiles that do not define `resources`: one chunk per node.
_CHUNK, _GPUS, _MEMORY = (
    "select={nodes}:ncpus={cpus}:mpiprocs={ranks}",
    ":ngpus={devices}",
    ":mem={memory_mib}mb",
)
# The amount is unknown, or the option --mem replaces it.
_NO_MEMORY = re.compile(r"(?:^|:)mem=0mb")


@dataclass(frozen=True, kw_only=True)
class ReadOption:
    """One option of a directive as its scheduler parses it, or one word that the scheduler rejects.

    `flag` is `-l` on PBS and the long name, such as `--nodes`, on Slurm. For a word that does not belong to
    an option, `flag` is empty and `value` is the word. `written` is the text in the script. `fault` is the
    reason why the scheduler rejects the option regardless of its value. `component` is the index of the
    component of a heterogeneous job, from 0.
    """

    line: int
    flag: str
    value: str = ""
    written: str = ""
    fault: Fault = ""
    component: int = 0


class DirectiveLine(Protocol):
    """One option in a directive of a user's script."""

    @property
    def line(self) -> int:
        """The line number, from 1."""
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
    """The options in the directives of a user's script, as its scheduler reads them."""

    def read(self) -> Sequence[DirectiveLine]:
        """Returns the directives before the first command."""
        ...

    def value(self, *flags: str) -> str | None:
        """Returns the value of the last directive with one of these flags; None if there is no such
        directive.
        """
        ...

    def resources(self) -> Iterator[tuple[DirectiveLine, str, str]]:
        """Yields each resource of the `-l` options of PBS: the directive, the name and the value."""
        ...


class JobCommands(Protocol):
    """The functions in the module `query_and_cancel` of a scheduler, which query and cancel jobs."""

    def read_job(self, job_id: str) -> JobState | None:
        """Returns the state of a job; None if the scheduler does not know it. Refuses a job array."""
        ...

    def read_jobs(self, job_id: str) -> list[JobState]:
        """Returns the state of a job, or those of the tasks of a job array; empty if it is unknown."""
        ...

    def job_id_of(self, answer: str) -> str | None:
        """Returns the job id in the last line that the submit command printed."""
        ...

    def cancel(self, job_id: str, tasks: Sequence[str] = ()) -> str:
        """Cancels a job, or `tasks` of a job array, which are all those that have not ended.

        Returns the scheduler's error message, empty on success.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Options of `submit SCRIPT`; 0 and an empty text mean that an option was not given."""

    num_nodes: int = 0
    walltime_s: int = 0
    queue: str = ""
    qos: str = ""
    name: str = ""


class Scheduler:
    """One scheduler. The defaults describe a machine without a scheduler."""

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
    first_node_in_shell: ClassVar[str] = ""
    """The node of rank 0 as a bash expression; empty if `render --standalone` is not supported."""
    job_number_in_shell: ClassVar[str] = ""
    """A number that is different for each job, as a term of bash's arithmetic."""
    agent_launcher: ClassVar[str] = ""
    """The launcher that starts torchrun's agent on every node; empty if the script itself starts it."""
    mpiexec_needs_hosts: ClassVar[bool] = False
    """Whether mpiexec must get the host names of the job as an option."""
    why_omp_num_threads: ClassVar[str] = ""
    """An additional reason why scripts for this scheduler set OMP_NUM_THREADS."""
    interactive_command: ClassVar[str] = ""
    """The command that requests an interactive allocation; empty if `find_allocation` does not support it."""
    can_chain: ClassVar[bool] = False
    """Whether several jobs can be queued at once, each of which waits for the previous one."""
    passes_arguments: ClassVar[bool] = False
    """Whether the submit command passes arguments to a script: `sbatch SCRIPT ARGUMENTS`."""
    passes_environment: ClassVar[bool] = False
    """Whether the submit command passes its own environment variables to the job."""
    is_account_on_command_line: ClassVar[bool] = False
    """Whether the account must be an argument of the submit command, because no directive can name it."""
    requests_by_resources: ClassVar[bool] = False
    """Whether nodes and GPUs are requested as `resources` of the profile."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Options of jobs that this scheduler does not have, by the name of the field in `Job`: the reason, and
    what to do instead."""
    named_in_value: ClassVar[frozenset[str]] = frozenset(("-l", "-W"))
    """Options that may be repeated, because their value names what they set, such as `-l NAME=VALUE`."""

    # Attributes for reading a user's script.
    prefix: ClassVar[str] = ""
    """The prefix of directives, such as `#SBATCH`; empty if ddp-hpc does not parse them."""
    directive_pattern: ClassVar[re.Pattern[str] | None] = None
    """A pattern that matches a directive and captures the text after its prefix; None if a blank must follow
    the prefix."""
    directive_prefix: ClassVar[str] = ""
    """The prefix of directives in rendered scripts, if `prefix` is empty because they are not parsed."""
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
    zero_is_refused: ClassVar[bool] = True
    """Whether a walltime of zero is an error; otherwise it means no limit."""
    account_flags: ClassVar[tuple[str, ...]] = ("-A", "-P")
    """Options that name the account."""

    # Attributes for jobs, and for the commands on this machine.
    job_id_variable: ClassVar[str] = ""
    """The environment variable with the job id; empty if the scheduler sets no such variable."""
    start_variable: ClassVar[str] = ""
    """The environment variable that differs between the starts of a job that the scheduler requeues."""
    end_time_variable: ClassVar[str] = ""
    """The environment variable with the end of the job, in seconds since the Unix epoch."""
    array_index_variables: ClassVar[tuple[str, ...]] = ()
    """The environment variables with the index of a task of a job array, of which one is set."""
    array_directive: ClassVar[re.Pattern[bytes]] = re.compile(b"(?!)")
    """A pattern for the job array directive, which is removed from the script of a job that continues one
    task of the array. The default matches nothing: usually, `array_options` override the directive."""
    start_without_ssh: ClassVar[str] = ""
    """What to do if mpiexec cannot start ranks on other nodes with ssh; empty for general advice."""
    query_command: ClassVar[str] = ""
    """The command that reports the state of a job, and whose presence on the PATH shows that this machine has
    the scheduler; empty if jobs of this scheduler cannot be monitored."""
    job_id_pattern: ClassVar[re.Pattern[str]] = re.compile("")
    """A pattern that occurs only in job ids of this scheduler."""
    commands: ClassVar[tuple[str, ...]] = ()
    """The commands that a login node must have; the first one submits a script."""

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """Returns the values of the script's directives; by default those that most schedulers have.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        return {
            "name": directive_value("job name", job.name),
            "walltime": walltime_of(layout, site),
            "queue": optional_value("queue", layout.queue.name),
            "account_option": site.account.option,
            "account": optional_value("account", job.account),
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        """Returns the directives for the fields in `QUEUE_OPTIONS` that `directives` does not cover.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        return []

    def script_directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """Returns the values of all directives of the script. Options of the job replace those of the site.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        for name in QUEUE_OPTIONS:
            if (value := getattr(job, name)) and name in self.lacks:
                given = f"{flag_of(name)} {value}" if isinstance(value, str) else flag_of(name)
                raise RequestError(f"{given} was given, but {self.lacks[name]}")
        values = self.directives(job, site, layout)
        if asked := [*self.submit_options(job, site, layout), *self._raw_options(job)]:
            names = {name for option in asked for name in self.option_names(option)}
            of_site = [one for one in values["options"] if not names.intersection(self.option_names(one))]
            values["options"] = [*of_site, *asked]
        return values

    def _raw_options(self, job: Job) -> Iterator[str]:
        own = self.directive_prefix or self.prefix
        for text in job.directive:
            prefix, option = raw_directive(text)
            if prefix not in ("", own):
                raise RequestError(
                    f"--directive {text!r} was given, but the directives of {self.title} begin with {own}. "
                    f"Use an option of {self.submit_program}."
                )
            yield option

    def option_names(self, option: str) -> list[str]:
        """Returns the names of the settings in the text of a directive, such as `--mem` or `-l place`."""
        try:
            words = shlex.split(option)
        except ValueError:  # a line of the user's own template has an unclosed quote
            words = option.split()
        pairs = list(self.split_options(words)) or [(words[0].partition("=")[0], " ".join(words[1:]))]
        return [
            name
            for flag, value in pairs
            for name in (
                [f"{flag} {one}" for one in _NAME_IN_VALUE.findall(value)]
                if flag in self.named_in_value
                else [flag]
            )
        ]

    def umask_arguments(self, script: ScriptOptions, umask: int) -> list[str]:
        """Returns the options of the submit command that give a job the user's umask, if `script` is one of
        ddp-hpc that sets the default; by default none, for a scheduler that passes the umask itself.
        """
        return []

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        """Asks the scheduler of this machine which share of a node comes with one GPU of a queue; None if it
        does not say.

        Raises:
            RequestError: the nodes have fewer GPUs than requested.
        """
        return None

    def questions(self) -> tuple[Question, ...]:
        """Returns the commands that report the limits of queues and the nodes of a machine, if there are
        any.
        """
        return ()

    def read_answers(self, answers: Mapping[str, str], site: Site) -> MachineFacts:
        """Returns the facts in the output of `questions`, by their keys, about the queues of the site."""
        raise NotImplementedError

    def refuse_qos(self, site: Site) -> str:
        """Returns the reason why the site does not support a QOS; empty if it does."""
        return f"{site.title} uses {self.title}, and only Slurm has a QOS"

    def version_of(self, site: Site) -> str:
        """Returns the version of the scheduler at the site; empty if the profile does not contain it."""
        return ""

    def installed_version(self) -> str:
        """Returns the version of the scheduler's commands on this machine; empty if it is unknown."""
        return ""

    def repeatable_flags_in(self, version: str) -> frozenset[str]:
        """Returns the options that a script may repeat with different values in a version of the
        scheduler.
        """
        return frozenset(("-l", "-W", "-v", "-m"))

    def account_placeholder(self, site: Site) -> str:
        """Returns the account option of the submit command with a placeholder, such as `-A PROJECT`."""
        option = site.account.option
        return f"{option}PROJECT" if option.endswith("=") else f"{option} PROJECT"

    def account_flag(self, site: Site) -> str:
        """Returns the option that names the account, such as `-A` or `-W group_list=`."""
        return site.account.option

    def account_arguments(self, account: str, option: str) -> list[str]:
        """Returns the arguments of the submit command that set the account, with the profile's `option`."""
        *before, last = (option or "-A").split()
        return [*before, f"{last}{account}"] if last.endswith("=") else [last, account]

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        """Returns the command line that queues a script.

        `after` is the ID of a job that must end first, and `variables` has the format `A=1,B=2`.
        """
        raise NotImplementedError

    def overrides(self, asked: Overrides, script: ScriptOptions, site: Site | None) -> list[list[str]]:
        """Returns the options of the submit command that override a script's directives, as lists of words.

        Raises:
            RequestError: the scheduler has no such option, or the option cannot be derived from the script.
        """
        if asked != Overrides():
            raise RequestError(
                f"the options --nodes, --walltime, --queue, --qos and --name cannot override directives of "
                f"{self.title}; change the script"
            )
        return []

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[tuple[str, str, str]]:
        """Returns name, value and purpose of each variable that mpiexec needs to start ranks under this
        scheduler.
        """
        return []

    def exclude_host(self, host: str) -> str:
        """Returns the submit command that excludes this host; empty if the scheduler cannot exclude hosts."""
        return ""

    # Methods that read what a user's script requests; None if the script does not request it.

    def read_directives(self, lines: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
        """Yields the options of directives; `lines` has their line numbers and the text after the prefix."""
        for line, text in lines:
            for flag, value in self.split_options(_words(text)):
                yield ReadOption(line=line, flag=flag, value=value, written=flag or value)

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
        if _NUMBER.fullmatch(text):
            return int(text)
        if match := _MINUTES_SECONDS.fullmatch(text):
            return int(match[1]) * 60 + int(match[2])
        try:
            return parse_walltime_s(text)
        except RequestError:
            return None

    def names_account(self, script: ScriptOptions) -> bool:
        """Returns whether the script names the account."""
        return any(one.flag in self.account_flags for one in script.read())

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        """Returns the line number and the name of the queue; at some sites it is a partition or a QOS."""
        return last_directive(script, self.queue_flag)

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        """Returns the QOS that is requested in addition to a queue; empty if no QOS is requested."""
        return ""

    # Methods for jobs.

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Returns the allocation of which this process is a part; None outside a job of this scheduler.

        Raises:
            RequestError: the scheduler's variables are invalid.
        """
        return None

    def read_end_s(self, job_id: str, ask: Callable[..., str]) -> tuple[float, str] | None:
        """Returns the end of a running job in seconds since the Unix epoch, and the command that reported it.

        `ask` runs a command once and returns its output, which is empty if the command failed.
        """
        return None

    def read_kill_delay_s(self, ask: Callable[..., str]) -> int | None:
        """Returns the configured seconds from SIGTERM to SIGKILL at the end of a job; None if unknown.

        `ask` runs a command, as in `read_end_s`.
        """
        return None

    def array_index(self, environ: Mapping[str, str]) -> str:
        """Returns the index of this process's job in its job array; empty if the job is not in an array."""
        found = (environ.get(name, "") for name in self.array_index_variables)
        return next((text for text in found if re.fullmatch("[0-9]{1,10}", text)), "")

    def array_options(self, index: str) -> list[str]:
        """Returns the options of the submit command for a job that continues this task of an array."""
        return []

    def job_commands(self) -> JobCommands:
        """Returns the module with the commands for jobs; only for a scheduler with a `query_command`."""
        package = type(self).__module__.rpartition(".")[0]
        return cast("JobCommands", import_module(f"{package}.query_and_cancel"))

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        """Returns the job of this process. Outside a job, the process ID serves as the job ID."""
        from ddp_hpc.schedulers.running_job import RunningJob

        return RunningJob(self.job_id(environ), environ)

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns the ID of the job of this process; outside a job, the process ID."""
        return environ.get(self.job_id_variable) or str(os.getpid())


def _words(text: str) -> list[str]:
    if len(text) <= _MAX_QUOTED_CHARS and ("'" in text or '"' in text):
        with suppress(ValueError):
            return shlex.split(text)
    return text.split()


def directive_value(what: str, value: str) -> str:
    """Returns `value` if it can be written into a directive line.

    A directive is not shell code: the scheduler reads it to the end of the line without expanding anything.
    Therefore, values are checked instead of quoted.

    Raises:
        RequestError: `value` contains blanks, line breaks, quotes, `$` or other characters that are not
            allowed.
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
    """Returns the walltime of the job, or otherwise the default of the site, as HH:MM:SS.

    Raises:
        RequestError: neither of them is set.
    """
    if layout.walltime_s is None:
        raise RequestError(f"no walltime was given and {site.title} has no default. Use --walltime HH:MM:SS.")
    return format_walltime(layout.walltime_s)


def refuse_unused(site: Site, given: Sequence[tuple[str, str]]) -> None:
    """Rejects options that this scheduler cannot use.

    `given` has these options and their values; an empty value means that the option was not given.

    Raises:
        RequestError: one of the options was given.
    """
    for option, value in given:
        if value:
            raise RequestError(
                f"{option} {value} was given, but the scheduler of profile {site.name} has no such option. "
                f"Remove {option}."
            )


def resource_values(job: Job, site: Site, layout: Layout, of_site: Sequence[str]) -> list[str]:
    """Returns the values of qsub -l for this job, as defined by its queue or otherwise by its site."""
    of_queue = next((queue.resources for queue in queue_entries(site, layout.queue.name)), ())
    resources = of_queue or of_site or (_CHUNK + _GPUS * (layout.devices > 0) + _MEMORY,)
    cpus = job.cpus_per_node or site.node.threads or site.node.cores
    cpus = cpus or layout.cpus_per_rank * layout.ranks_per_node or layout.ranks_per_node
    per_node = {
        "ranks": layout.ranks_per_node,
        "devices": layout.devices,
        "cpus": cpus,
        "memory_mib": layout.memory_mib,
    }
    all_nodes = {f"all_{name}": job.num_nodes * number for name, number in per_node.items()}
    numbers = {"nodes": job.num_nodes, **per_node, **all_nodes}
    values = [_NO_MEMORY.sub("", text.format_map(numbers)) for text in resources]
    return [directive_value("resource", text) for text in values if text]


def cpus_per_task(layout: Layout) -> int:
    """Returns the CPUs per Slurm task. A task is one rank, or with torchrun the agent for a whole node."""
    per_rank = layout.cpus_per_rank or 1
    return per_rank * layout.ranks_per_node if layout.launcher == "torchrun" else per_rank


def last_directive(script: ScriptOptions, flag: str) -> tuple[int, str] | None:
    """Returns the line number and the value of the last directive with this flag; None if there is none."""
    found = [(one.line, one.value) for one in script.read() if flag and one.flag == flag]
    return found[-1] if found else None


def whole_number(text: str | None) -> int | None:
    """Returns `text` as a whole number, or None if it is not one."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
