"""Job options, shared by the commands that render, check or submit a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddp_hpc.base.click_options import click_options, given_values
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.options import merged_values, options_of
from ddp_hpc.base.units import counted
from ddp_hpc.commands.completion import complete_profiles
from ddp_hpc.request.job import SECTIONS, Job, with_account

if TYPE_CHECKING:
    from ddp_hpc.sites.site import Site

F = TypeVar("F", bound=Callable[..., Any])

# The job's command starts at the first argument that is not an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False}

_SECTION_OF = {option.name: option.declared.get("section", "") for option in options_of(Job)}
_SECTION_OF["job_file"] = _SECTION_OF["profile"]


class JobCommand(click.Command):
    """A command with the options of a job, which --help shows in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*SECTIONS, "Options")}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                sections[_SECTION_OF.get(parameter.name or "", "Options")].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class ScriptOrRequest(JobCommand):
    """A command with an optional SCRIPT. The arguments after `--` are the command of the job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments before `--`, and stores the arguments after it in the context."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta["ddp_hpc.command"] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])


def job_options(*names: str) -> Callable[[F], F]:
    """Returns a decorator that adds options of `ddp-hpc render` with these names to a command."""
    return click_options(Job, names, {"profile": complete_profiles})


def all_job_options(*without: str) -> Callable[[F], F]:
    """Returns a decorator that adds all options of a job to a command, except for those in `without`.

    `request_of` turns their values into a job.
    """
    names = {option.name for option in options_of(Job)} - {*without}
    file = click.option(
        "--job",
        "job_file",
        metavar="FILE.toml",
        type=click.Path(path_type=Path),
        help="TOML file that contains options of the job.",
    )
    return lambda function: job_options(*names)(file(function))


def given_options(options: dict[str, Any]) -> list[str]:
    """Returns the options that the user has given, spelled as on the command line."""
    return [
        named(name.removesuffix("_file"))
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
    from ddp_hpc.base.toml_options import toml_options
    from ddp_hpc.schedulers.registry import scheduler_of_site
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site

    given = given_values(options)
    job_file = given.pop("job_file", None)
    of_file = toml_options(job_file, Job) if job_file else {}
    name, why = choose_profile(given.get("profile", ""), of_file.get("profile", ""), os.environ)
    click.echo(f"profile {name}: {why}", err=True)
    site = load_site(name)
    job = Job.of(**merged_values(Job, of_file, given))
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

    if complaint := bash_complaint("\n".join(lines)):
        line, message = complaint
        raise RequestError(f"{option} {'; '.join(lines)!r} is not valid bash (line {line}: {message})")
