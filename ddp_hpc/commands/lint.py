"""The command `ddp-hpc lint`, which checks job scripts before they are submitted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, DdpHpcError
from ddp_hpc.commands.job_options import job_options

if TYPE_CHECKING:
    from ddp_hpc.lint.run_checks import LintFinding
    from ddp_hpc.sites.site import Site


# The worst first.
_SEVERITIES = ("error", "warning", "note")


@click.command("lint")
@job_options("profile")
@click.option(
    "--select",
    multiple=True,
    metavar="CHECKS",
    help="Run only these checks: IDs or their first letters, separated by commas, such as JOB001,RANK008.",
)
@click.option(
    "--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks; IDs as for --select."
)
@click.option(
    "--severity",
    type=click.Choice(_SEVERITIES),
    default=_SEVERITIES[-1],
    show_default=True,
    help="Print only findings of this severity or worse.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list.")
@click.option("--list", "list_checks", is_flag=True, help="List all checks with id, severity and title.")
@click.argument("scripts", nargs=-1, metavar="SCRIPT...", type=click.Path(path_type=Path))
@click.pass_context
def command(
    ctx: click.Context,
    profile: str | None,
    scripts: tuple[Path, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    severity: str,
    as_json: bool,
    list_checks: bool,
) -> None:
    """Check job scripts before they are submitted.

    SCRIPT is any script for PBS or Slurm; it is never run. The exit code is 1 only if a finding is an error.
    In a script with placeholders such as <account>, most findings are notes. The comment
    `# ddp-hpc: ignore[ID]` silences a check on its line. docs/reference/lint/ has a page for each check.

    \b
    Examples:
      ddp-hpc lint job.sh
      ddp-hpc lint --profile polaris job.pbs
      ddp-hpc lint --ignore RANK008 first.sbatch second.sbatch
      ddp-hpc lint --severity warning job.sh
      ddp-hpc lint --list
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.lint.run_checks import CHECKS
    from ddp_hpc.lint.select_checks import split_codes

    if list_checks:
        for check in CHECKS.values():
            click.echo(f"{check.id:<9} {check.severity:<8} {check.title}")
        return
    if not scripts:
        raise click.UsageError("nothing to check. Give a SCRIPT.")
    select, ignore = split_codes(select), split_codes(ignore)
    find_site = site_finder(profile)
    printed = _SEVERITIES[: _SEVERITIES.index(severity) + 1]
    findings = [
        (click.format_filename(script), finding)
        for script in scripts
        for finding in _findings_in(script, find_site, select, ignore)
        if finding.severity in printed
    ]
    if as_json:
        rows = [{"path": path, **asdict(finding)} for path, finding in findings]
        click.echo(json.dumps(rows, indent=2))
    elif not findings:
        # Standard output contains only findings.
        click.echo(
            "no problems found"
            if severity == "note"
            else f"no {' or '.join(f'{one}s' for one in printed)} found",
            err=True,
        )
    else:
        for path, finding in findings:
            click.echo(
                f"{path}:{finding.line}: {finding.severity} {finding.check}: {finding.what}; {finding.remedy}"
            )
    has_errors = any(finding.severity == "error" for _, finding in findings)
    ctx.exit(EXIT_FAILED if has_errors else EXIT_DONE)


def _findings_in(
    script: Path,
    find_site: Callable[[str], Site | None],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
) -> list[LintFinding]:
    from ddp_hpc.lint import run_checks as lint

    text = read_script(script)
    # A script is usually submitted from its own directory.
    here = Path.cwd() if script.resolve().parent == Path.cwd() else None
    site = find_site(text)
    findings = lint.lint_script(
        text,
        site,
        directory=here,
        path=script,
        installed_version=lint.installed_version_for(text, site),
        shell=lint.shell_for(text, site),
        select=select,
        ignore=ignore,
    )
    if not lint.has_directives(text):
        name = click.format_filename(script)
        click.echo(
            f"note: {name} has no directives of PBS or Slurm, so only its commands were checked", err=True
        )
    return findings


def read_script(path: Path) -> str:
    """Returns the text of a job script, with bytes that are not UTF-8 as surrogates.

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


def site_finder(profile: str | None) -> Callable[[str], Site | None]:
    """Returns a function that finds the site of --profile, of a script, or of this machine.

    The function returns None if the scheduler of the script is another one. The scripts of `ddp-hpc render`
    name their profile. Each profile is read only once, and named in a message.
    """
    from ddp_hpc.lint.parse_script import parse_script
    from ddp_hpc.schedulers.registry import is_same_scheduler
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site, profile_files

    load = cache(load_site)
    choose = cache(lambda: choose_profile(profile or "", "", os.environ))
    files = cache(profile_files)
    told = cache(lambda name, why: click.echo(f"profile {name}: {why}", err=True))

    def find(text: str) -> Site | None:
        script = parse_script(text)
        named = script.last_assigned("DDP_HPC_PROFILE")
        if not profile and named in files():
            name, why = str(named), "named by DDP_HPC_PROFILE in the script"
        else:
            name, why = choose()
        site = load(name)
        if not profile and not is_same_scheduler(site, script.scheduler):
            return None
        told(name, why)
        return site

    return find
