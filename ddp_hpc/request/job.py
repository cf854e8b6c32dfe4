"""The job request: command, number of nodes, walltime and other options that the user chooses."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.toml_config import read_toml
from ddp_hpc.base.units import format_walltime, parse_walltime_s
from ddp_hpc.request.program import default_name
from ddp_hpc.request.queue_options import check_queue_options
from ddp_hpc.request.raw_options import directive_in_setup, launcher_words, raw_directive
from ddp_hpc.sites.profile_tables import BASHS_OWN, VARIABLE

ENV_STYLES = ("torchrun", "none")
REQUEUE_POLICIES = ("on-exit-75", "on-signal")
DEFAULT_SIGNAL = "TERM@60"
MPI_KINDS = ("none", "pmi2", "pmix", "cray_shasta")
DEFAULT_COMMAND = ("python", "-m", "ddp_hpc.train")
DEFAULT_MAX_ATTEMPTS = 20
MAX_NAME_CHARS = 128

# The default name of a job, which is replaced by that of its program; not a valid name itself.
_OF_PROGRAM = "<program>"
# Job names that both PBS and Slurm accept; they also become part of file names.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Job:
    """A job request. Its values are checked as far as possible without a site profile.

    For an empty string or None, the default of the profile is used; the default of `name` is the name of the
    program, as `default_name` returns it. `gpus_per_node` is 0 for a job without GPUs. `max_attempts`
    includes the first start. With `min_nodes`, torchrun continues with at least that many nodes after node
    failures.

    Raises:
        RequestError: on construction, for a value that no scheduler accepts.
    """

    name: str = _OF_PROGRAM
    num_nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    walltime_s: int | None = None
    queue: str = ""
    qos: str = ""
    account: str = ""
    mem: str = ""
    exclusive: bool = False
    constraint: str = ""
    reservation: str = ""
    dependency: str = ""
    mail_user: str = ""
    mail_type: str = ""
    array: str = ""
    directive: tuple[str, ...] = ()
    launcher: str = ""
    launcher_arg: tuple[str, ...] = ()
    mpi: str = ""
    env: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    conda_env: str = ""
    python_env: str = ""
    container: str = ""
    run_dir: str = ""
    filesystems: str = ""
    fallback: str = ""
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    min_nodes: int | None = None
    template: str = ""
    env_style: str = "torchrun"
    standalone: bool = False
    requeue: str = REQUEUE_POLICIES[0]
    signal: str = ""
    progress: tuple[str, ...] = ()
    command: tuple[str, ...] = DEFAULT_COMMAND

    def __post_init__(self) -> None:
        if self.name == _OF_PROGRAM:
            object.__setattr__(self, "name", default_name(self.command))
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"invalid job name {self.name!r}. It must start with a letter, followed by letters, "
                "digits and _ . + - only."
            )
        if len(self.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"the job name has {len(self.name)} characters, but at most {MAX_NAME_CHARS} are allowed. "
                "Shorten it."
            )
        if self.gpus_per_node is not None and self.gpus_per_node < 0:
            raise RequestError(f"--gpus-per-node must be at least 0 (got {self.gpus_per_node})")
        for option, count in (
            ("--nodes", self.num_nodes),
            ("--ranks-per-node", self.ranks_per_node),
            ("--cpus-per-node", self.cpus_per_node),
            ("--max-attempts", self.max_attempts),
            ("--min-nodes", self.min_nodes),
        ):
            if count is not None and count < 1:
                raise RequestError(f"{option} must be at least 1 (got {count})")
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise RequestError(
                f"--min-nodes must be at most {self.num_nodes}, the number of nodes of the job "
                f"(got {self.min_nodes})"
            )
        _one_of("MPI type", self.mpi, MPI_KINDS)
        _one_of("environment style", self.env_style, ENV_STYLES)
        _one_of("requeue policy", self.requeue, REQUEUE_POLICIES)
        if self.signal and self.requeue != "on-signal":
            raise RequestError(
                f"--signal {self.signal} was given without --requeue on-signal; add that option"
            )
        parse_signal(self.signal or DEFAULT_SIGNAL)
        if self.standalone and (self.requeue != REQUEUE_POLICIES[0] or self.progress):
            raise RequestError(
                "--standalone was given, but only the supervisor of ddp-hpc can requeue a job; omit "
                "--requeue and --progress, or --standalone"
            )
        check_queue_options(vars(self))
        for text in self.directive:
            raw_directive(text)
        for text in self.launcher_arg:
            launcher_words(text)
        _check_env(self.env)
        _check_name("--conda-env", self.conda_env, "an environment. `conda env list` shows all environments.")
        _check_python_env(self.python_env, self.conda_env)
        _check_name("--container", self.container, "an image. Give a file such as image.sif.")
        _check_lines("setup", self.setup)
        _check_lines("after", self.after)
        _check_command(self.command)
        for what, path in (("run directory", self.run_dir), ("template", self.template)):
            if "\0" in path:
                raise RequestError(f"the {what} contains a NUL character. Give a valid path.")


def parse_signal(text: str) -> tuple[str, int]:
    """Returns the name and the seconds of `NAME@SECONDS`, such as TERM@60.

    Raises:
        RequestError: the text has another format.
    """
    match = re.fullmatch(r"(?:SIG)?(TERM|INT|USR1|USR2)@([0-9]{1,6})", text)
    if match is None:
        raise RequestError(
            f"--signal {text[:80]!r} is not NAME@SECONDS with TERM, INT, USR1 or USR2. Use for example "
            "TERM@60."
        )
    return match[1], int(match[2])


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value and value not in known:
        raise RequestError(
            f"unknown {what} {value!r}{nearest(value, known)}; choose one of {', '.join(known)}"
        )


def _check_name(option: str, name: str, what: str) -> None:
    if name.startswith("-") or not name.isprintable():
        raise RequestError(f"{option} {name[:80]!a} is not the name or the path of {what}")


def _check_python_env(directory: str, conda_env: str) -> None:
    if directory and conda_env:
        raise RequestError(
            f"--python-env {directory} and --conda-env {conda_env} were given, but a job uses one Python "
            "environment. Omit one of the options."
        )
    # A colon would separate two entries of PATH.
    if directory and (not directory.startswith("/") or ":" in directory or not directory.isprintable()):
        raise RequestError(
            f"--python-env {directory[:80]!a} is not the absolute path of a directory. Give the path that "
            "python -c 'import sys; print(sys.prefix)' prints."
        )


def _check_env(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not VARIABLE.fullmatch(name):
            raise RequestError(f"invalid variable name {name!r}. It may contain only letters, digits and _.")
        if name in BASHS_OWN:
            raise RequestError(f"{name} is a bash variable that scripts cannot set. Remove it.")
        if "\0" in value:
            raise RequestError(
                f"the value of {name} contains a NUL character, which environment variables cannot contain. "
                "Remove it."
            )


def _check_lines(option: str, lines: tuple[str, ...]) -> None:
    for line in lines:
        if re.search(r"[\0\n\r]", line):
            raise RequestError(
                f"{option} line {line!r} contains a line break. Use a separate --{option} for each line."
            )
        if directive := directive_in_setup(line):
            raise RequestError(
                f"{option} line {line!r} is a directive, which the scheduler does not read among commands. "
                f"Use --directive {shlex.quote(directive)}."
            )


def _check_command(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise RequestError("the command is empty. Give a program after --, such as -- python train.py.")
    if command[0].startswith("-"):
        raise RequestError(
            f"the command begins with {command[0]!r}, which the launcher would read as its own option. "
            "Put the program first, such as -- python -m ddp_hpc.train --epochs 3."
        )
    for word in command:
        if word == ":":
            raise RequestError(
                'the command contains the argument ":", which mpiexec and srun read as the start of a second '
                "program. Move the command into a script."
            )
        if "\0" in word:
            raise RequestError(
                "the command contains a NUL character, which command lines cannot contain. Remove it."
            )


def _option(text: str, metavar: str = "", default: str = "") -> Any:
    """Declares an option that is None if not given; help texts show `default`, which is defined elsewhere."""
    return field(default=None, metadata={"help": text, "metavar": metavar, "default": default})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JobOptions:
    """The options of a job, from the command line of `ddp-hpc render` or from a file (`--job FILE.toml`).

    The options of all commands, and the command line in the first lines of a job script, are derived from
    these fields. The defaults are in `Job`.
    """

    profile: str | None = _option(
        "Site profile; `ddp-hpc profiles list` shows all names.", "NAME", "detected"
    )
    nodes: int | None = _option("Number of nodes.", "N")
    ranks_per_node: int | None = _option("Number of ranks per node.", "R", "one per GPU, or 1")
    gpus_per_node: int | None = _option(
        "Number of GPUs per node, if the profile does not define it; 0 requests none.", "G"
    )
    cpus_per_node: int | None = _option("Number of CPUs per node, if the profile does not define it.", "C")
    walltime: str | None = _option("Time limit of the job; also 90m, 2h or 1h30m.", "HH:MM:SS")
    queue: str | None = _option("Queue, partition or QOS, depending on the site.", "Q")
    qos: str | None = _option("QOS in addition to the partition, if the site has both.", "Q")
    account: str | None = _option("Account or project to charge.", "A", "DDP_HPC_ACCOUNT")
    mem: str | None = _option("Memory per node, such as 64G.", "SIZE", "the site's default")
    exclusive: bool | None = _option("Do not share the nodes with other jobs.")
    constraint: str | None = _option(
        "Features that the nodes must have, such as a100. Replaces the profile's constraint.", "FEATURES"
    )
    reservation: str | None = _option("Reservation in which the job runs.", "NAME")
    dependency: str | None = _option(
        "Jobs that this job waits for, such as afterok:123; also afternotok, afterany and after.",
        "DEPENDENCIES",
    )
    mail_user: str | None = _option("Address to which --mail-type sends mail.", "ADDRESS", "your own mailbox")
    mail_type: str | None = _option("Events that the scheduler reports by mail, such as end,fail.", "EVENTS")
    array: str | None = _option(
        "Submit a job array with these indices, such as 0-3; each job has its own run directory.", "INDICES"
    )
    directive: tuple[str, ...] | None = _option(
        "Scheduler option that ddp-hpc lacks, in the scheduler's own syntax; may be repeated.", "OPTION"
    )
    name: str | None = _option(
        "Job name, at most 15 characters on PBS.", "NAME", "the name of the program, such as train"
    )
    launcher: str | None = _option(
        "Launcher that starts the ranks, such as mpiexec, srun or torchrun.", "NAME", "the profile's"
    )
    launcher_arg: tuple[str, ...] | None = _option(
        "Options of srun, mpiexec or another launcher, such as --cpu-bind=cores; may be repeated.", "OPTIONS"
    )
    mpi: str | None = _option("MPI type of srun (srun --mpi).", "|".join(MPI_KINDS), "the site's default")
    env: dict[str, str] | None = _option(  # noqa: RUF009 - it returns dataclasses.field
        "Environment variable to set for the ranks; may be repeated.", "NAME=VALUE"
    )
    setup: tuple[str, ...] | None = _option(
        "Line of bash to run before the ranks start, e.g. to load modules; may be repeated.", "LINE"
    )
    conda_env: str | None = _option(
        "Name or path of the conda environment to activate after the setup lines.", "NAME"
    )
    python_env: str | None = _option(
        "Directory of a virtual or conda environment that contains ddp-hpc; submit uses its own.",
        "DIR",
        ".venv",
    )
    container: str | None = _option(
        "Image of the container in which the program runs, such as image.sif, if the profile defines how to "
        "start containers.",
        "NAME",
    )
    after: tuple[str, ...] | None = _option(
        "Line of bash to run after the job, also after a failure; $code is the exit code; may be repeated.",
        "LINE",
    )
    run_dir: str | None = _option(
        "Directory of the run, relative to the submission directory.", "DIR", "runs/NAME"
    )
    filesystems: str | None = _option(
        "File systems that the job needs, if the site requires them to be listed.", "F"
    )
    fallback: str | None = _option(
        "Name of alternative settings in the profile, for jobs that hang; see `ddp-hpc profiles show`.",
        "NAME",
    )
    max_attempts: int | None = _option(
        "Maximum number of times that a run is started or resumed, including requeues.", "N"
    )
    min_nodes: int | None = _option(
        "Minimum number of nodes with which torchrun continues after a node failure.", "M"
    )
    template: str | None = _option(
        "Template of the job script, instead of the default template of the scheduler.", "FILE"
    )
    env_style: str | None = _option(
        "Environment variables for Python programs other than ddp_hpc.train: those of torchrun, "
        "such as RANK, or none.",
        "|".join(ENV_STYLES),
    )
    standalone: bool | None = _option(
        "Write a script that runs without ddp-hpc, but does not resume the run in another job."
    )
    requeue: str | None = _option(
        "When a job is requeued or resubmitted to resume from a checkpoint: after exit code 75, or also "
        "after the signal of --signal.",
        "|".join(REQUEUE_POLICIES),
    )
    signal: str | None = _option(
        "With --requeue on-signal: signal to send to the ranks, this many seconds before the walltime ends.",
        "NAME@SECONDS",
        DEFAULT_SIGNAL,
    )
    progress: tuple[str, ...] | None = _option(
        "Checkpoint files or directories to watch for changes, if the program does not touch "
        "DDP_HPC_PROGRESS_FILE; may be repeated.",
        "PATTERN",
    )
    command: tuple[str, ...] | None = None


# The options whose fields in `Job` have another name.
_CONVERTED = {"nodes": "num_nodes", "walltime": "walltime_s"}


def job_default(option: str) -> str:
    """Returns the default of an option of `JobOptions` for its help text; empty if there is none."""
    declared = JobOptions.__dataclass_fields__[option]
    known = Job.__dataclass_fields__.get(_CONVERTED.get(option, option))
    value = known.default if known is not None and known.default is not MISSING else None
    return str(declared.metadata["default"] or value or "")


def given_arguments(job: Job) -> list[str]:
    """Returns the options of `ddp-hpc render` for `job`, without defaults and without the command."""
    arguments: list[str] = []
    for name in JobOptions.__dataclass_fields__:
        if name in ("profile", "command"):
            continue
        attribute = _CONVERTED.get(name, name)
        value = getattr(job, attribute)
        default = default_name(job.command) if name == "name" else Job.__dataclass_fields__[attribute].default
        if value in (None, "", (), {}) or value == default:
            continue
        values = [f"{key}={text}" for key, text in value.items()] if isinstance(value, dict) else value
        if value is True:
            arguments.append(f"--{name.replace('_', '-')}")
            continue
        for one in values if isinstance(values, list | tuple) else [value]:
            text = format_walltime(one) if name == "walltime" else str(one)
            arguments += [f"--{name.replace('_', '-')}", text]
    return arguments


def read_job_file(path: Path) -> JobOptions:
    """Reads the job file at `path`.

    Raises:
        RequestError: the file is unreadable, not TOML, or has an unknown key or a value of the wrong type.
    """
    return read_toml(path, JobOptions)


def make_job(options: JobOptions, file: JobOptions | None = None) -> Job:
    """Returns the job request from the options and the job file; options take precedence.

    Environment variables are merged by name. The setup lines of the options follow those of the file.

    Raises:
        RequestError: see `Job` and `parse_walltime_s`.
    """
    file = file or JobOptions()
    given = {**vars(file), **{name: value for name, value in vars(options).items() if value is not None}}
    given.pop("profile")
    given["env"] = {**(file.env or {}), **(options.env or {})}
    for name in ("setup", "progress", "directive", "launcher_arg", "after"):
        given[name] = (getattr(file, name) or ()) + (getattr(options, name) or ())
    given["num_nodes"] = given.pop("nodes")
    walltime = given.pop("walltime")
    given["walltime_s"] = None if walltime is None else parse_walltime_s(walltime)
    return Job(**{key: value for key, value in given.items() if value is not None})


def with_account(job: Job, account: str) -> Job:
    """Returns `job` with the account, unless it already has one."""
    return job if job.account or not account else replace(job, account=account)
