"""The commands `ddp-hpc profiles`, which list, show and check site profiles."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_hpc.commands.completion import complete_profiles

if TYPE_CHECKING:
    from ddp_hpc.sites.site import Site

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group("profiles")
def command() -> None:
    """List, show and check site profiles, and compare them with the machine.

    \b
    Put your own profile into ~/.config/ddp-hpc/profiles/NAME.toml, or pass its path: --profile ./mine.toml.
    A profile can start with `extends = "polaris"` and contain only the differences from that profile.

    \b
    Examples:
      ddp-hpc profiles list
      ddp-hpc profiles show polaris
      ddp-hpc profiles show polaris --sources --nodes 4
      ddp-hpc profiles check ./mine.toml
      ddp-hpc profiles confirm polaris -o confirm.sh
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
    rows += [(one.name, one.scheduler, one.confidence or "-", one.checked, one.title) for one in sites]
    click.echo("\n".join(aligned(rows, num_left=len(rows[0]))))


@command.command("show")
@_AS_JSON
@click.option(
    "--sources",
    is_flag=True,
    help="Print a job script instead, and below each line the facts on which it depends, with their sources.",
)
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="With --sources: nodes.")
@click.option("--launcher", default="", help="With --sources: the launcher, if not the site's default.")
@click.argument("name", shell_complete=complete_profiles)
def show_profile(name: str, as_json: bool, sources: bool, nodes: int, launcher: str) -> None:
    """Print the TOML file of a profile. With --json, print its values, with those that it inherits.

    The file cites the source of each fact. Use it as an example or as a starting point for your own profile.
    """
    from ddp_hpc.sites.site import load_site, profile_file

    if sources:
        _print_sources(load_site(name), nodes, launcher)
        return
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


@command.command("confirm")
@_AS_JSON
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the script to FILE instead of standard output.",
)
@click.argument("name", shell_complete=complete_profiles)
@click.argument("answers", required=False)
def confirm_profile(name: str, answers: str | None, as_json: bool, output: Path | None) -> None:
    """Compare a profile with its machine, in about ten minutes.

    Without ANSWERS, this writes a bash script to read and to run on a login node. Its commands only read:
    they ask the scheduler for queues and nodes, load the profile's software, and look for launchers. At the
    end, the script shows how to submit a job on two nodes, whose log is added to the answers.

    With ANSWERS, the output of the script (- for stdin), this prints for each fact what the profile says,
    what the machine says, and the result: confirmed, differs, new (the profile lacks it) or no answer.
    Nothing in the file is executed. The exit code is 1 if a fact differs, and 2 if the file does not contain
    answers for the profile.

    \b
    Examples:
      ddp-hpc profiles confirm polaris -o confirm.sh
      bash confirm.sh >answers.txt
      ddp-hpc profiles confirm polaris answers.txt
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.base.errors import RequestError
    from ddp_hpc.confirm.answers import load_answers
    from ddp_hpc.confirm.checklist import checklist
    from ddp_hpc.confirm.compare import DIFFERS, compare
    from ddp_hpc.confirm.output import as_data, as_text
    from ddp_hpc.render.render_script import write_script
    from ddp_hpc.sites.site import load_site

    site = load_site(name)
    text = checklist(site, name)
    if answers is None:
        if as_json:
            raise RequestError(
                "--json was given without ANSWERS; add the file with the answers, or omit --json"
            )
        if output is None or str(output) == "-":
            click.echo(text, nl=False)
        else:
            write_script(text, output)
        return
    if output is not None:
        raise RequestError("-o was given with ANSWERS, but it writes the script that asks. Omit one of them.")
    found = load_answers(answers, site)
    machine, facts = compare(site, found)
    if as_json:
        _print_json(as_data(site, found, machine, facts, os.environ))
    else:
        click.echo(as_text(site, facts, os.environ))
    if not found.is_complete:
        click.echo("warning: the answers end before the script did; run the script again", err=True)
    if any(fact.verdict == DIFFERS for fact in facts):
        raise click.exceptions.Exit(1)


def _print_sources(site: Site, num_nodes: int, launcher: str) -> None:
    from ddp_hpc.render.line_sources import line_sources
    from ddp_hpc.request.job import Job

    used: set[int] = set()
    account = f"{site.account.prefix}PROJECT{site.account.suffix}" if site.account.required else ""
    for line in line_sources(Job(num_nodes=num_nodes, launcher=launcher, account=account), site):
        click.echo(line.text)
        if line.facts:
            used.update(line.sources)
            numbers = ", ".join(str(number + 1) for number in line.sources)
            click.echo(f"        ^ {', '.join(line.facts)} [{numbers or 'no source'}]")
    click.echo()
    for number in sorted(used):
        source = site.sources[number]
        kind = "" if source.kind == "read" else f"{source.kind}: "
        read = f" (read {source.read})" if source.read else ""
        click.echo(f"[{number + 1}] {kind}{source.where}{read}")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
