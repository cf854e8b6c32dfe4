"""The facts of one site, read from `profiles/NAME.toml`. Code says site where the user says profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.assets import asset_folder, user_folder
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.toml_config import read_toml
from ddp_hpc.units import parse_walltime_s

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Lustre wants a multiple of 64 KiB below 4 GiB.
_STRIPE_SIZE = re.compile(r"[1-9][0-9]{0,2}M")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Detect:
    """What a machine says of itself where it is this site: shell globs, of which one match is enough."""

    host_patterns: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Node:
    """One compute node; 0 where it is not known or differs from node to node."""

    cores: int = 0
    threads: int = 0
    devices: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Queue:
    """What one queue took when the profile was checked; 0 and "" where that is not known.

    A queue whose walltime depends on the node count has an entry for each range.
    """

    name: str
    min_nodes: int = 1
    max_nodes: int = 0
    max_walltime: str = ""

    def __post_init__(self) -> None:
        if self.max_walltime:
            parse_walltime_s(self.max_walltime)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pbs:
    """Resources of a PBS site. An empty `chunk` asks for cores, ranks and GPUs by number.

    Without `submit_from_nodes` a script never calls qsub from its job.
    """

    chunk: str = ""
    place: str = ""
    filesystems: str = ""
    keep: str = ""
    submit_from_nodes: bool = True


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Slurm:
    """Resources of a Slurm site; `queue_flag` is what --queue turns into: partition or qos."""

    queue_flag: str = "partition"
    constraint: str = ""
    gpu_bind: str = ""
    cpu_bind: str = ""

    def __post_init__(self) -> None:
        if self.queue_flag not in ("partition", "qos"):
            raise RequestError(f'queue_flag is {self.queue_flag!r}; "partition" or "qos" is needed')


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Launch:
    """How ranks are started.

    `dialect` is what mpiexec understands, `auto` lets the script ask it.
    `cpu_bind` lists the cores for local rank 0, 1, ... in PALS's spelling.
    `own_mpiexec` says that the mpiexec of an active Python environment is right.
    """

    default: str
    dialect: str = "auto"
    cpu_bind: tuple[str, ...] = ()
    own_mpiexec: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Env:
    """Variables for the ranks: always, beyond one node, and folders to put in front of a path there."""

    always: dict[str, str] = field(default_factory=dict)
    multi_node: dict[str, str] = field(default_factory=dict)
    multi_node_prepend: dict[str, tuple[str, ...]] = field(default_factory=dict)


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
    no_proxy: str


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Site:
    """One profile. `checked` is the date on which the facts were last compared with `sources`.

    `why` holds one line of reason for a variable, or for `cpu_bind`; the
    script carries it as a comment.

    Raises:
        RequestError: on construction, for facts that contradict each other.
    """

    title: str
    scheduler: str
    owner: str
    checked: str
    launch: Launch
    name: str = ""
    sources: tuple[str, ...] = ()
    shell: str = "/bin/bash"
    default_queue: str = ""
    default_walltime: str = ""
    account_required: bool = False
    kill_delay_s: int = 0
    detect: Detect = field(default_factory=Detect)
    node: Node = field(default_factory=Node)
    queues: tuple[Queue, ...] = ()
    pbs: Pbs = field(default_factory=Pbs)
    slurm: Slurm = field(default_factory=Slurm)
    env: Env = field(default_factory=Env)
    fabric: Fabric = field(default_factory=Fabric)
    lustre: Lustre = field(default_factory=Lustre)
    proxy: Proxy | None = None
    software: tuple[str, ...] = ()
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
        for line in (*self.software, *self.why.values()):
            if "\n" in line or "\r" in line:
                raise RequestError(f"{line!r} holds a line break; one line is needed")


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
    """The site that the user calls profile `name`.

    Raises:
        RequestError: an unknown name, or a file that does not fit `Site`.
    """
    return replace(read_toml(profile_file(name), Site), name=name)
