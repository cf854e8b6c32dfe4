"""The job request: command, number of nodes, walltime and other options that the user chooses."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from ddp_hpc.base.click_options import to_arguments
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import OptionError
from ddp_hpc.base.options import Conversion, check_values, from_options, option
from ddp_hpc.base.record import record
from ddp_hpc.base.units import format_walltime, parse_walltime_s
from ddp_hpc.request.check_texts import (
    check_command,
    check_env,
    check_lines,
    check_name,
    check_python_env,
    parse_signal,
)
from ddp_hpc.request.program import default_name
from ddp_hpc.request.queue_options import check_queue_options
from ddp_hpc.request.raw_options import launcher_words, raw_directive

REQUEUE_POLICIES = ("on-exit-75", "on-signal")
NodeCheck = Literal["off", "warn", "replace"]
NODE_CHECKS: tuple[NodeCheck, ...] = get_args(NodeCheck)
DEFAULT_SIGNAL = "TERM@60"
DEFAULT_COMMAND = ("python", "-m", "ddp_hpc.train")
DEFAULT_MAX_ATTEMPTS = 20
DEFAULT_RESTARTS = 3
MAX_NAME_CHARS = 128
MAX_RANKS_OF_ONE_LOG = 8

# The default name of a job, which is replaced by that of its program; not a valid name itself.
_OF_PROGRAM = "<program>"
# Job names that both PBS and Slurm accept; they also become part of file names.
_NAME = r"[A-Za-z][A-Za-z0-9_.+-]*"
_WALLTIME: Conversion = {
    "read": lambda _, text: parse_walltime_s(text),
    "show": format_walltime,
    "metavar": "HH:MM:SS",
}
SECTIONS = ("Job", "Scheduler", "Software", "Launcher", "Resuming", "Script")
"""The sections of --help."""
_job, _scheduler, _software, _launcher, _resuming, _script = (
    partial(option, section=title) for title in SECTIONS
)


@record
class Job:
    """A job request: the options of `ddp-hpc render`, which can also be in a file (`--job FILE.toml`).

    The values are checked as far as possible without a site profile. For an empty string or None, the default
    of the profile is used; the default of `name` is the name of the program, as `default_name` returns it.
    `gpus_per_node` is 0 for a job without GPUs. `max_attempts` includes the first start.

    Raises:
        RequestError: on construction, for a value that no scheduler accepts.
    """

    profile: str = _job(
        "", "Site profile; `ddp-hpc profiles list` shows all names.", metavar="NAME", shown_default="detected"
    )
    num_nodes: int = _job(1, "Number of nodes.", flag="--nodes", at_least=1, metavar="N")
    ranks_per_node: int | None = _job(
        None, "Number of ranks per node.", at_least=1, metavar="R", shown_default="one per GPU, or 1"
    )
    gpus_per_node: int | None = _job(
        None,
        "Number of GPUs per node, if the profile does not define it; 0 requests none.",
        at_least=0,
        metavar="G",
    )
    cpus_per_node: int | None = _job(
        None, "Number of CPUs per node, if the profile does not define it.", at_least=1, metavar="C"
    )
    walltime_s: int | None = _job(
        None, "Time limit of the job; also 90m, 2h or 1h30m.", flag="--walltime", **_WALLTIME
    )
    queue: str = _scheduler("", "Queue, partition or QOS, depending on the site.", metavar="Q")
    qos: str = _scheduler("", "QOS in addition to the partition, if the site has both.", metavar="Q")
    account: str = _scheduler(
        "", "Account or project to charge.", metavar="A", shown_default="DDP_HPC_ACCOUNT"
    )
    mem: str = _scheduler(
        "", "Memory per node, such as 64G.", metavar="SIZE", shown_default="the site's default"
    )
    exclusive: bool = _scheduler(
        False,
        "Do not share the nodes with other jobs.",
    )
    constraint: str = _scheduler(
        "",
        "Features that the nodes must have, such as a100. Replaces the profile's constraint.",
        metavar="FEATURES",
    )
    reservation: str = _scheduler("", "Reservation in which the job runs.", metavar="NAME")
    dependency: str = _scheduler(
        "",
        "Jobs that this job waits for, such as afterok:123; also afternotok, afterany and after.",
        metavar="DEPENDENCIES",
    )
    mail_user: str = _scheduler(
        "", "Address to which --mail-type sends mail.", metavar="ADDRESS", shown_default="your own mailbox"
    )
    mail_type: str = _scheduler(
        "", "Events that the scheduler reports by mail, such as end,fail.", metavar="EVENTS"
    )
    array: str = _scheduler(
        "",
        "Submit a job array with these indices, such as 0-3; each job has its own run directory.",
        metavar="INDICES",
    )
    directive: tuple[str, ...] = _scheduler(
        (),
        "Scheduler option that ddp-hpc lacks, in the scheduler's own syntax; may be repeated.",
        metavar="OPTION",
    )
    name: str = _job(
        _OF_PROGRAM,
        "Job name, at most 15 characters on PBS.",
        metavar="NAME",
        shown_default="the name of the program, such as train",
    )
    launcher: str = _launcher(
        "",
        "Launcher that starts the ranks, such as mpiexec, srun or torchrun.",
        metavar="NAME",
        shown_default="the profile's",
    )
    launcher_arg: tuple[str, ...] = _launcher(
        (),
        "Options of srun, mpiexec or another launcher, such as --cpu-bind=cores; may be repeated.",
        metavar="OPTIONS",
    )
    mpi: Literal["none", "pmi2", "pmix", "cray_shasta"] | None = _launcher(
        None, "MPI type of srun (srun --mpi).", shown_default="the site's default"
    )
    env: dict[str, str] = _launcher(
        {}, "Environment variable to set for the ranks; may be repeated.", metavar="NAME=VALUE"
    )
    rank_logs: bool | None = _launcher(
        None,
        "Write the output of each rank to its own file in the run directory. The log of the job then "
        "contains the output of rank 0 and the warnings and errors of the other ranks.",
        shown_default=f"with more than {MAX_RANKS_OF_ONE_LOG} ranks",
    )
    setup: tuple[str, ...] = _software(
        (),
        "Line of bash to run before the ranks start, e.g. to load modules; may be repeated.",
        metavar="LINE",
    )
    conda_env: str = _software(
        "", "Name or path of the conda environment to activate after the setup lines.", metavar="NAME"
    )
    python_env: str = _software(
        "",
        "Directory of a virtual or conda environment that contains ddp-hpc; submit uses its own.",
        metavar="DIR",
        shown_default=".venv",
    )
    container: str = _software(
        "",
        "Image of the container in which the program runs, such as image.sif, if the profile defines how to "
        "start containers.",
        metavar="NAME",
    )
    after: tuple[str, ...] = _software(
        (),
        "Line of bash to run after the job, also after a failure; $code is the exit code; may be repeated.",
        metavar="LINE",
    )
    run_dir: str = _job(
        "",
        "Directory of the run, relative to the submission directory.",
        metavar="DIR",
        shown_default="runs/NAME",
    )
    filesystems: str = _scheduler(
        "", "File systems that the job needs, if the site requires them to be listed.", metavar="F"
    )
    fallback: str = _launcher(
        "",
        "Name of alternative settings in the profile, for jobs that hang; see `ddp-hpc profiles show`.",
        metavar="NAME",
    )
    max_attempts: int = _resuming(
        DEFAULT_MAX_ATTEMPTS,
        "Maximum number of times that a run is started or resumed, including requeues and restarts.",
        at_least=1,
        metavar="N",
    )
    restarts: int = _resuming(
        DEFAULT_RESTARTS,
        "Maximum number of times that a job restarts its ranks after a failure, from the newest checkpoint "
        "and without waiting in the queue again; 0 disables restarts. Programs other than ddp_hpc.train must "
        "record their checkpoints (--progress).",
        at_least=0,
        metavar="N",
    )
    spare_nodes: int = _launcher(
        0,
        "Number of spare nodes to request in addition to --nodes. They replace nodes that fail (Slurm: with "
        "srun or torchrun; PBS: if the profile allows it).",
        at_least=0,
        metavar="S",
    )
    min_nodes: int | None = _launcher(
        None,
        "If a node fails and no spare node is left, continue on fewer nodes, but at least M (where "
        "--spare-nodes works). ddp_hpc.train --global-batch keeps the number of samples per step.",
        at_least=1,
        metavar="M",
        shown_default="--nodes",
    )
    node_check: NodeCheck | None = _launcher(
        None,
        "Before each start on more than one node, check the nodes, and only warn about bad nodes or replace "
        "them with spare nodes.",
        shown_default="replace with --spare-nodes, otherwise off",
    )
    template: str = _script(
        "", "Template of the job script, instead of the default template of the scheduler.", metavar="FILE"
    )
    env_style: Literal["torchrun", "none"] = _launcher(
        "torchrun",
        "Environment variables for Python programs other than ddp_hpc.train: those of torchrun, "
        "such as RANK, or none.",
    )
    requeue: Literal["on-exit-75", "on-signal"] = _resuming(
        "on-exit-75",
        "When a job is requeued or resubmitted to resume from a checkpoint: after exit code 75, or also "
        "after the signal of --signal.",
    )
    signal: str = _resuming(
        "",
        "With --requeue on-signal: signal to send to the ranks, this many seconds before the walltime ends.",
        metavar="NAME@SECONDS",
        shown_default=DEFAULT_SIGNAL,
    )
    progress: tuple[str, ...] = _resuming(
        (),
        "Checkpoint files or directories to watch for changes, if the program does not touch "
        "DDP_HPC_PROGRESS_FILE; may be repeated.",
        metavar="PATTERN",
    )
    idle_timeout_s: float | None = _resuming(
        None,
        "Treat the run as hung if no rank has printed anything or saved a checkpoint for this long and at "
        "least one rank is waiting: save the stack traces, end the ranks, and restart them (--restarts). For "
        "programs other than ddp_hpc.train, which has --hang-timeout.",
        flag="--idle-timeout",
        at_least=1,
        metavar="SECONDS",
    )
    command: tuple[str, ...] = option(DEFAULT_COMMAND, "Program and arguments of each rank.", positional=True)

    def __post_init__(self) -> None:
        if self.name == _OF_PROGRAM:
            object.__setattr__(self, "name", default_name(self.command))
        if not re.fullmatch(_NAME, self.name):
            raise RequestError(
                f"invalid job name {self.name!r}. It must start with a letter, followed by letters, "
                "digits and _ . + - only."
            )
        if len(self.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"the job name has {len(self.name)} characters, but at most {MAX_NAME_CHARS} are allowed. "
                "Shorten it."
            )
        check_values(self)
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            most = f"must be at most {self.num_nodes}, the number of nodes of the job"
            raise OptionError("min_nodes", self.min_nodes, most)
        _check_resuming(self)
        check_queue_options(vars(self))
        for text in self.directive:
            raw_directive(text)
        for text in self.launcher_arg:
            launcher_words(text)
        check_env(self.env)
        check_name("--conda-env", self.conda_env, "an environment. `conda env list` shows all environments.")
        check_python_env(self.python_env, self.conda_env)
        check_name("--container", self.container, "an image. Give a file such as image.sif.")
        check_lines("setup", self.setup)
        check_lines("after", self.after)
        check_command(self.command)
        for what, path in (("run directory", self.run_dir), ("template", self.template)):
            if "\0" in path:
                raise RequestError(f"the {what} contains a NUL character. Give a valid path.")

    @property
    def total_nodes(self) -> int:
        """The number of nodes that the job requests, including the spare ones."""
        return self.num_nodes + self.spare_nodes

    @property
    def node_loss_option(self) -> str:
        """The option with which the job continues after the loss of a node, such as `--spare-nodes 1`; empty
        without one.
        """
        if self.spare_nodes:
            return f"--spare-nodes {self.spare_nodes}"
        return f"--min-nodes {self.min_nodes}" if self.min_nodes is not None else ""

    @classmethod
    def of(cls, **options: Any) -> Job:
        """Returns the job for the given options, which are named as in job files.

        Raises:
            RequestError: a value is invalid.
        """
        return from_options(cls, options)


def default_node_check(spare_nodes: int) -> NodeCheck:
    """Returns the value of --node-check for a job with this number of spare nodes."""
    return "replace" if spare_nodes else "off"


def _check_resuming(job: Job) -> None:
    if (given := job.node_loss_option) and not job.restarts:
        raise RequestError(
            f"{given} was given, but --restarts 0 does not let the job start its ranks again. Remove one "
            "of them."
        )
    if job.signal and job.requeue != "on-signal":
        raise RequestError(f"--signal {job.signal} was given without --requeue on-signal; add that option")
    if job.signal:
        parse_signal(job.signal)


def given_arguments(job: Job) -> list[str]:
    """Returns the options of `ddp-hpc render` for `job`, without defaults, the profile and the command."""
    return to_arguments(job, {"name": default_name(job.command), "profile": job.profile})


def with_account(job: Job, account: str) -> Job:
    """Returns `job` with the account, unless it already has one."""
    return job if job.account or not account else replace(job, account=account)
