"""`ddp-hpc submit`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.commands.job_options import given_options, job_options, request_of
from ddp_hpc.commands.lint import ScriptOrRequest, read_script, site_of
from ddp_hpc.errors import DdpHpcError, RequestError

if TYPE_CHECKING:
    from ddp_hpc.jobs.submit import Order
    from ddp_hpc.lint.run_checks import Finding

# `submit` makes the folder; the account comes with it.
_NO_LOG_FOLDER, _NO_ACCOUNT = "PBS011", "SITE002"


@click.command("submit", cls=ScriptOrRequest)
@job_options
@click.option("--dry-run", is_flag=True, help="Print the script and what would be run; touch nothing.")
@click.option("--force", is_flag=True, help="Submit in spite of errors that lint finds.")
@click.option(
    "--chain",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Queue N jobs of a PBS script, each after the one before; where compute nodes may not submit.",
)
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(script: Path | None, dry_run: bool, force: bool, chain: int | None, **options: Any) -> None:
    """Queue a job script, or the script that `ddp-hpc render` writes for these options.

    Prints the job's id alone. The script is linted first; errors keep it from being queued. With SCRIPT
    the only options of a request are --profile and --account, which is handed to sbatch or qsub;
    DDP_HPC_ACCOUNT is, where the script names no account.

    \b
    Examples:
      ddp-hpc submit --nodes 2 --walltime 01:00:00 -- python train.py --epochs 10
      ddp-hpc submit --profile polaris --nodes 2 --queue debug --account MYPROJECT
      ddp-hpc submit job.sh
      ddp-hpc submit jobs/polaris_ddp.pbs --account MYPROJECT
      ddp-hpc submit --nodes 2 --walltime 01:00:00 --dry-run
      job=$(ddp-hpc submit job.sh) && ddp-hpc logs "$job" --follow
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.jobs import submit as submission
    from ddp_hpc.schedulers.run_command import held_interrupt, need

    command = click.get_current_context().meta["ddp_hpc.command"]
    order, found = _order(script, {**options, "command": command})
    check_findings(found, force=force)
    scheduler = order.scheduler
    if chain:
        submission.check_chain(order, chain)
    if dry_run:
        sys.stdout.buffer.write(order.content)
        sys.stdout.flush()
        click.echo(f"would run: {shlex.join(order.argv())}", err=True)
        return
    what = f"the script's {scheduler.prefix} lines are for {scheduler.title}"
    need(scheduler.submit_program, f"{what}, which takes them by {scheduler.submit_program}")
    submission.prepare(order)
    sent = submission.send_chain(order, chain) if chain else submission.send_one(order)
    queued: list[str] = []

    def so_far() -> str:
        return f"{len(queued)} are queued; to take them back: ddp-hpc cancel {queued[0]}"

    with held_interrupt(scheduler.submit_program) as is_interrupted:
        try:
            for job_id, problem in sent:
                queued.append(job_id)
                # At once: the job is there, whatever happens to this process.
                click.echo(job_id)
                if problem:
                    click.echo(f"warning: {problem}", err=True)
                if is_interrupted():
                    click.echo(so_far(), err=True)
                    raise KeyboardInterrupt
        except DdpHpcError as error:
            if not queued:
                raise
            raise DdpHpcError(f"job {len(queued) + 1} of {chain} was refused, {so_far()}") from error
        except OSError as error:  # of stdout: the reader, such as `head`, has gone
            click.echo(f"stdout cannot be written ({error.strerror}): {so_far()}", err=True)
            raise


def _order(script: Path | None, request: dict[str, Any]) -> tuple[Order, list[Finding]]:
    """What is to be queued, and what lint has to say about it."""
    from ddp_hpc.jobs import submit as submission
    from ddp_hpc.lint import run_checks as lint
    from ddp_hpc.render.advice import advice
    from ddp_hpc.render.render_script import render

    here = Path.cwd()
    if script is None:
        if not given_options(request):
            raise RequestError("nothing to submit; give a SCRIPT, or the options of ddp-hpc render")
        job, site = request_of(request)
        text = render(job, site)
        for line in advice(job, site):
            click.echo(f"warning: {line}", err=True)
        order = submission.order_request(text, site.scheduler, here)
        return order, lint.lint_script(text, site, num_nodes=job.num_nodes)
    profile, account = request.pop("profile"), request.pop("account") or ""
    if given := given_options(request):
        raise RequestError(f"{script} and {given[0]} were given; give a script, or a request, to submit")
    text = read_script(script)
    if not account and not submission.names_account(text):
        account = os.environ.get("DDP_HPC_ACCOUNT", "")
    site_or_none = site_of(text, profile)
    found = lint.lint_script(text, site_or_none)
    option = site_or_none.account.option if site_or_none else ""
    order = submission.order_script(text, script, account, option, here)
    return order, [one for one in found if not account or one.check != _NO_ACCOUNT]


def check_findings(found: list[Finding], *, force: bool) -> None:
    """Says on stderr what lint has found in a script that is about to be submitted.

    Raises:
        RequestError: there is an error among them, and no `force`.
    """
    shown = [one for one in found if one.severity != "note" and one.check != _NO_LOG_FOLDER]
    for one in shown:
        click.echo(f"{one.severity}: {one.check}, line {one.line}: {one.what}; {one.remedy}", err=True)
    errors = sum(one.severity == "error" for one in shown)
    if errors and not force:
        counted = f"{errors} error{'s' if errors > 1 else ''}"
        raise RequestError(f"lint finds {counted}; nothing was submitted; mend them, or use --force")
