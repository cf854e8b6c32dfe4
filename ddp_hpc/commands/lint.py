"""The command `ddp-hpc lint`, which checks job scripts before they are submitted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, DdpHpcError, RequestError
from ddp_hpc.commands.job_options import JobCommand, given_options, job_options, request_of

if TYPE_CHECKING:
    from ddp_hpc.lint.run_checks import LintFinding
    from ddp_hpc.sites.site import Site

_REQUEST = "the request"


class ScriptOrRequest(JobCommand):
    """A command with an optional SCRIPT. The arguments after `--` are the command of the job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments before `--`, and stores the arguments after it in the context."""
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
@click.option(
    "--select",
    multiple=True,
    metavar="CHECKS",
    help="Run only these checks: IDs or their first letters, separated by commas, such as JOB001,RANK008.",
)
@click.option(
    "--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks; IDs as for --select."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list.")
@click.option("--list", "list_checks", is_flag=True, help="List all checks with id, severity and title.")
@click.argument("scripts", nargs=-1, metavar="[SCRIPT]...", type=click.Path(path_type=Path))
def command(
    scripts: tuple[Path, ...],
    ask_sbatch: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    as_json: bool,
    list_checks: bool,
    **options: Any,
) -> None:
    """Check job scripts, or the options of a job, before they are submitted.

    SCRIPT is any script for PBS or Slurm. Without SCRIPT, the command checks the script that `ddp-hpc
    render` would write from the same options. Scripts are never run. The exit code is 1 if any finding is
    an error; warnings and notes do not change it. The comment `# ddp-hpc: ignore[ID]` silences a check on
    its line. docs/reference/lint/ has a page for each check.

    \b
    Examples:
      ddp-hpc lint job.sh
      ddp-hpc lint --profile polaris job.pbs
      ddp-hpc lint job.sbatch --test-only
      ddp-hpc lint --profile polaris --nodes 12 --queue prod --walltime 06:00:00 --account MYPROJECT
      ddp-hpc lint --ignore RANK008 first.sbatch second.sbatch
      ddp-hpc lint --list
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    ctx = click.get_current_context()
    if list_checks:
        _list_checks()
        return
    from ddp_hpc.lint.select_checks import split_codes

    request = {**options, "command": ctx.meta["ddp_hpc.command"]}
    request |= {"select": split_codes(select), "ignore": split_codes(ignore)}
    if scripts:
        found = _lint_scripts(scripts, request, test=ask_sbatch)
    else:
        found = _lint_options(request, test=ask_sbatch)
    if as_json:
        click.echo(json.dumps([{"path": path, **asdict(finding)} for path, finding in found], indent=2))
    elif not found:
        # Standard output contains only findings.
        click.echo("no problems found", err=True)
    else:
        for path, finding in found:
            click.echo(
                f"{path}:{finding.line}: {finding.severity} {finding.check}: {finding.what}; {finding.remedy}"
            )
    ctx.exit(EXIT_FAILED if any(one.severity == "error" for _, one in found) else EXIT_DONE)


def _list_checks() -> None:
    from ddp_hpc.lint.run_checks import CHECKS

    for one in CHECKS.values():
        click.echo(f"{one.id:<9} {one.severity:<8} {one.title}")


def _lint_scripts(
    scripts: tuple[Path, ...], request: dict[str, Any], *, test: bool
) -> list[tuple[str, LintFinding]]:
    from ddp_hpc.lint import run_checks as lint

    profile, select, ignore = (request.pop(name) for name in ("profile", "select", "ignore"))
    if given := given_options(request):
        raise RequestError(
            f"{scripts[0]} cannot be combined with {given[0]}. Give either scripts or the options of a job."
        )
    found: list[tuple[str, LintFinding]] = []
    for script in scripts:
        name, text = click.format_filename(script), read_script(script)
        # A script is usually submitted from its own directory.
        here = Path.cwd() if script.resolve().parent == Path.cwd() else None
        site = site_of(text, profile)
        of_script = lint.lint_script(
            text,
            site,
            directory=here,
            installed_version=lint.installed_version_for(text, site),
            select=select,
            ignore=ignore,
        )
        of_script += lint.ask_sbatch(script) if test else []
        if not lint.has_directives(text):
            click.echo(
                f"note: {name} has no directives of PBS or Slurm, so only its commands were checked",
                err=True,
            )
        found += [(name, one) for one in of_script]
    return found


def _lint_options(request: dict[str, Any], *, test: bool) -> list[tuple[str, LintFinding]]:
    from ddp_hpc.lint import run_checks as lint

    select, ignore = request.pop("select"), request.pop("ignore")
    if test:
        raise RequestError("--test-only requires a script. Write one first with ddp-hpc render -o FILE.")
    if not given_options(request):
        raise RequestError("nothing to check. Give a SCRIPT, or the options of ddp-hpc render.")
    found = lint.lint_request(*request_of(request), directory=Path.cwd(), select=select, ignore=ignore)
    return [(_REQUEST, one) for one in found]


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


def site_of(text: str, profile: str | None) -> Site | None:
    """Returns the site of --profile, of the script, or of this machine; None if its scheduler is another one.

    The scripts of `ddp-hpc render` name their profile.
    """
    from ddp_hpc.lint.parse_script import parse_script
    from ddp_hpc.schedulers.registry import is_same_scheduler
    from ddp_hpc.sites.detect import choose_profile
    from ddp_hpc.sites.site import load_site, profile_files

    script = parse_script(text)
    named = script.last_assigned("DDP_HPC_PROFILE")
    if not profile and named in profile_files():
        name, why = str(named), "named by DDP_HPC_PROFILE in the script"
    else:
        name, why = choose_profile(profile or "", "", os.environ)
    site = load_site(name)
    if not profile and not is_same_scheduler(site, script.scheduler):
        return None
    click.echo(f"profile {name}: {why}", err=True)
    return site
