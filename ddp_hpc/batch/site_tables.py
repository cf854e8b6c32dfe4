"""The tables of a profile: what one site says of its queues, nodes, scheduler, launcher and network."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.units import parse_walltime_s

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Lustre wants a multiple of 64 KiB below 4 GiB.
_STRIPE_SIZE = re.compile(r"[1-9][0-9]{0,2}M")
# An option as it is typed in a directive, which bash never reads: no quotes, no dollar, no comment.
_OPTION = re.compile(r"-[A-Za-z0-9_.:@+,=&|/()*~ -]+")
# A value that ends up in one.
_WORD = re.compile(r"[A-Za-z0-9_.:@+,=&|/()\[\]*-]*")
_PLACE = re.compile(r"\{([^{}]*)\}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# bash(1), "Shell Variables": the first it refuses to set, which would end the script at its first lines; the
# others it sets itself, whatever they are given.
BASHS_OWN = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}) | {
    *("BASHPID", "BASH_COMMAND", "BASH_SUBSHELL", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "FUNCNAME"),
    *("GROUPS", "HISTCMD", "LINENO", "RANDOM", "SECONDS", "SRANDOM"),
}
# A folder as a script exports it: absolute, or below a variable that the site sets on each node.
_LOCAL_FOLDER = re.compile(r"(?:/|\$[A-Z][A-Z0-9_]*(?=/|$))[A-Za-z0-9_./-]*")

# What `Pbs.resources`, `Age.resources` and `Queue.resources` may ask to be filled in.
PLACES = ("nodes", "ranks", "devices", "cpus", "all_ranks", "all_devices", "all_cpus")


def _check_places(text: str) -> None:
    for name in _PLACE.findall(text):
        if name not in PLACES:
            raise RequestError(
                f"{{{name}}} is not known{nearest(name, PLACES)}; use one of {', '.join(PLACES)}"
            )
    if re.search("[{}]", _PLACE.sub("", text)):
        raise RequestError(f"{text!r} has a brace without its other one; a place is written {{nodes}}")


def _check_numbers(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise RequestError(f"{name} is {value}; 0, or a number above it, is needed")


def _check_words(**values: str) -> None:
    for name, value in values.items():
        if not _WORD.fullmatch(value):
            raise RequestError(f"{name} is {value!r}, which no directive can carry; mend it")


def _check_options(options: tuple[str, ...]) -> None:
    for option in options:
        if not _OPTION.fullmatch(option):
            raise RequestError(f"option {option!r} is none that a directive can carry; mend it")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Detect:
    """What a machine says of itself where it is this site: shell globs, of which one match is enough."""

    host_patterns: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Source:
    """Where facts were read, and when; `of` names the keys of the profile that rest on it."""

    where: str
    read: str = ""
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.read and not DATE.fullmatch(self.read):
            raise RequestError(f"read is {self.read!r}; a date such as 2026-11-21 is needed")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Account:
    """How the project that pays is named: qsub's option for it, and what its name begins or ends with."""

    required: bool = False
    option: str = "-A"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        known = ("-A", "-P", "-W group_list=", "-g", "")
        if self.option not in known:
            raise RequestError(f"option is {self.option!r}; one of {', '.join(map(repr, known))} is needed")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Node:
    """One compute node; 0 where it is not known or differs from node to node.

    `cores` and `threads` count those that jobs may use; `devices` counts what a rank
    drives, so a GPU of two dies counts twice; memory is that of one device. `cpu_only`
    says that there are none, where 0 devices alone would mean not known.
    `local_folder` is on a disk, or in the memory, of the node itself.
    """

    cores: int = 0
    threads: int = 0
    devices: int = 0
    device: str = ""
    device_memory_gib: int = 0
    cpu_only: bool = False
    local_folder: str = "/tmp"  # noqa: S108 - what every node has; scripts add the user to it

    def __post_init__(self) -> None:
        _check_numbers(
            cores=self.cores,
            threads=self.threads,
            devices=self.devices,
            device_memory_gib=self.device_memory_gib,
        )
        if self.threads and self.threads < self.cores:
            raise RequestError(f"threads is {self.threads} below {self.cores} cores; a core has at least one")
        if self.cpu_only and self.devices:
            raise RequestError(f"cpu_only stands beside {self.devices} devices; keep the one that is right")
        if not _LOCAL_FOLDER.fullmatch(self.local_folder):
            raise RequestError(
                f"local_folder is {self.local_folder!r}; an absolute path, or $NAME and what is below it, "
                "is needed"
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Queue:
    """What one queue took when the profile was checked; 0 and "" where that is not known.

    A queue whose walltime depends on the node count has an entry for each range, and one
    whose limits depend on a QOS asked for beside it one for each `qos`. One with
    `submit = false` is filled by the scheduler and cannot be asked for. `max_devices`
    counts those of the whole job. `resources` stands in the place of PBS's, or Grid
    Engine's, where this queue counts in other units.
    """

    name: str
    min_nodes: int = 1
    max_nodes: int = 0
    max_devices: int = 0
    min_walltime: str = ""
    max_walltime: str = ""
    submit: bool = True
    qos: str = ""
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(min_nodes=self.min_nodes, max_nodes=self.max_nodes, max_devices=self.max_devices)
        least_s, most_s = (
            parse_walltime_s(text) if text else 0 for text in (self.min_walltime, self.max_walltime)
        )
        if most_s and least_s > most_s:
            raise RequestError(f"min_walltime {self.min_walltime} is above max_walltime {self.max_walltime}")
        for text in self.resources:
            _check_places(text)
        _check_words(name=self.name, qos=self.qos)

    def takes_nodes(self, num_nodes: int) -> bool:
        """Whether a job of so many nodes is within its limits."""
        return self.min_nodes <= num_nodes and (not self.max_nodes or num_nodes <= self.max_nodes)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pbs:
    """What a PBS site wants to be told.

    `resources` are values of -l with numbers of the job to fill in: {nodes}, {ranks},
    {devices} and {cpus} of a node, {all_ranks}, {all_devices} and {all_cpus} of the job.
    Empty, they are a chunk a node of cores, ranks and GPUs. `options` are directives as
    they are typed. Without `submit_from_nodes` a script never calls qsub from its job.
    """

    resources: tuple[str, ...] = ()
    filesystems: str = ""
    filesystems_resource: str = "filesystems"
    options: tuple[str, ...] = ()
    submit_from_nodes: bool = True

    def __post_init__(self) -> None:
        for text in self.resources:
            _check_places(text)
        _check_words(filesystems=self.filesystems, filesystems_resource=self.filesystems_resource)
        _check_options(self.options)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Slurm:
    """What a Slurm site wants to be told.

    `queue_option` is what --queue turns into: partition, qos, or nothing where the
    scheduler chooses. `gpu_option` is how GPUs are asked for: gpus-per-node, gres (with
    `gpu_type` where the site wants one), or nothing where nodes are whole. `options`
    are directives, `srun_options` words of srun where it starts the ranks, and
    `agent_options`, with {devices} of a node, where it starts one agent of torchrun on
    each node; all as they are typed. `forbidden` are options that the site refuses.
    """

    queue_option: str = "partition"
    gpu_option: str = "gpus-per-node"
    gpu_type: str = ""
    constraint: str = ""
    options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    agent_options: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, known in (
            ("queue_option", self.queue_option, ("partition", "qos", "")),
            ("gpu_option", self.gpu_option, ("gpus-per-node", "gres", "")),
        ):
            if value not in known:
                raise RequestError(f"{name} is {value!r}; one of {', '.join(map(repr, known))} is needed")
        _check_words(gpu_type=self.gpu_type, constraint=self.constraint)
        _check_options((*self.options, *self.srun_options))
        _check_options(tuple(text.replace("{devices}", "1") for text in self.agent_options))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Flux:
    """What a Flux site wants to be told: `options` are directives as they are typed."""

    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_options(self.options)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Age:
    """What a site with Altair (or Univa) Grid Engine wants to be told.

    `resources` are values of -l with numbers of the job to fill in, as PBS's; `options`
    are directives as they are typed.
    """

    resources: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in self.resources:
            _check_places(text)
        _check_options(self.options)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Launch:
    """How ranks are started.

    `dialect` is what mpiexec understands, `auto` lets the script ask it.
    `cpu_bind` lists the cores for local rank 0, 1, ... in PALS's spelling.
    `own_mpiexec` says that the mpiexec of an active Python environment is right.
    `options` are words for mpiexec; `wrap` are words between the launcher and the
    program, such as a container's. With `one_device_a_rank` the scheduler shows each
    rank a single device.
    """

    default: str
    dialect: str = "auto"
    cpu_bind: tuple[str, ...] = ()
    own_mpiexec: bool = False
    options: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()
    one_device_a_rank: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Env:
    """Variables for the ranks: always, on one node, beyond one node, and folders to put in front of a path.

    `unset` are variables that the site's software sets and training is better without.
    """

    always: dict[str, str] = field(default_factory=dict)
    single_node: dict[str, str] = field(default_factory=dict)
    multi_node: dict[str, str] = field(default_factory=dict)
    multi_node_prepend: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fallback:
    """Settings to try where ranks hang: variables of `env` that are left out, and others."""

    name: str
    why: str
    without: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fabric:
    """The fast network: a suffix that makes a host name its fast one, or the name of the interface."""

    suffix: str = ""
    interface: str = ""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lustre:
    """How a large data file is laid out where the data lies on Lustre: `lfs setstripe -c` and `-S`.

    A count of 0 leaves the layout to the file system, -1 takes all its targets; no
    size leaves that to the file system.
    """

    stripe_count: int = 0
    stripe_size: str = ""

    def __post_init__(self) -> None:
        if not -1 <= self.stripe_count <= 2000:  # LOV_MAX_STRIPE_COUNT
            raise RequestError(f"stripe_count is {self.stripe_count}; -1, 0, or 1 to 2000 is needed")
        if self.stripe_size and not (self.stripe_count and _STRIPE_SIZE.fullmatch(self.stripe_size)):
            raise RequestError(
                f"stripe_size is {self.stripe_size!r} with a stripe_count of {self.stripe_count}; "
                'megabytes such as "4M" beside a count other than 0 are needed'
            )

    @property
    def hint(self) -> str:
        """`8,4M` or `8` for the generator of data; empty where the file system decides."""
        return ",".join(filter(None, (str(self.stripe_count or ""), self.stripe_size)))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Proxy:
    """The way out of a compute node, and the names that must not take it."""

    url: str
    no_proxy: str = ""
    all: str = ""
