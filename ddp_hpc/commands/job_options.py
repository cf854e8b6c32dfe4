"""Job options, shared by the commands that render, check or submit a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddp_hpc.errors import RequestError

if TYPE_CHECKING:
    from ddp_hpc.request.job import Job
    from ddp_hpc.sites.site import Site

F = TypeVar("F", bound=Callable[..., Any])

# The job's command starts at the first argument that is not an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False}

_OPTIONS = {
    "profile": click.option(
        "--profile", metavar="NAME", help="Site profile; see `ddp-hpc profiles list`.  [detected]"
    ),
    "job_file": click.option(
        "--job",
        "job_file",
        metavar="FILE.toml",
        type=click.Path(path_type=Path),
        help="TOML file with options for the job.",
    ),
    "nodes": click.option("--nodes", type=int, metavar="N", help="Number of nodes.  [1]"),
    "ranks_per_node": click.option(
        "--ranks-per-node", type=int, metavar="R", help="Number of ranks per node.  [one per GPU, or 1]"
    ),
    "gpus_per_node": click.option(
        "--gpus-per-node", type=int, metavar="G", help="GPUs per node, if the profile does not define them."
    ),
    "cpus_per_node": click.option(
        "--cpus-per-node", type=int, metavar="C", help="CPUs per node, if the profile does not define them."
    ),
    "walltime": click.option(
        "--walltime", metavar="HH:MM:SS", help="Time limit of the job; 90m, 2h and 1h30m are accepted too."
    ),
    "queue": click.option("--queue", metavar="Q", help="Queue, partition or QOS, depending on the site."),
    "qos": click.option("--qos", metavar="Q", help="QOS in addition to the partition, if the site has both."),
    "account": click.option(
        "--account", metavar="A", help="Account or project to charge.  [DDP_HPC_ACCOUNT]"
    ),
    "name": click.option("--name", metavar="NAME", help="Job name, at most 15 characters on PBS.  [ddp]"),
    "launcher": click.option(
        "--launcher",
        metavar="mpiexec|srun|ibrun|flux|torchrun",
        help="Launcher that starts the ranks.  [the profile's]",
    ),
    "mpi": click.option(
        "--mpi",
        metavar="none|pmi2|pmix|cray_shasta",
        help="MPI type of srun (srun --mpi).  [the site's default]",
    ),
    "env": click.option(
        "--env",
        multiple=True,
        metavar="NAME=VALUE",
        help="Environment variable for the ranks; may be repeated.",
    ),
    "setup": click.option(
        "--setup",
        multiple=True,
        metavar="LINE",
        help="Line of bash to run before the ranks start, e.g. to load modules; may be repeated.",
    ),
    "run_dir": click.option(
        "--run-dir",
        metavar="DIR",
        help="Directory of the run, relative to the submission directory.  [runs/NAME]",
    ),
    "filesystems": click.option(
        "--filesystems",
        metavar="F",
        help="File systems that the job needs, if the site requires them to be listed.",
    ),
    "fallback": click.option(
        "--fallback",
        metavar="NAME",
        help="Alternative settings from the profile, for jobs that hang; see `ddp-hpc profiles show`.",
    ),
    "max_attempts": click.option(
        "--max-attempts",
        type=int,
        metavar="N",
        help="Maximum number of attempts of a resumed run, requeues included.  [20]",
    ),
    "min_nodes": click.option(
        "--min-nodes",
        type=int,
        metavar="M",
        help="Minimum number of nodes to continue with after a node failure; torchrun only.",
    ),
    "template": click.option(
        "--template", metavar="FILE", help="Template for the job script, instead of the scheduler's own."
    ),
    "env_style": click.option(
        "--env-style",
        metavar="torchrun|none",
        help="Whether other Python programs get the variables that torchrun sets, such as RANK.  [torchrun]",
    ),
}


def job_options(function: F) -> F:
    """Add the options of `ddp-hpc render` to a command; `request_of` turns their values into a job."""
    return job_options_without()(function)


def job_options_without(*names: str) -> Callable[[F], F]:
    """`job_options` without the named ones, for which the caller of `request_of` must supply values."""

    def decorate(function: F) -> F:
        for name, option in reversed(_OPTIONS.items()):
            if name not in names:
                function = option(function)
        return function

    return decorate


def given_options(options: dict[str, Any]) -> list[str]:
    """Return the options that the user has given, spelled as on the command line."""
    return [f"--{name.removesuffix('_file').replace('_', '-')}" for name, value in options.items() if value]


def request_of(options: dict[str, Any]) -> tuple[Job, Site]:
    """Return the job and the site that result from the options, the job file and the machine.

    Prints to stderr which profile was chosen and why.

    Raises:
        RequestError: invalid options.
    """
    from ddp_hpc.request.job import JobFile, make_job, read_job_file, with_account
    from ddp_hpc.schedulers.registry import scheduler_of_site
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site

    asked_for = dict(options)
    profile, job_file = asked_for.pop("profile"), asked_for.pop("job_file")
    env = [name_and_value(text) for text in asked_for.pop("env")]
    command = asked_for.pop("command")
    asked = JobFile(**asked_for, env=dict(env), command=command or None)
    file = read_job_file(job_file) if job_file else JobFile()
    name, why = choose_profile(profile or "", file.profile, os.environ)
    click.echo(f"profile {name}: {why}", err=True)
    site = load_site(name)
    job = make_job(asked, file)
    # Without a batch system there is no accounting, so DDP_HPC_ACCOUNT is ignored.
    if scheduler_of_site(site).has_queue:
        job = with_account(job, os.environ.get("DDP_HPC_ACCOUNT", ""))
    _check_bash(job.setup)
    return job, site


def _check_bash(setup: tuple[str, ...]) -> None:
    """Check the syntax of --setup lines here, as an error would otherwise show only when the job starts."""
    if not setup:
        return
    from ddp_hpc.lint.bash_syntax import bash_complaint

    if found := bash_complaint("\n".join(setup)):
        line, message = found
        raise RequestError(f"--setup {'; '.join(setup)!r} is not valid bash (line {line}: {message})")


def name_and_value(text: str) -> tuple[str, str]:
    """Split `--env NAME=VALUE` into name and value.

    Raises:
        RequestError: it has no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--env requires NAME=VALUE (got {text!r}). For an empty value write {text}=.")
    return name, value
