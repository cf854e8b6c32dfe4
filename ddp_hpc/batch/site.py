"""The facts of one site, read from `profiles/NAME.toml`. Code says site where the user says profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ddp_hpc.assets import asset_folder, user_folder
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.toml_config import read_toml
from ddp_hpc.units import parse_walltime_s

T = TypeVar("T")

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Lustre wants a multiple of 64 KiB below 4 GiB.
_STRIPE_SIZE = re.compile(r"[1-9][0-9]{0,2}M")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# An option as it is typed in a directive, which bash never reads: no quotes, no dollar, no comment.
_OPTION = re.compile(r"-[A-Za-z0-9_.:@+,=&|/()*~ -]+")
_PLACE = re.compile(r"\{([^{}]*)\}")

# What `Pbs.resources` and `Queue.resources` may ask to be filled in.
PLACES = ("nodes", "ranks", "devices", "cpus", "all_ranks", "all_devices", "all_cpus")


def _check_places(text: str) -> None:
    for name in _PLACE.findall(text):
        if name not in PLACES:
            raise RequestError(
                f"{{{name}}} is not known{nearest(name, PLACES)}; use one of {', '.join(PLACES)}"
            )


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
        if self.read and not _DATE.fullmatch(self.read):
            raise RequestError(f"read is {self.read!r}; a date such as 2026-11-21 is needed")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Account:
    """How the project that pays is named: PBS's option for it, and what its name begins or ends with."""

    required: bool = False
    option: str = "-A"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        known = ("-A", "-P", "-W group_list=", "")
        if self.option not in known:
            raise RequestError(f"option is {self.option!r}; one of {', '.join(map(repr, known))} is needed")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Node:
    """One compute node; 0 where it is not known or differs from node to node.

    `cores` and `threads` count those that jobs may use; `devices` counts what a rank
    drives, so a GPU of two dies counts twice; memory is that of one device.
    """

    cores: int = 0
    threads: int = 0
    devices: int = 0
    device: str = ""
    device_memory_gib: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Queue:
    """What one queue took when the profile was checked; 0 and "" where that is not known.

    A queue whose walltime depends on the node count has an entry for each range. One
    with `submit = false` is filled by the scheduler and cannot be asked for. `resources`
    stands in the place of PBS's where this queue counts in other units.
    """

    name: str
    min_nodes: int = 1
    max_nodes: int = 0
    max_devices: int = 0
    max_walltime: str = ""
    submit: bool = True
    qos: str = ""
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_walltime:
            parse_walltime_s(self.max_walltime)
        for text in self.resources:
            _check_places(text)


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
        _check_options(self.options)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Slurm:
    """What a Slurm site wants to be told.

    `queue_option` is what --queue turns into: partition, qos, or nothing where the
    scheduler chooses. `gpu_option` is how GPUs are asked for: gpus-per-node, gres (with
    `gpu_type` where the site wants one), or nothing where nodes are whole. `options`
    are directives, `srun_options` words of srun, both as they are typed; `forbidden`
    are options that the site refuses.
    """

    queue_option: str = "partition"
    gpu_option: str = "gpus-per-node"
    gpu_type: str = ""
    constraint: str = ""
    options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, known in (
            ("queue_option", self.queue_option, ("partition", "qos", "")),
            ("gpu_option", self.gpu_option, ("gpus-per-node", "gres", "")),
        ):
            if value not in known:
                raise RequestError(f"{name} is {value!r}; one of {', '.join(map(repr, known))} is needed")
        _check_options((*self.options, *self.srun_options))


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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Site:
    """One profile. `checked` is the date on which the facts were last compared with `sources`.

    `file` is the path that the user gave instead of a name. `why` holds one line of
    reason for a variable, or for `cpu_bind`; the script carries it as a comment.

    Raises:
        RequestError: on construction, for facts that contradict each other.
    """

    title: str
    scheduler: str
    owner: str
    checked: str
    launch: Launch
    name: str = ""
    file: str = ""
    extends: str = ""
    confidence: str = ""
    arch: str = ""
    sources: tuple[Source, ...] = ()
    shell: str = "/bin/bash"
    default_queue: str = ""
    default_walltime: str = ""
    account: Account = field(default_factory=Account)
    kill_delay_s: int = 0
    detect: Detect = field(default_factory=Detect)
    node: Node = field(default_factory=Node)
    queues: tuple[Queue, ...] = ()
    pbs: Pbs = field(default_factory=Pbs)
    slurm: Slurm = field(default_factory=Slurm)
    env: Env = field(default_factory=Env)
    fallbacks: tuple[Fallback, ...] = ()
    fabric: Fabric = field(default_factory=Fabric)
    lustre: Lustre = field(default_factory=Lustre)
    proxy: Proxy | None = None
    software: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _DATE.fullmatch(self.checked):
            raise RequestError(f"checked is {self.checked!r}; a date such as 2026-11-21 is needed")
        if self.default_walltime:
            parse_walltime_s(self.default_walltime)
        if self.launch.cpu_bind and len(self.launch.cpu_bind) != self.node.devices:
            raise RequestError(
                f"launch.cpu_bind names {len(self.launch.cpu_bind)} sets of cores for "
                f"{self.node.devices} devices; one set for each is needed"
            )
        if self.confidence not in ("", "high", "medium", "low"):
            raise RequestError(f'confidence is {self.confidence!r}; "high", "medium" or "low" is needed')
        for line in (*self.software, *self.notes, *self.why.values()):
            if "\n" in line or "\r" in line:
                raise RequestError(f"{line!r} holds a line break; one line is needed")
        for name in (*self.env.unset, *(name for fallback in self.fallbacks for name in fallback.without)):
            if not _VARIABLE.fullmatch(name):
                raise RequestError(f"{name!r} is not the name of a variable")


def profile_files() -> dict[str, Path]:
    """Every profile's file by name, sorted; the user's own folder wins over the shipped one."""
    found: dict[str, Path] = {}
    for folder in (asset_folder("profiles"), user_folder("profiles")):
        if folder.is_dir():
            found.update((path.stem, path) for path in folder.glob("*.toml") if _NAME.fullmatch(path.stem))
    return dict(sorted(found.items()))


def profile_file(name: str) -> Path:
    """The file of that profile.

    Raises:
        RequestError: where there is none; the message suggests the nearest name.
    """
    files = profile_files()
    if name not in files:
        raise RequestError(
            f"profile {name!r} is not known{nearest(name, list(files))}; use one of {', '.join(files)}"
        )
    return files[name]


def load_site(name: str) -> Site:
    """The site that the user calls profile `name`: a name, or a file when it ends in `.toml`.

    Raises:
        RequestError: an unknown name, or a file that does not fit `Site`.
    """
    if name.endswith(".toml"):
        return replace(read_site(Path(name)), file=name)
    return read_site(profile_file(name))


def read_site(path: Path) -> Site:
    """The site of that file, on top of the profile that it `extends`.

    Tables are merged key by key, lists are replaced.

    Raises:
        RequestError: as `load_site`, and a profile that extends itself by way of others.
    """
    if not _NAME.fullmatch(path.stem):
        raise RequestError(f"{path}: a profile's name has letters, digits, _ and - only; rename the file")
    return replace(read_toml(path, Site, base=profile_file), name=path.stem)


def with_fallback(site: Site, name: str) -> Site:
    """`site` with the variables of that fallback; the site itself where no name is given.

    Raises:
        RequestError: the profile has no such fallback.
    """
    if not name:
        return site
    found = [fallback for fallback in site.fallbacks if fallback.name == name]
    if not found:
        known = [fallback.name for fallback in site.fallbacks]
        raise RequestError(
            f"fallback {name!r} is not known{nearest(name, known)}; profile {site.name} has "
            f"{', '.join(known) or 'none'}"
        )

    gone = {*found[0].without, *found[0].env}

    def left(table: dict[str, T]) -> dict[str, T]:
        return {key: value for key, value in table.items() if key not in gone}

    env = replace(
        site.env,
        always={**left(site.env.always), **found[0].env},
        single_node=left(site.env.single_node),
        multi_node=left(site.env.multi_node),
        multi_node_prepend=left(site.env.multi_node_prepend),
    )
    return replace(site, env=env)
