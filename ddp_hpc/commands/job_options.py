"""Job options, shared by the commands that render, check or submit a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import counted
from ddp_hpc.commands.completion import complete_profiles
from ddp_hpc.request.job import Job, JobOptions, job_default, make_job, read_job_file, with_account

if TYPE_CHECKING:
    from ddp_hpc.sites.site import Site

F = TypeVar("F", bound=Callable[..., Any])

# The job's command starts at the first argument that is not an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False}


def _click_option(name: str) -> Callable[[F], F]:
    """Returns the click option for a field of `JobOptions`."""
    declared = JobOptions.__dataclass_fields__[name].metadata
    kind = _KINDS[name]
    default = job_default(name)
    if kind == bool | None:
        return click.option(f"--{name.replace('_', '-')}", is_flag=True, default=None, help=declared["help"])
    return click.option(
        f"--{name.replace('_', '-')}",
        metavar=declared["metavar"],
        help=declared["help"] + (f"  [{default}]" if default else ""),
        type=int if kind == int | None else str,
        multiple=kind not in (int | None, str | None),
        shell_complete=complete_profiles if name == "profile" else None,
    )


_KINDS = get_type_hints(JobOptions)
_JOB_FILE = click.option(
    "--job",
    "job_file",
    metavar="FILE.toml",
    type=click.Path(path_type=Path),
    help="TOML file that contains options of the job.",
)
_OPTIONS = {"profile": _click_option("profile"), "job_file": _JOB_FILE}
_OPTIONS |= {name: _click_option(name) for name in _KINDS if name not in ("profile", "command")}


# The sections of --help. Other options of a command are in the last section.
_SECTIONS = {
    "Job": ("profile job_file nodes ranks_per_node gpus_per_node cpus_per_node walltime name run_dir"),
    "Scheduler": (
        "queue qos account mem exclusive constraint reservation dependency array mail_user mail_type "
        "filesystems directive"
    ),
    "Software": "setup conda_env python_env container after",
    "Launcher": "launcher launcher_arg mpi env env_style min_nodes fallback",
    "Resuming": "max_attempts requeue signal progress",
    "Script": "template standalone",
}


class JobCommand(click.Command):
    """A command with the options of a job, which --help shows in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by section."""
        section_of = {name: title for title, names in _SECTIONS.items() for name in names.split()}
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS, "Options")}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                found[section_of.get(parameter.name or "", "Options")].append(record)
        for title, records in found.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def job_options(function: F) -> F:
    """Adds the options of `ddp-hpc render` to a command; `request_of` turns their values into a job."""
    return job_options_without()(function)


def job_options_without(*names: str) -> Callable[[F], F]:
    """Like `job_options`, but without the options `names`; callers of `request_of` supply their values."""

    def decorate(function: F) -> F:
        for name, option in reversed(_OPTIONS.items()):
            if name not in names:
                function = option(function)
        return function

    return decorate


def given_options(options: dict[str, Any]) -> list[str]:
    """Returns the options that the user has given, spelled as on the command line."""
    return [
        f"--{name.removesuffix('_file').replace('_', '-')}"
        for name, value in options.items()
        # 0 GPUs per node is a request.
        if value or type(value) is int
    ]


def request_of(options: dict[str, Any]) -> tuple[Job, Site]:
    """Returns the job and the site that result from the options, the job file and the machine.

    Prints to stderr which profile was chosen and why.

    Raises:
        RequestError: the options are invalid.
    """
    from ddp_hpc.schedulers.registry import scheduler_of_site
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site

    asked_for = dict(options)
    profile, job_file = asked_for.pop("profile"), asked_for.pop("job_file")
    env = [name_and_value(text) for text in asked_for.pop("env")]
    command = asked_for.pop("command")
    asked = JobOptions(**asked_for, env=dict(env), command=command or None)
    file = read_job_file(job_file) if job_file else JobOptions()
    name, why = choose_profile(profile or "", file.profile or "", os.environ)
    click.echo(f"profile {name}: {why}", err=True)
    site = load_site(name)
    job = make_job(asked, file)
    # Without a scheduler, there is no accounting, so DDP_HPC_ACCOUNT is ignored.
    if scheduler_of_site(site).has_queue:
        job = with_account(job, os.environ.get("DDP_HPC_ACCOUNT", ""))
    _check_bash("--setup", job.setup)
    _check_bash("--after", job.after)
    return job, _with_share_of_this_machine(job, site)


def _with_share_of_this_machine(job: Job, site: Site) -> Site:
    """Returns the site with the share of a node that comes with one GPU, if only this machine's scheduler
    knows it.
    """
    from ddp_hpc.schedulers.registry import scheduler_of_site
    from ddp_hpc.sites.detect import is_here

    node = site.node
    is_known = node.devices or node.cores or node.cores_per_device
    if not job.gpus_per_node or is_known or not is_here(site.detect, os.environ):
        return site
    share = scheduler_of_site(site).commands.device_share(job.queue or site.default_queue, job.gpus_per_node)
    if share is None:
        return site
    memory = f" and {share.memory_mib:,} MiB of memory" if share.memory_mib else ""
    click.echo(f"{counted(share.threads, 'CPU')}{memory} per GPU: {share.why}", err=True)
    return share.add_to(site)


def _check_bash(option: str, lines: tuple[str, ...]) -> None:
    """Checks the syntax of bash lines now, because an error would otherwise appear only in the job."""
    if not lines:
        return
    from ddp_hpc.lint.bash_syntax import bash_complaint

    if found := bash_complaint("\n".join(lines)):
        line, message = found
        raise RequestError(f"{option} {'; '.join(lines)!r} is not valid bash (line {line}: {message})")


def name_and_value(text: str) -> tuple[str, str]:
    """Splits `--env NAME=VALUE` into name and value.

    Raises:
        RequestError: the text does not contain `=`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--env requires NAME=VALUE (got {text!r}). For an empty value write {text}=.")
    return name, value
