"""The command `ddp-hpc lint`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.commands.job_options import given_options, job_options, request_of
from ddp_hpc.errors import EXIT_DONE, EXIT_FAILED, DdpHpcError, RequestError

if TYPE_CHECKING:
    from ddp_hpc.lint.run_checks import LintFinding
    from ddp_hpc.sites.site import Site

_REQUEST = "the request"


class ScriptOrRequest(click.Command):
    """A command with an optional SCRIPT. The arguments after `--` are the command of the job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before `--`, and store the arguments after it in the context."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta["ddp_hpc.command"] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])


@click.command("lint", cls=ScriptOrRequest)
@job_options
@click.option(
    "--test-only",
    "ask_sbatch",
    is_flag=True,
    help="Also check the script with sbatch --test-only, if sbatch is installed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON list.")
@click.option("--list", "list_checks", is_flag=True, help="List all checks with id, severity and title.")
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(
    script: Path | None,
    ask_sbatch: bool,
    as_json: bool,
    list_checks: bool,
    **options: Any,
) -> None:
    """Check a job script, or the options of a job, before it is submitted.

    SCRIPT is any PBS or Slurm script. Without SCRIPT, the command checks the script that `ddp-hpc render`
    would write from the same options. Scripts are never run. The exit code is 1 if any finding is an error.
    docs/reference/lint/ has a page for each check.

    \b
    Examples:
      ddp-hpc lint job.sh
      ddp-hpc lint --profile polaris job.pbs
      ddp-hpc lint job.sbatch --test-only
      ddp-hpc lint --profile polaris --nodes 12 --queue prod --walltime 06:00:00 --account MYPROJECT
      ddp-hpc lint --json job.sh
      ddp-hpc lint --list
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.lint import run_checks as lint

    ctx = click.get_current_context()
    request = {**options, "command": ctx.meta["ddp_hpc.command"]}
    if list_checks:
        for one in lint.CHECKS.values():
            click.echo(f"{one.id:<9} {one.severity:<8} {one.title}")
        return
    if script is None:
        if ask_sbatch:
            raise RequestError("--test-only requires a script. Write one first with ddp-hpc render -o FILE.")
        if not given_options(request):
            raise RequestError("nothing to check. Give a SCRIPT, or the options of ddp-hpc render.")
        found = lint.lint_request(*request_of(request))
    else:
        profile = request.pop("profile")
        if given := given_options(request):
            raise RequestError(
                f"{script} cannot be combined with {given[0]}. Give either a script or the options of a job."
            )
        text = read_script(script)
        found = lint.lint_script(text, site_of(text, profile))
        if ask_sbatch:
            found += lint.ask_sbatch(script)
    _print(found, click.format_filename(script) if script else _REQUEST, as_json=as_json)
    ctx.exit(EXIT_FAILED if any(finding.severity == "error" for finding in found) else EXIT_DONE)


def read_script(path: Path) -> str:
    """Return the text of a job script, with bytes that are not UTF-8 as surrogates.

    Raises:
        RequestError: the path is not a regular file.
        DdpHpcError: the file cannot be read.
    """
    from ddp_hpc.lint import parse_script as script

    name = click.format_filename(path)
    try:
        return script.read_script(path, name)
    except OSError as err:
        raise DdpHpcError(f"cannot read {name}: {err.strerror}") from None


def site_of(text: str, profile: str | None) -> Site | None:
    """Return the site of --profile, or otherwise of this machine; None if its scheduler is another one."""
    from ddp_hpc.lint.parse_script import parse_script
    from ddp_hpc.schedulers.registry import is_same_scheduler
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site

    name, why = choose_profile(profile or "", "", os.environ)
    site = load_site(name)
    if not profile and not is_same_scheduler(site, parse_script(text).scheduler):
        return None
    click.echo(f"profile {name}: {why}", err=True)
    return site


def _print(found: list[LintFinding], name: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        json.dump([asdict(finding) for finding in found], sys.stdout, indent=2)
        click.echo()
        return
    for finding in found:
        click.echo(
            f"{name}:{finding.line}: {finding.severity} {finding.check}: {finding.what}; {finding.remedy}"
        )
