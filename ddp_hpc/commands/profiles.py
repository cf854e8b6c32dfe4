"""`ddp-hpc profiles`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group("profiles")
def command() -> None:
    """The sites that scripts can be rendered for.

    \b
    Your own profile goes to ~/.config/ddp-hpc/profiles/NAME.toml, or anywhere: --profile ./mine.toml.
    It may begin with `extends = "polaris"` and hold only what differs.

    \b
    Examples:
      ddp-hpc profiles list
      ddp-hpc profiles show polaris
      ddp-hpc profiles check ./mine.toml
    """  # noqa: D301 - a true \b tells click to leave the lines alone


@command.command("list")
def list_profiles() -> None:
    """Every profile: name, scheduler, how sure its facts are, when they were checked, title."""
    from ddp_hpc.batch.site import load_site, profile_files

    sites = [load_site(name) for name in profile_files()]
    width = max(len(site.name) for site in sites)
    for site in sites:
        sure = site.confidence or "-"
        click.echo(f"{site.name:<{width}}  {site.scheduler:<5}  {sure:<6}  {site.checked}  {site.title}")


@command.command("show")
@click.argument("name")
def show_profile(name: str) -> None:
    """The profile's file as it is, sources and dates included, to read or to start your own from."""
    from ddp_hpc.batch.site import profile_file

    path = Path(name) if name.endswith(".toml") else profile_file(name)
    sys.stdout.buffer.write(path.read_bytes())


@command.command("check")
@click.argument("files", metavar="FILE.toml...", nargs=-1, required=True, type=click.Path(path_type=Path))
def check_profiles(files: tuple[Path, ...]) -> None:
    """Says what is wrong in profiles, all of it, with file and line; exit code 2 where something is.

    Each is also rendered, for one node and for two.
    """
    from ddp_hpc.batch.check_profile import faults_of
    from ddp_hpc.errors import RequestError

    faults = [fault for path in files for fault in faults_of(path)]
    for fault in faults[:-1]:
        click.echo(f"error: {fault}", err=True)
    if faults:
        raise RequestError(faults[-1])
