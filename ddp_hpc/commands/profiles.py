"""`ddp-hpc profiles`."""

from __future__ import annotations

import sys

import click


@click.group("profiles")
def command() -> None:
    """The sites that scripts can be rendered for."""


@command.command("list")
def list_profiles() -> None:
    """Every profile: name, scheduler, the date its facts were checked, title."""
    from ddp_hpc.batch.site import load_site, profile_files

    sites = [load_site(name) for name in profile_files()]
    width = max(len(site.name) for site in sites)
    for site in sites:
        click.echo(f"{site.name:<{width}}  {site.scheduler:<5}  {site.checked}  {site.title}")


@command.command("show")
@click.argument("name")
def show_profile(name: str) -> None:
    """The profile's file as it is, to read or to start your own (~/.config/ddp-hpc/profiles/NAME.toml)."""
    from ddp_hpc.batch.site import profile_file

    sys.stdout.buffer.write(profile_file(name).read_bytes())
