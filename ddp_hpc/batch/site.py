"""The facts of one site, read from `profiles/NAME.toml`. Code says site where the user says profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ddp_hpc.assets import asset_folder, user_folder
from ddp_hpc.batch.site_tables import (
    BASHS_OWN,
    DATE,
    VARIABLE,
    Account,
    Age,
    Detect,
    Env,
    Fabric,
    Fallback,
    Flux,
    Launch,
    Lustre,
    Node,
    Pbs,
    Proxy,
    Queue,
    Slurm,
    Source,
)
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.toml_config import read_toml
from ddp_hpc.units import parse_walltime_s

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SHELL = re.compile(r"/[A-Za-z0-9_./+-]+( -[A-Za-z]+)*")
_TEMPLATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Site:
    """One profile. `checked` is the date on which the facts were last compared with `sources`.

    `file` is the path that the user gave instead of a name. `template` is a file beside
    the profile, or in the user's own folder of templates, that takes the place of the
    scheduler's. `why` holds one line of reason for a variable, or for `cpu_bind`; the
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
    file: str = ""
    extends: str = ""
    confidence: str = ""
    arch: str = ""
    sources: tuple[Source, ...] = ()
    shell: str = "/bin/bash"
    default_queue: str = ""
    default_walltime: str = ""
    template: str = ""
    account: Account = field(default_factory=Account)
    kill_delay_s: int = 0
    detect: Detect = field(default_factory=Detect)
    node: Node = field(default_factory=Node)
    queues: tuple[Queue, ...] = ()
    pbs: Pbs = field(default_factory=Pbs)
    slurm: Slurm = field(default_factory=Slurm)
    flux: Flux = field(default_factory=Flux)
    age: Age = field(default_factory=Age)
    env: Env = field(default_factory=Env)
    fallbacks: tuple[Fallback, ...] = ()
    fabric: Fabric = field(default_factory=Fabric)
    lustre: Lustre = field(default_factory=Lustre)
    proxy: Proxy | None = None
    software: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not DATE.fullmatch(self.checked):
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
        env = self.env
        names = [*env.always, *env.single_node, *env.multi_node, *env.multi_node_prepend, *env.unset]
        names += [name for fallback in self.fallbacks for name in (*fallback.without, *fallback.env)]
        for name in names:
            if not VARIABLE.fullmatch(name):
                raise RequestError(f"{name!r} is not the name of a variable")
            if name in BASHS_OWN:
                raise RequestError(
                    f"{name} is a variable of bash's own, which no script can set; leave it out"
                )
        if not _SHELL.fullmatch(self.shell):
            raise RequestError(f"shell is {self.shell!r}; a path such as /bin/bash, and options, are needed")
        if self.kill_delay_s < 0:
            raise RequestError(f"kill_delay_s is {self.kill_delay_s}; a number of seconds is needed")


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
    site = read_toml(path, Site, base=profile_file)
    template = str(_template_file(site.template, path)) if site.template else ""
    return replace(site, name=path.stem, template=template)


def _template_file(name: str, profile: Path) -> Path:
    places = (profile.resolve().parent, user_folder("templates"))
    for folder in places if _TEMPLATE.fullmatch(name) else ():
        if (folder / name).is_file():
            return folder / name
    raise RequestError(
        f"{profile}: template {name!r} is no file in {' or '.join(map(str, places))}; put it there"
    )


def queue_entries(site: Site, queue: str, qos: str = "") -> tuple[Queue, ...]:
    """What the profile says of that queue with that QOS beside it; nothing where it does not know the pair.

    A queue of which every entry has a QOS is asked for together with the first one's.
    """
    named = [entry for entry in site.queues if entry.name == queue]
    chosen = [entry for entry in named if entry.qos == qos]
    return tuple(chosen or ([] if qos else named))


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
