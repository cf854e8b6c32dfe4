"""The tables of a site profile: queues, nodes, scheduler, launcher, environment and network."""

from __future__ import annotations

import re
from dataclasses import field
from string import ascii_letters, digits

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.record import record
from ddp_hpc.base.units import parse_walltime_s

DATE = r"\d{4}-\d{2}-\d{2}"
# The characters of options and values in directives. The scheduler does not evaluate them like bash, so
# quotes, dollar signs and comments are not allowed. Sets are quicker than patterns, which must be compiled.
_OF_BOTH = frozenset(ascii_letters + digits + "_.:@+,=&|/()*-")
_OF_OPTION, _OF_WORD = _OF_BOTH | frozenset("~ "), _OF_BOTH | frozenset("[]")
_CORES = r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*"
_VERSION = r"\d{1,4}\.\d{1,3}(?:\.\d{1,3}){0,2}"
_PLACE = r"\{([^{}]*)\}"
# bash(1), "Shell Variables". Those in the first set are read-only, and setting them would end the script.
# bash overwrites the values of the others.
BASHS_OWN = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}) | {
    *("BASHPID", "BASH_COMMAND", "BASH_SUBSHELL", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "FUNCNAME"),
    *("GROUPS", "HISTCMD", "LINENO", "RANDOM", "SECONDS", "SRANDOM"),
}
# A directory in a script: an absolute path, or a path that begins with a variable of the site.
DEFAULT_LOCAL_FOLDER = "/tmp"  # noqa: S108 - exists on every node; subdirectories contain the user ID
_LOCAL_FOLDER = r"(?:/|\$[A-Z][A-Z0-9_]*(?=/|$))[A-Za-z0-9_./-]*"

# Placeholders in `Pbs.resources` and `Queue.resources`.
PLACES = (
    *("nodes", "ranks", "devices", "cpus", "memory_mib"),
    *("all_ranks", "all_devices", "all_cpus", "all_memory_mib"),
)


def check_variable(name: str) -> None:
    """Checks that a script can set the environment variable `name`.

    Raises:
        RequestError: the name is not that of a variable, or bash sets the variable itself.
    """
    if not (name.isascii() and name.isidentifier()):
        raise RequestError(f"invalid variable name {name!r}. It may contain only letters, digits and _.")
    if name in BASHS_OWN:
        raise RequestError(f"{name} is a bash variable that scripts cannot set. Remove it.")


def _check_places(resources: tuple[str, ...]) -> None:
    for text in resources:
        for name in re.findall(_PLACE, text):
            if name not in PLACES:
                known = ", ".join(PLACES)
                raise RequestError(
                    f"unknown placeholder {{{name}}}{nearest(name, PLACES)}; choose one of {known}"
                )
        if re.search("[{}]", re.sub(_PLACE, "", text)):
            raise RequestError(f"{text!r} has an unmatched brace. Write placeholders as {{nodes}}.")


def _check_numbers(table: object) -> None:
    for name, value in vars(table).items():
        if isinstance(value, int) and value < 0:
            raise RequestError(f"{name} must not be negative (got {value})")


def _check_words(**values: str) -> None:
    for name, value in values.items():
        if not _OF_WORD.issuperset(value):
            raise RequestError(
                f"{name} is {value!r}, which is not allowed in a directive. Remove blanks, quotes and $."
            )


def _check_version(version: str) -> None:
    if version and not re.fullmatch(_VERSION, version):
        raise RequestError(f"version must be a number such as 23.02 or 2022.1.3 (got {version!r})")


def _check_options(options: tuple[str, ...]) -> None:
    for option in options:
        if not (option.startswith("-") and option != "-" and _OF_OPTION.issuperset(option)):
            raise RequestError(
                f"option {option!r} is not allowed in a directive. Begin it with -, without quotes or $."
            )


@record
class Detect:
    """Shell patterns by which a machine of this site is detected. One match is enough.

    If no profile matches, the first one whose `command` is on the PATH is used, unless its `unless_command`
    is on the PATH too.
    """

    host_patterns: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    unless_command: str = ""


@record
class Source:
    """A source of facts. `of` lists the keys whose facts come from it, such as `slurm` for a whole table or
    `slurm.constraint` for one value. `read` is the date on which it was read, if it is not `Site.checked`.
    """

    where: str
    read: str = ""
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.read and not re.fullmatch(DATE, self.read):
            raise RequestError(f"read must be a date such as 2026-11-21 (got {self.read!r})")


@record
class Account:
    """The account to charge: the submit command's option, and the prefix and suffix of account names."""

    required: bool = False
    option: str = "-A"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        known = ("-A", "-P", "-W group_list=", "")
        if self.option not in known:
            raise RequestError(f"option must be one of {', '.join(map(repr, known))} (got {self.option!r})")


@record
class Node:
    """A compute node. Numbers are 0 if they are unknown or differ between nodes.

    `cores` and `threads` are the numbers of cores and hardware threads that jobs may use. One rank uses one
    of the `devices`, so a GPU with two dies counts twice; `device_memory_gib` is per device. `cpu_only` means
    that the node has no device, since `devices = 0` means an unknown number. If jobs request
    single devices, `devices` is 0, and a job gets `cores_per_device` cores with `threads_per_device` hardware
    threads and `memory_mib_per_device` MiB of main memory with each device. The memory also counts for jobs
    in queues that are `shared`. `local_folder` is a directory on a local
    disk or in the memory of the node.
    """

    cores: int = 0
    threads: int = 0
    devices: int = 0
    device: str = ""
    device_memory_gib: int = 0
    cores_per_device: int = 0
    threads_per_device: int = 0
    memory_mib_per_device: int = 0
    cpu_only: bool = False
    local_folder: str = DEFAULT_LOCAL_FOLDER

    @property
    def local_folder_parts(self) -> tuple[str, str]:
        """The variable with which `local_folder` begins, or an empty string, and the rest of the path."""
        variable, slash, below = self.local_folder.removeprefix("$").partition("/")
        return variable, f"{slash}{below}".rstrip("/")

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.threads and self.threads < self.cores:
            raise RequestError(f"threads ({self.threads}) must not be less than cores ({self.cores})")
        if self.cpu_only and self.devices:
            raise RequestError(f"cpu_only contradicts {self.devices} devices. Remove one of them.")
        if not re.fullmatch(_LOCAL_FOLDER, self.local_folder):
            raise RequestError(
                "local_folder must be an absolute path or start with a variable $NAME (got "
                f"{self.local_folder!r})"
            )


@record
class Queue:
    """Limits of a queue when the profile was checked; 0 and "" if they are unknown.

    Without --queue, a job gets `default_queue` if it is within its limits, otherwise the first entry of the
    profile that takes it, so the entries are sorted by preference: first the cheapest and the one that starts
    jobs the soonest. Entries with `automatic = false` are never chosen, for example because their jobs can be
    stopped at any time. Entries with `cpu_only` take only jobs without GPUs. In entries with `shared`, a job
    can request a part of a node, even if the profile says how many `devices` a node has.

    An entry without a `name` has the limits of jobs that name no queue. A queue whose walltime depends on the
    number of nodes has one entry per range, and a queue whose limits depend on the QOS has one entry per
    `qos`. Jobs cannot be submitted to a queue with `submit = false`. `max_devices` is the maximum number of
    devices per job. `resources` replaces the `resources` of the scheduler's table.
    """

    name: str = ""
    min_nodes: int = 1
    max_nodes: int = 0
    max_devices: int = 0
    min_walltime: str = ""
    max_walltime: str = ""
    submit: bool = True
    automatic: bool = True
    cpu_only: bool = False
    shared: bool = False
    qos: str = ""
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self)
        least_s, most_s = (
            parse_walltime_s(text) if text else 0 for text in (self.min_walltime, self.max_walltime)
        )
        if most_s and least_s > most_s:
            raise RequestError(
                f"min_walltime {self.min_walltime} is greater than max_walltime {self.max_walltime}"
            )
        _check_places(self.resources)
        _check_words(name=self.name, qos=self.qos)

    def takes_nodes(self, num_nodes: int) -> bool:
        """Returns whether the number of nodes is within the limits of the queue."""
        return self.min_nodes <= num_nodes and (not self.max_nodes or num_nodes <= self.max_nodes)


@record
class Pbs:
    """Options of a PBS site.

    `resources` are values of -l with placeholders: {nodes}; {ranks}, {devices}, {cpus} and {memory_mib} per
    node; {all_ranks}, {all_devices}, {all_cpus} and {all_memory_mib} of the whole job. The default is one
    chunk per node with cores, ranks, GPUs and memory. `options` become directives without changes. With
    `submit_from_nodes = false`, job scripts do not call qsub. With `tolerate_node_failures`, a job may run on
    after it has lost a node (qsub -W tolerate_node_failures=all), which --spare-nodes and --min-nodes need.
    `version` is the version of PBS, such as 2022.1.3.
    """

    resources: tuple[str, ...] = ()
    filesystems: str = ""
    filesystems_resource: str = "filesystems"
    options: tuple[str, ...] = ()
    submit_from_nodes: bool = True
    tolerate_node_failures: bool = False
    version: str = ""

    def __post_init__(self) -> None:
        _check_places(self.resources)
        _check_words(filesystems=self.filesystems, filesystems_resource=self.filesystems_resource)
        _check_version(self.version)
        _check_options(self.options)


@record
class Slurm:
    """Options of a Slurm site.

    `queue_option` is the option of sbatch for --queue: partition, qos, or empty if the scheduler chooses.
    `gpu_option` is the option of sbatch for GPUs: gpus-per-node or gres (with `gpu_type` if the site requires
    it), or empty if nodes are exclusive. `options` become directives without changes.
    `srun_options` are options of srun for starting ranks. `agent_options` are options of srun for starting
    one torchrun agent per node, with the placeholder {devices}. `forbidden` are options that the site
    rejects. `version` is the version of Slurm, such as 23.02 or 23.02.7; `ddp-hpc lint` uses it.
    """

    queue_option: str = "partition"
    gpu_option: str = "gpus-per-node"
    gpu_type: str = ""
    constraint: str = ""
    options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    agent_options: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    version: str = ""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("queue_option", self.queue_option, ("partition", "qos", "")),
            ("gpu_option", self.gpu_option, ("gpus-per-node", "gres", "")),
        ):
            if value not in known:
                raise RequestError(f"{name} must be one of {', '.join(map(repr, known))} (got {value!r})")
        _check_words(gpu_type=self.gpu_type, constraint=self.constraint)
        _check_version(self.version)
        _check_options((*self.options, *self.srun_options))
        _check_options(tuple(text.replace("{devices}", "1") for text in self.agent_options))


@record
class Launch:
    """Options for starting ranks.

    `dialect` is the kind of mpiexec; with `auto`, the script detects it. `cpu_bind` lists the cores of local
    rank 0, 1, ... in the format of PALS. With `own_mpiexec`, the mpiexec of an active Python environment is
    used. `options` are options of mpiexec. `wrap` is a command between the launcher and the program, such as
    `apptainer exec IMAGE`.
    """

    default: str
    dialect: str = "auto"
    cpu_bind: tuple[str, ...] = ()
    own_mpiexec: bool = False
    options: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for cores in self.cpu_bind:
            if not re.fullmatch(_CORES, cores):
                raise RequestError(f"cpu_bind must have sets of cores such as 0-7 or 0-3,8 (got {cores!r})")


@record
class Container:
    """How the site starts a container (--container).

    `command` is the command between the launcher and the program, such as `apptainer exec {image}`, or
    options of srun, such as `--container-image={image}`. Its placeholder {directory} is the submission
    directory. `software` are lines of bash that make the command available. `without` are variables of `Env`
    that are not set with a container.
    """

    command: tuple[str, ...] = ()
    software: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.command and sum(word.count("{image}") for word in self.command) != 1:
            raise RequestError("command of [container] must contain the placeholder {image} once")
        options = [word.startswith("-") for word in self.command]
        if options[:1] == [True] and not all(options):
            raise RequestError(
                "command of [container] begins with an option of srun, so all of its words must be options "
                "in the form --name=value"
            )

    @property
    def is_option(self) -> bool:
        """Whether options of srun start the container, instead of a command."""
        return self.command[:1] != () and self.command[0].startswith("-")


@record
class Env:
    """Environment variables of the ranks: always, and on several nodes.

    `multi_node_prepend` has directories to prepend to variables such as LD_LIBRARY_PATH. `unset` are
    variables of the site's software that must not be set for training.
    """

    always: dict[str, str] = field(default_factory=dict)
    multi_node: dict[str, str] = field(default_factory=dict)
    multi_node_prepend: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@record
class Fallback:
    """Alternative environment variables for jobs that hang: those to omit from `Env`, and those to set."""

    name: str
    why: str
    without: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@record
class Fabric:
    """The fast network: the suffix of its host names, or the name of its network interface."""

    suffix: str = ""
    interface: str = ""


@record
class Proxy:
    """The proxy for connections from compute nodes to the internet, and the host names that bypass it."""

    url: str
    no_proxy: str = ""
