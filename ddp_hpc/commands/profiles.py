"""The commands `ddp-hpc profiles`, which list, show and check site profiles."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from ddp_hpc.commands.completion import complete_profiles

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group("profiles")
def command() -> None:
    """List, show and check site profiles.

    \b
    Put your own profile into ~/.config/ddp-hpc/profiles/NAME.toml, or pass its path: --profile ./mine.toml.
    A profile can start with `extends = "polaris"` and contain only the differences from that profile.

    \b
    Examples:
      ddp-hpc profiles list
      ddp-hpc profiles show polaris
      ddp-hpc profiles check ./mine.toml
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines


@command.command("list")
@_AS_JSON
def list_profiles(as_json: bool) -> None:
    """List all profiles, one per line.

    The columns are the name, the scheduler, the confidence, the date of the last check, and the title.
    """
    from ddp_hpc.base.text_table import aligned
    from ddp_hpc.sites.site import load_site, profile_files

    sites = [load_site(name) for name in profile_files()]
    if as_json:
        names = ("name", "scheduler", "confidence", "checked", "title")
        _print_json([{name: getattr(site, name) for name in names} for site in sites])
        return
    rows = [("name", "scheduler", "confidence", "checked", "site")]
    rows += [(site.name, site.scheduler, site.confidence or "-", site.checked, site.title) for site in sites]
    click.echo("\n".join(aligned(rows, num_left=len(rows[0]))))


@command.command("show")
@_AS_JSON
@click.argument("name", shell_complete=complete_profiles)
def show_profile(name: str, as_json: bool) -> None:
    """Print the TOML file of a profile. With --json, print its values, with those that it inherits.

    The file cites the source of each fact. Use it as an example or as a starting point for your own profile.
    """
    from ddp_hpc.sites.site import load_site, profile_file

    if as_json:
        _print_json(asdict(load_site(name)))
        return
    path = Path(name) if name.endswith(".toml") else profile_file(name)
    sys.stdout.buffer.write(path.read_bytes())


@command.command("check")
@click.argument("files", metavar="FILE.toml...", nargs=-1, required=True, type=click.Path(path_type=Path))
def check_profiles(files: tuple[Path, ...]) -> None:
    """Report all errors in profiles, with file and line. The exit code is 2 if there are errors.

    The check also renders job scripts for one node and for two nodes from each profile.
    """
    from ddp_hpc.base.errors import RequestError
    from ddp_hpc.render.validate_site_profile import faults_of

    faults = [fault for path in files for fault in faults_of(path)]
    for fault in faults[:-1]:
        click.echo(f"error: {fault}", err=True)
    if faults:
        raise RequestError(faults[-1])


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
