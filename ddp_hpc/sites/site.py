"""Site profiles, read from `profiles/NAME.toml`. In the code, a profile is called a site."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import field, replace
from pathlib import Path
from typing import TypeVar

from ddp_hpc.base.assets import asset_directory, user_directory
from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.record import record
from ddp_hpc.base.toml_config import read_toml
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.sites.profile_tables import (
    DATE,
    Account,
    Container,
    Detect,
    Env,
    Fabric,
    Fallback,
    Launch,
    Node,
    Pbs,
    Proxy,
    Queue,
    Slurm,
    Source,
    check_variable,
)

T = TypeVar("T")

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_SHELL = r"/[A-Za-z0-9_./+-]+( -[A-Za-z]+)*"
_TEMPLATE = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}"


@record
class Site:
    """One site profile. `checked` is the date on which its facts were last compared with `sources`.

    `file` is the path that the user gave instead of a name. `template` replaces the template of the
    scheduler; it is a file in the directory of the profile or in the user's template directory. `why` has
    one-line reasons for variables and for `cpu_bind`, which become comments in the job script.

    Raises:
        RequestError: on construction, for contradictory facts.
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
    env: Env = field(default_factory=Env)
    fallbacks: tuple[Fallback, ...] = ()
    fabric: Fabric = field(default_factory=Fabric)
    proxy: Proxy | None = None
    software: tuple[str, ...] = ()
    container: Container = field(default_factory=Container)
    notes: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(DATE, self.checked):
            raise RequestError(f"checked must be a date such as 2026-11-21 (got {self.checked!r})")
        if self.default_walltime:
            parse_walltime_s(self.default_walltime)
        if self.launch.cpu_bind and len(self.launch.cpu_bind) != self.node.devices:
            raise RequestError(
                f"launch.cpu_bind has {len(self.launch.cpu_bind)} sets of cores for {self.node.devices} "
                "devices, but must have exactly one set for each device"
            )
        if self.confidence not in ("", "high", "medium", "low"):
            raise RequestError(f'confidence must be "high", "medium" or "low" (got {self.confidence!r})')
        for line in (*self.software, *self.container.software, *self.notes, *self.why.values()):
            if "\n" in line or "\r" in line:
                raise RequestError(f"{line!r} contains a line break. Use a single line.")
        env = self.env
        names = [*env.always, *env.multi_node, *env.multi_node_prepend, *env.unset]
        names += [name for fallback in self.fallbacks for name in (*fallback.without, *fallback.env)]
        for name in names:
            check_variable(name)
        if not re.fullmatch(_SHELL, self.shell):
            raise RequestError(
                f"shell must be a path such as /bin/bash, with options if needed (got {self.shell!r})"
            )
        if self.kill_delay_s < 0:
            raise RequestError(f"kill_delay_s must not be negative (got {self.kill_delay_s})")


def profile_files() -> dict[str, Path]:
    """Returns the files of all profiles by name, sorted. User profiles override shipped ones."""
    files: dict[str, Path] = {}
    for directory in (asset_directory("profiles"), user_directory("profiles")):
        if directory.is_dir():
            files.update(
                (path.stem, path) for path in directory.glob("*.toml") if re.fullmatch(_NAME, path.stem)
            )
    return dict(sorted(files.items()))


def profile_file(name: str) -> Path:
    """Returns the file of a profile.

    Raises:
        RequestError: there is no such profile; the message suggests a similar name.
    """
    for directory in (user_directory("profiles"), asset_directory("profiles")):
        if "/" not in name and (path := directory / f"{name}.toml").is_file():
            return path
    files = profile_files()
    raise RequestError(
        f"unknown profile {name!r}{nearest(name, list(files))}; choose one of {', '.join(files)}"
    )


def load_site(name: str) -> Site:
    """Loads the profile `name`: the name of a profile, or a path that ends in `.toml`.

    Raises:
        RequestError: the name is unknown, or the file does not match `Site`.
    """
    if name.endswith(".toml"):
        return replace(read_site(Path(name)), file=name)
    return read_site(profile_file(name))


def read_site(path: Path) -> Site:
    """Reads a profile from a file, including the profile that it `extends`.

    Tables are merged key by key, lists are replaced.

    Raises:
        RequestError: the file does not match `Site`, or profiles extend each other in a circle.
    """
    if not re.fullmatch(_NAME, path.stem):
        raise RequestError(
            f"{path}: the name of a profile may contain only letters, digits, _ and -. Rename the file."
        )
    site = read_toml(path, Site, base=profile_file)
    template = str(_template_file(site.template, path)) if site.template else ""
    return replace(site, name=path.stem, template=template)


def _template_file(name: str, profile: Path) -> Path:
    places = (profile.resolve().parent, user_directory("templates"))
    for folder in places if re.fullmatch(_TEMPLATE, name) else ():
        if (folder / name).is_file():
            return folder / name
    raise RequestError(
        f"{profile}: template {name!r} was not found in {' or '.join(map(str, places))}. Put the template "
        f"into one of these directories."
    )


def queue_entries(site: Site, queue: str, qos: str = "") -> tuple[Queue, ...]:
    """Returns the entries of the profile for this queue and QOS; empty if it has none.

    If `qos` is empty and the queue has no entry without a QOS, all entries of the queue are returned.
    """
    named = [entry for entry in site.queues if entry.name == queue]
    chosen = [entry for entry in named if entry.qos == qos]
    return tuple(chosen or ([] if qos else named))


def with_fallback(site: Site, name: str) -> Site:
    """Returns `site` with the environment variables of a fallback; for an empty name, `site` itself.

    Raises:
        RequestError: the profile has no such fallback.
    """
    if not name:
        return site
    fallback = next((fallback for fallback in site.fallbacks if fallback.name == name), None)
    if fallback is None:
        known = [fallback.name for fallback in site.fallbacks]
        raise RequestError(
            f"unknown fallback {name!r}{nearest(name, known)}; profile {site.name} has "
            f"{', '.join(known) or 'none'}"
        )

    env = without_variables(site.env, (*fallback.without, *fallback.env))
    return replace(site, env=replace(env, always={**env.always, **fallback.env}))


def without_variables(env: Env, names: Collection[str]) -> Env:
    """Returns `env` without the variables `names`."""

    def left(table: dict[str, T]) -> dict[str, T]:
        return {key: value for key, value in table.items() if key not in names}

    return replace(
        env,
        always=left(env.always),
        multi_node=left(env.multi_node),
        multi_node_prepend=left(env.multi_node_prepend),
    )
