"""The options that ask for a job, shared by the commands that render, check or submit one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddp_hpc.errors import RequestError

if TYPE_CHECKING:
    from ddp_hpc.batch.job import Job
    from ddp_hpc.batch.site import Site

F = TypeVar("F", bound=Callable[..., Any])

# A script's own command line begins with the first word that is no option.
TAKES_A_COMMAND = {"allow_interspersed_args": False}

_OPTIONS = {
    "profile": click.option(
        "--profile", metavar="NAME", help="The site: see `ddp-hpc profiles list`. Else it is found out."
    ),
    "job_file": click.option(
        "--job", "job_file", metavar="FILE.toml", type=click.Path(path_type=Path), help="Options from a file."
    ),
    "nodes": click.option("--nodes", type=int, metavar="N", help="Nodes.  [1]"),
    "ranks_per_node": click.option(
        "--ranks-per-node", type=int, metavar="R", help="Ranks on each node.  [its GPUs, else 1]"
    ),
    "gpus_per_node": click.option(
        "--gpus-per-node", type=int, metavar="G", help="GPUs of a node, where the profile does not know."
    ),
    "cpus_per_node": click.option(
        "--cpus-per-node", type=int, metavar="C", help="CPUs of a node, where the profile does not know."
    ),
    "walltime": click.option(
        "--walltime", metavar="HH:MM:SS", help="How long the job may run; also 90m, 2h, 1h30m."
    ),
    "queue": click.option("--queue", metavar="Q", help="Queue, partition or QOS, whichever the site has."),
    "qos": click.option("--qos", metavar="Q", help="QOS beside the partition, where the site has both."),
    "account": click.option("--account", metavar="A", help="Project that pays.  [DDP_HPC_ACCOUNT]"),
    "name": click.option(
        "--name", metavar="NAME", help="Name of the job; at most 15 characters on PBS.  [ddp]"
    ),
    "launcher": click.option(
        "--launcher",
        metavar="mpiexec|srun|ibrun|flux|torchrun",
        help="What starts the ranks.  [as the profile says]",
    ),
    "mpi": click.option(
        "--mpi", metavar="none|pmi2|pmix|cray_shasta", help="How srun starts MPI ranks.  [the site's default]"
    ),
    "env": click.option(
        "--env", multiple=True, metavar="NAME=VALUE", help="A variable for the ranks; may be repeated."
    ),
    "setup": click.option(
        "--setup",
        multiple=True,
        metavar="LINE",
        help="A line of bash for modules and the like; may be repeated.",
    ),
    "run_dir": click.option(
        "--run-dir", metavar="DIR", help="Folder of the run, from the folder of submission.  [runs/NAME]"
    ),
    "filesystems": click.option(
        "--filesystems", metavar="F", help="File systems the job needs, where the site asks for them."
    ),
    "fallback": click.option(
        "--fallback",
        metavar="NAME",
        help="The profile's other settings for ranks that hang; see profiles show.",
    ),
    "max_attempts": click.option(
        "--max-attempts", type=int, metavar="N", help="Starts in all of a run that goes on by itself.  [20]"
    ),
    "min_nodes": click.option(
        "--min-nodes", type=int, metavar="M", help="Go on with M nodes where others are lost; with torchrun."
    ),
    "template": click.option(
        "--template", metavar="FILE", help="Your own template of the script, in place of the scheduler's."
    ),
}


def job_options(function: F) -> F:
    """Gives a command the options of `ddp-hpc render`; `request_of` makes a job of them."""
    return job_options_without()(function)


def job_options_without(*names: str) -> Callable[[F], F]:
    """`job_options`, less these; `request_of` wants them all the same."""

    def decorate(function: F) -> F:
        for name, option in reversed(_OPTIONS.items()):
            if name not in names:
                function = option(function)
        return function

    return decorate


def given_options(options: dict[str, Any]) -> list[str]:
    """The options among these that the user has given, as they are typed."""
    return [f"--{name.removesuffix('_file').replace('_', '-')}" for name, value in options.items() if value]


def request_of(options: dict[str, Any]) -> tuple[Job, Site]:
    """The job and the site that these options, the job file and the machine ask for together.

    Says on stderr which profile was chosen and why.

    Raises:
        RequestError: options that no job can have.
    """
    from ddp_hpc.batch.detect import choose_profile
    from ddp_hpc.batch.job import JobFile, make_job, read_job_file, with_account
    from ddp_hpc.batch.site import load_site

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
    # On one's own machine nobody bills; the variable is for the other profiles then.
    if site.scheduler != "local":
        job = with_account(job, os.environ.get("DDP_HPC_ACCOUNT", ""))
    _check_bash(job.setup)
    return job, site


def _check_bash(setup: tuple[str, ...]) -> None:
    """The user's own lines are bash, and a quote that is not closed would show only after the queue."""
    if not setup:
        return
    from ddp_hpc.batch.bash_syntax import bash_complaint

    if found := bash_complaint("\n".join(setup)):
        line, words = found
        raise RequestError(f"--setup: bash does not understand {'; '.join(setup)!r} (line {line}: {words})")


def name_and_value(text: str) -> tuple[str, str]:
    """The two halves of `--env NAME=VALUE`.

    Raises:
        RequestError: it has no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(
            f"--env {text!r} was given; NAME=VALUE is needed; for an empty value write {text}="
        )
    return name, value
