"""The command `ddp-hpc submit`, which submits a script, or the script that `render` would write."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.option_names import OptionError
from ddp_hpc.commands.job_options import ScriptOrRequest, all_job_options, given_options, request_of
from ddp_hpc.commands.lint import read_script, site_of

if TYPE_CHECKING:
    from ddp_hpc.lint.run_checks import LintFinding
    from ddp_hpc.queue.submit import Submission
    from ddp_hpc.schedulers.commands import Overrides

# Checks that do not apply, since `submit` creates the log directory and passes the account to the scheduler.
_NO_LOG_DIRECTORY, _NO_ACCOUNT = "PBS011", "SITE002"
# This check reports repeated directives, but the options of `submit` override directives on purpose.
_OVERRIDDEN = "JOB007"


@click.command("submit", cls=ScriptOrRequest)
@all_job_options()
@click.option(
    "--dry-run", is_flag=True, help="Print the script and the submit command without submitting the job."
)
@click.option("--force", is_flag=True, help="Submit the script even if lint reports errors.")
@click.option(
    "--chain",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Submit a PBS script as N jobs that run one after the other, for sites where compute "
    "nodes cannot submit jobs.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per job, each on its line: the job ID, the run directory and others.",
)
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(
    script: Path | None, dry_run: bool, force: bool, chain: int | None, as_json: bool, **options: Any
) -> None:
    """Submit a job script, or the script that `ddp-hpc render` would write for the same options.

    Standard output contains only the job ID, or with --json an object. The command first checks the script
    with `ddp-hpc lint`, and does not submit it if there are errors. With SCRIPT, the options --account,
    --name, --nodes, --qos, --queue and --walltime are passed to sbatch or qsub, where they override the
    directives; if neither --account nor the script sets an account, DDP_HPC_ACCOUNT is used. Under Slurm, the
    arguments after -- are passed to the script.

    \b
    Examples:
      ddp-hpc submit --nodes 2 --walltime 01:00:00 -- python train.py --epochs 10
      ddp-hpc submit --profile polaris --nodes 2 --queue debug --account MYPROJECT
      ddp-hpc submit job.sh
      ddp-hpc submit jobs/polaris_ddp.pbs --account MYPROJECT --nodes 4 --walltime 01:00:00
      ddp-hpc submit jobs/generic_slurm_ddp.sbatch -- --epochs 3
      ddp-hpc submit --nodes 2 --walltime 01:00:00 --dry-run
      job=$(ddp-hpc submit job.sh) && ddp-hpc logs "$job" --follow
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue import submit as submit_module
    from ddp_hpc.schedulers.run_command import need

    command = click.get_current_context().meta["ddp_hpc.command"]
    if dry_run and as_json:
        raise RequestError(
            "--json cannot be combined with --dry-run, as no job is submitted; omit one of them"
        )
    submission, found = _submission(script, {**options, "command": command})
    check_findings(found, force=force)
    scheduler = submission.scheduler
    if chain:
        submit_module.check_chain(submission, chain)
    _warn(submit_module.conflict(submission))
    if dry_run:
        sys.stdout.buffer.write(submission.content)
        sys.stdout.flush()
        click.echo(f"would run: {shlex.join(submission.argv())}", err=True)
        return
    program, prefix = scheduler.submit_program, scheduler.prefix
    need(program, f"the script's {prefix} lines are for {scheduler.title}, which requires {program}")
    submit_module.prepare(submission)
    sent = submit_module.submit_chain(submission, chain) if chain else submit_module.submit_one(submission)
    _print_jobs(sent, program, chain, _json_line(submission) if as_json else str)


def _json_line(submission: Submission) -> Callable[[str], str]:
    """Returns a function that describes a job as one line of JSON."""

    def line(job_id: str) -> str:
        facts = {
            "job_id": job_id,
            "scheduler": submission.scheduler.name,
            "script": str(submission.work_dir / submission.path),
            "run_dir": str(submission.run_dir) if submission.run_dir else None,
            "work_dir": str(submission.work_dir),
        }
        return json.dumps(facts)

    return line


def _print_jobs(
    sent: Iterator[tuple[str, str]], program: str, chain: int | None, line_of: Callable[[str], str]
) -> None:
    """Prints a line about each job as soon as it is submitted."""
    from ddp_hpc.schedulers.run_command import held_interrupt

    queued: list[str] = []

    def progress() -> str:
        jobs = f"{len(queued)} job was" if len(queued) == 1 else f"{len(queued)} jobs were"
        return f"{jobs} submitted; to cancel: ddp-hpc cancel {queued[0]}"

    with held_interrupt(program) as is_interrupted:
        try:
            for job_id, problem in sent:
                queued.append(job_id)
                # Print the ID immediately: the job exists even if this process fails now.
                click.echo(line_of(job_id))
                if problem:
                    click.echo(f"warning: {problem}", err=True)
                if is_interrupted():
                    click.echo(progress(), err=True)
                    raise KeyboardInterrupt
        except DdpHpcError as error:
            if not queued:
                raise
            raise DdpHpcError(f"job {len(queued) + 1} of {chain} was rejected; {progress()}") from error
        except OSError as error:  # stdout was closed by its reader, such as `head`
            click.echo(f"cannot write to stdout ({error.strerror}): {progress()}", err=True)
            raise


def _submission(script: Path | None, request: dict[str, Any]) -> tuple[Submission, list[LintFinding]]:
    """Returns the job to submit, and the findings of lint."""
    from ddp_hpc.lint import run_checks as lint
    from ddp_hpc.queue import submit as submit_module
    from ddp_hpc.queue.python_environment import explain, with_own_environment
    from ddp_hpc.render.rejection_warnings import advice, choices_made
    from ddp_hpc.render.render_script import render

    here = Path.cwd()
    if script is None:
        if not given_options(request):
            raise RequestError("nothing to submit; give a SCRIPT, or the options of ddp-hpc render")
        job, site = request_of(request)
        job = with_own_environment(job, here, os.environ)
        _note(explain(job.python_env, os.environ))
        text = render(job, site, here)
        for line in choices_made(job, site):
            _note(line)
        for line in advice(job, site):
            click.echo(f"warning: {line}", err=True)
        submission = submit_module.submission_of_request(text, site.scheduler, here)
        version = lint.installed_version_for(text, site)
        found = lint.lint_script(
            text, site, num_nodes=job.num_nodes, directory=here, installed_version=version
        )
        return submission, found
    profile, account = request.pop("profile"), request.pop("account") or ""
    arguments, overrides = request.pop("command"), _overrides(request)
    if given := given_options(request):
        raise RequestError(
            f"{script} cannot be combined with {given[0]}; use --account, --name, --nodes, --qos, --queue or "
            "--walltime, or render a new script"
        )
    text = read_script(script)
    if not account and not submit_module.names_account(text):
        account = os.environ.get("DDP_HPC_ACCOUNT", "")
    site_or_none = site_of(text, profile)
    submission = submit_module.submission_of_script(
        text, script, here, account=account, overrides=overrides, arguments=arguments, site=site_or_none
    )
    _note(explain(submission.python_env, os.environ, is_passed=True))
    version = lint.installed_version_for(text, site_or_none)
    linted, added = submit_module.as_linted(submission, overrides, site_or_none)
    found = [
        # Lines after the added directives have different line numbers in the user's file.
        replace(one, line=one.line if one.line < added.start else max(added.start - 1, one.line - len(added)))
        for one in lint.lint_script(linted, site_or_none, directory=Path.cwd(), installed_version=version)
        if not (account and one.check == _NO_ACCOUNT) and not (one.check == _OVERRIDDEN and one.line in added)
    ]
    return submission, found


def _warn(text: str) -> None:
    if text:
        click.echo(f"warning: {text}", err=True)


def _note(text: str) -> None:
    if text:
        click.echo(f"note: {text}", err=True)


def _overrides(request: dict[str, Any]) -> Overrides:
    """Removes the options that override directives from the request, and returns them."""
    from ddp_hpc.schedulers.commands import Overrides

    walltime_s, nodes = request.pop("walltime"), request.pop("nodes")
    if nodes is not None and nodes < 1:
        raise OptionError("nodes", nodes, "must be at least 1")
    names = {name: request.pop(name) or "" for name in ("queue", "qos", "name")}
    return Overrides(num_nodes=nodes or 0, walltime_s=walltime_s or 0, **names)


def check_findings(found: list[LintFinding], *, force: bool) -> None:
    """Prints the findings of lint on stderr, before the script is submitted.

    Raises:
        RequestError: a finding is an error, and `force` is not set.
    """
    shown = [one for one in found if one.severity != "note" and one.check != _NO_LOG_DIRECTORY]
    for one in shown:
        click.echo(f"{one.severity}: {one.check}, line {one.line}: {one.what}; {one.remedy}", err=True)
    errors = sum(one.severity == "error" for one in shown)
    if errors and not force:
        counted = f"{errors} error{'s' if errors > 1 else ''}"
        raise RequestError(
            f"lint found {counted}, and nothing was submitted; fix the script, or use --force "
            "to submit it anyway"
        )
