"""What to run, on how many nodes, for how long: the half of a script that the user chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_hpc.batch.site_tables import BASHS_OWN, VARIABLE
from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.toml_config import read_toml
from ddp_hpc.units import parse_walltime_s

LAUNCHERS = ("mpiexec", "srun", "ibrun", "flux", "torchrun")
MPI_KINDS = ("none", "pmi2", "pmix", "cray_shasta")
DEFAULT_COMMAND = ("python", "-m", "ddp_hpc.train")
DEFAULT_MAX_ATTEMPTS = 20
MAX_NAME_CHARS = 128

# What PBS and Slurm both take as a job name; it also becomes part of file names.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Job:
    """One request, checked as far as it can be without knowing the site.

    An empty string, and None, mean "as the profile says". `max_attempts` counts the first start too;
    with `min_nodes` torchrun goes on with so few nodes when others are lost.

    Raises:
        RequestError: on construction, for a value no scheduler could take.
    """

    name: str = "ddp"
    num_nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    walltime_s: int | None = None
    queue: str = ""
    qos: str = ""
    account: str = ""
    launcher: str = ""
    mpi: str = ""
    env: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    run_dir: str = ""
    filesystems: str = ""
    fallback: str = ""
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    min_nodes: int | None = None
    template: str = ""
    command: tuple[str, ...] = DEFAULT_COMMAND

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"job name {self.name!r} was given; a letter, then letters, digits and _ . + - "
                "are needed; choose such a name"
            )
        if len(self.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"job name has {len(self.name)} characters; at most {MAX_NAME_CHARS} can be used; shorten it"
            )
        for what, count in (
            ("nodes", self.num_nodes),
            ("ranks per node", self.ranks_per_node),
            ("GPUs per node", self.gpus_per_node),
            ("CPUs per node", self.cpus_per_node),
            ("attempts at most", self.max_attempts),
            ("nodes at least", self.min_nodes),
        ):
            if count is not None and count < 1:
                raise RequestError(f"{count} {what} were asked for; at least 1 is needed")
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise RequestError(
                f"--min-nodes {self.min_nodes} was given; the job has {self.num_nodes} nodes; "
                "ask for at most that"
            )
        _one_of("launcher", self.launcher, LAUNCHERS)
        _one_of("kind of MPI", self.mpi, MPI_KINDS)
        _check_env(self.env)
        _check_setup(self.setup)
        _check_command(self.command)
        for what, path in (("run folder", self.run_dir), ("template", self.template)):
            if "\0" in path:
                raise RequestError(f"the {what} holds a NUL character; a path is needed")


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value and value not in known:
        raise RequestError(
            f"{what} {value!r} is not known{nearest(value, known)}; use one of {', '.join(known)}"
        )


def _check_env(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not VARIABLE.fullmatch(name):
            raise RequestError(f"environment name {name!r} was given; letters, digits and _ are needed")
        if name in BASHS_OWN:
            raise RequestError(
                f"environment name {name} was given; bash allows nobody to set it; leave it out"
            )
        if "\0" in value:
            raise RequestError(f"the value of {name} holds a NUL character; no environment can carry one")


def _check_setup(setup: tuple[str, ...]) -> None:
    for line in setup:
        if re.search(r"[\0\n\r]", line):
            raise RequestError(f"setup line {line!r} holds a line break; give each line its own --setup")


def _check_command(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise RequestError("the command is empty; give a program after --, such as -- python train.py")
    if command[0].startswith("-"):
        raise RequestError(
            f"the command begins with {command[0]!r}, which the launcher would take as an option of its own; "
            "give the program first, such as -- python -m ddp_hpc.train --epochs 3"
        )
    for word in command:
        if word == ":":
            raise RequestError(
                'the command holds the word ":", which mpiexec and srun take as the start of a second '
                "program; put it into a script"
            )
        if "\0" in word:
            raise RequestError("the command holds a NUL character; no command line can carry one")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JobFile:
    """`--job FILE.toml`: the options of `ddp-hpc render`, spelled with underscores."""

    profile: str = ""
    name: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    walltime: str | None = None
    queue: str | None = None
    qos: str | None = None
    account: str | None = None
    launcher: str | None = None
    mpi: str | None = None
    env: dict[str, str] | None = None
    setup: tuple[str, ...] | None = None
    run_dir: str | None = None
    filesystems: str | None = None
    fallback: str | None = None
    max_attempts: int | None = None
    min_nodes: int | None = None
    template: str | None = None
    command: tuple[str, ...] | None = None


def read_job_file(path: Path) -> JobFile:
    """The job file at `path`.

    Raises:
        RequestError: unreadable, broken, an unknown key, a value of another type.
    """
    return read_toml(path, JobFile)


def make_job(options: JobFile, file: JobFile | None = None) -> Job:
    """The job that the options and the file ask for together; where both speak, the options win.

    Variables are merged name by name, and setup lines of the options follow
    those of the file.

    Raises:
        RequestError: as `Job` and `parse_walltime_s`.
    """
    file = file or JobFile()
    given: dict[str, Any] = {}
    for name in JobFile.__dataclass_fields__:
        value = getattr(options, name)
        given[name] = getattr(file, name) if value is None else value
    given.pop("profile")
    given["env"] = {**(file.env or {}), **(options.env or {})}
    given["setup"] = (file.setup or ()) + (options.setup or ())
    given["num_nodes"] = given.pop("nodes")
    walltime = given.pop("walltime")
    given["walltime_s"] = None if walltime is None else parse_walltime_s(walltime)
    return Job(**{key: value for key, value in given.items() if value is not None})


def with_account(job: Job, account: str) -> Job:
    """`job` with that account, unless it has one already."""
    return job if job.account or not account else replace(job, account=account)
