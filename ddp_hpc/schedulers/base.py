"""The interface that every scheduler implements, and the checks of values that all of them share.

The rest of the project asks a `Scheduler` and never looks at its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.sites.site import Site, queue_entries
from ddp_hpc.units import format_walltime

if TYPE_CHECKING:
    from ddp_hpc.schedulers.allocation import Allocation
    from ddp_hpc.schedulers.job_state import JobState

Directives = dict[str, str | Sequence[str]]
"""What a script's template fills in, by name."""

_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+,=&|/()*-]*")

# One chunk per node; nothing else is known of a site whose profile does not say.
_CHUNK = "select={nodes}:ncpus={cpus}:mpiprocs={ranks}"


class DirectiveLine(Protocol):
    """One option of a directive line of somebody's script."""

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
        """What follows the flag."""
        ...


class ScriptOptions(Protocol):
    """The options of somebody's script, as its scheduler reads them."""

    def read(self) -> Sequence[DirectiveLine]:
        """The directives before the first command."""
        ...

    def value(self, *flags: str) -> str | None:
        """The value of the last directive with one of these flags."""
        ...

    def resources(self) -> Iterator[tuple[DirectiveLine, str, str]]:
        """Each resource of PBS's `-l`: its directive, name and value."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShellVariable:
    """A variable that a job script exports, with the reason for it."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class JobCommands:
    """The commands for jobs that are queued or running."""

    title: str
    """The scheduler's name for people."""
    program: str
    """The program that queues a script."""
    asks: str
    """The program whose presence on the PATH tells that this machine has the scheduler."""
    job_id_pattern: re.Pattern[str]
    """What only this scheduler's job ids contain."""
    read_job: Callable[[str], JobState | None]
    """The state of a job; None if the scheduler does not know it."""
    job_id_of: Callable[[str], str | None]
    """The job id in the output of `program`."""
    cancel: Callable[[str], str]
    """Cancels a job; returns the scheduler's refusal, or an empty text."""


class Scheduler:
    """One scheduler. The attributes and methods here are those of a machine without one."""

    name: ClassVar[str]
    """As profiles name it."""
    title: ClassVar[str]
    """As people name it."""

    # The script.
    template: ClassVar[str]
    submit_program: ClassVar[str]
    launchers: ClassVar[tuple[str, ...]]
    has_queue: ClassVar[bool] = True
    """False if a script runs at once, where it was started."""
    can_requeue: ClassVar[bool] = False
    """Whether a script can have itself run again after its walltime."""
    kill_delay_s: ClassVar[int] = 0
    """The usual time between SIGTERM and SIGKILL at the end of a job; 0 if unknown."""
    job_id_in_shell: ClassVar[str] = "$job_id"
    """The job's id, as the script's shell expands it; empty if there is none."""
    agent_launcher: ClassVar[str] = ""
    """What starts torchrun's agent on every node; empty if the script itself does."""
    mpiexec_needs_hosts: ClassVar[bool] = False
    """Whether mpiexec has to be told the hosts of the job."""
    why_omp_num_threads: ClassVar[str] = ""
    """Why a script sets OMP_NUM_THREADS, in addition to the usual reason."""
    interactive_command: ClassVar[str] = ""
    """The command that gets an interactive allocation, if allocations are understood."""
    can_chain: ClassVar[bool] = False
    """Whether several jobs can be queued at once, each after the one before it."""
    is_account_on_command_line: ClassVar[bool] = False
    """Whether no directive can name the account."""
    requests_by_resources: ClassVar[bool] = False
    """Whether nodes and GPUs are requested as resources, whose units the profile defines."""

    # Somebody's script.
    prefix: ClassVar[str] = ""
    """How its directive lines begin."""
    log_flags: ClassVar[tuple[str, ...]] = ()
    """The options that name log files."""
    walltime_directive: ClassVar[str] = ""
    """How to request a walltime."""
    walltime_pattern: ClassVar[re.Pattern[str]] = re.compile("")
    """The spellings of a walltime that the scheduler accepts."""
    bare_walltime_unit_s: ClassVar[int] = 1
    """Seconds in the unit of a walltime that is only a number."""

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """The values of the script's directives.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        raise NotImplementedError

    def refuse_qos(self, site: Site) -> str:
        """Why no QOS can be requested at the site; empty if one can."""
        return f"a QOS is requested from Slurm, but {site.title} has {self.title}"

    def account_placeholder(self, site: Site) -> str:
        """The argument that names a project on the command line that submits a script."""
        option = site.account.option
        return f"{option}PROJECT" if option.endswith("=") else f"{option} PROJECT"

    def account_flag(self, site: Site) -> str:
        """The directive that names the account, such as `-A` or `-W group_list`."""
        return site.account.option

    def account_arguments(self, account: str, option: str) -> list[str]:
        """The arguments that name the account when a script is submitted; `option` is the profile's."""
        *before, last = (option or "-A").split()
        return [*before, f"{last}{account}"] if last.endswith("=") else [last, account]

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        """The command line that queues a script: after the end of another job, with variables `A=1,B=2`."""
        raise NotImplementedError

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[ShellVariable]:
        """What mpiexec needs in its environment to start ranks under this scheduler."""
        return []

    def exclude_host(self, host: str) -> str:
        """The command that submits a job anywhere but on that host; empty if there is none."""
        return ""

    # What somebody's script requests. None: it does not say.

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Flags and values of one directive line; a word that belongs to no option has an empty flag."""
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

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        """Line and name of the queue, partition or QOS: whichever the site calls its queues."""
        return None

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        """The QOS that is requested in addition to a partition."""
        return ""

    # Jobs.

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation that the environment is in; None if it is not one of this scheduler's.

        Raises:
            RequestError: the scheduler's variables cannot be read.
        """
        return None

    def job_commands(self) -> JobCommands | None:
        """The commands for jobs; None if jobs of this scheduler are not followed."""
        return None


def directive_value(what: str, value: str) -> str:
    """`value`, if it can be written into a directive line.

    A directive line is not shell: schedulers read it to the end of the line and expand nothing. So
    values are checked, never quoted.

    Raises:
        RequestError: it contains blanks, line breaks, quotes, `$` or others that no scheduler accepts.
    """
    if not _VALUE.fullmatch(value):
        raise RequestError(
            f"{what} {value!r} cannot be written into a directive. Use letters, digits and _.:@+,=&|/()*- "
            "without blanks or quotes."
        )
    return value


def optional_value(what: str, value: str) -> str:
    """As `directive_value`; an empty value stays empty."""
    return directive_value(what, value) if value else ""


def walltime_of(layout: Layout, site: Site) -> str:
    """The walltime as HH:MM:SS.

    Raises:
        RequestError: there is none.
    """
    if layout.walltime_s is None:
        raise RequestError(f"no walltime was given and {site.title} has no default. Use --walltime HH:MM:SS.")
    return format_walltime(layout.walltime_s)


def refuse_unused(site: Site, given: Sequence[tuple[str, str]]) -> None:
    """Refuses options that this scheduler cannot use.

    Raises:
        RequestError: one of them has a value.
    """
    for option, value in given:
        if value:
            raise RequestError(
                f"{option} {value} was given, but profile {site.name} has no scheduler that could use it. "
                f"Remove {option}."
            )


def resource_values(job: Job, site: Site, layout: Layout, of_site: Sequence[str]) -> list[str]:
    """The values of qsub's `-l` with this job's numbers: those of the queue, else of the site."""
    cpus = job.cpus_per_node or site.node.threads or site.node.cores or layout.ranks_per_node
    numbers = {
        "nodes": job.num_nodes,
        "ranks": layout.ranks_per_node,
        "devices": layout.devices,
        "cpus": cpus,
        "all_ranks": job.num_nodes * layout.ranks_per_node,
        "all_devices": job.num_nodes * layout.devices,
        "all_cpus": job.num_nodes * cpus,
    }
    of_queue = next((queue.resources for queue in queue_entries(site, layout.queue)), ())
    resources = of_queue or of_site or (_CHUNK + (":ngpus={devices}" if layout.devices else ""),)
    return [directive_value("resource", text.format_map(numbers)) for text in resources]


def cpus_per_task(layout: Layout) -> int:
    """CPUs of one Slurm task: one rank's, or one node's if the task is torchrun's agent."""
    per_rank = layout.cpus_per_rank or 1
    return per_rank * layout.ranks_per_node if layout.launcher == "torchrun" else per_rank


def whole_number(text: str | None) -> int | None:
    """The whole number that `text` is, or None."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
