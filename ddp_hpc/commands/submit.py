"""The command `ddp-hpc submit`, which submits a script, or the script that `render` would write."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.job_options import ScriptOrRequest, all_job_options, given_options, request_of
from ddp_hpc.commands.lint import read_script, site_finder

if TYPE_CHECKING:
    from ddp_hpc.lint.run_checks import LintFinding
    from ddp_hpc.queue.submit import Submission

# Checks that do not apply, since `submit` creates the log directory and passes the account to the scheduler.
_NO_LOG_DIRECTORY, _NO_ACCOUNT = "PBS011", "SITE002"
_TEMPLATE = "JOB027"


@click.command("submit", cls=ScriptOrRequest)
@all_job_options()
@click.option(
    "--dry-run", is_flag=True, help="Print the script and the submit command without submitting the job."
)
@click.option("--force", is_flag=True, help="Submit the script even if lint reports errors.")
@click.option(
    "--forget-nodes",
    is_flag=True,
    help="Also use nodes that have failed in earlier jobs of the run.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON object with the job ID, the run directory and others.",
)
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(
    script: Path | None, dry_run: bool, force: bool, forget_nodes: bool, as_json: bool, **options: Any
) -> None:
    """Submit a job script, or the script that `ddp-hpc render` would write for the same options.

    Standard output contains only the job ID, or with --json an object. The command first checks the script
    with `ddp-hpc lint`, and does not submit it if there are errors. With SCRIPT, the only option of a job is
    --account; if neither --account nor the script sets an account, DDP_HPC_ACCOUNT is used. Under Slurm, the
    arguments after -- are passed to the script.

    \b
    Examples:
      ddp-hpc submit --nodes 2 --walltime 01:00:00 -- python train.py --epochs 10
      ddp-hpc submit --profile polaris --nodes 2 --queue debug --account MYPROJECT
      ddp-hpc submit job.sh
      ddp-hpc submit jobs/polaris_ddp.pbs --account MYPROJECT
      ddp-hpc submit jobs/generic_slurm_ddp.sbatch -- --epochs 3
      ddp-hpc submit --nodes 2 --walltime 01:00:00 --dry-run
      ddp-hpc submit job.sh --forget-nodes
      job=$(ddp-hpc submit job.sh) && ddp-hpc logs "$job" --follow
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue import submit as submit_module
    from ddp_hpc.queue.failed_nodes import forget_failed_nodes
    from ddp_hpc.schedulers.run_command import need

    command = click.get_current_context().meta["ddp_hpc.command"]
    if dry_run and as_json:
        raise RequestError(
            "--json cannot be combined with --dry-run, as no job is submitted; omit one of them"
        )
    submission, findings = _submission(script, {**options, "command": command})
    check_findings(findings, force=force)
    scheduler = submission.scheduler
    _warn(submit_module.conflict(submission))
    if not forget_nodes:
        submission, left_out = submit_module.without_failed_nodes(submission)
        _note(left_out)
    if dry_run:
        sys.stdout.buffer.write(submission.content)
        sys.stdout.flush()
        click.echo(f"would run: {shlex.join(submission.argv())}", err=True)
        return
    program, prefix = scheduler.submit_program, scheduler.prefix
    need(program, f"the script's {prefix} lines are for {scheduler.title}, which requires {program}")
    _warn(submit_module.unfinished_job(submission))
    if forget_nodes and submission.run_dir is not None:
        forget_failed_nodes(submission.run_dir)
    submit_module.prepare(submission)
    _send(submission, as_json=as_json)


def _send(submission: Submission, *, as_json: bool) -> None:
    """Submits the job and prints its ID."""
    from ddp_hpc.queue import submit as submit_module
    from ddp_hpc.schedulers.run_command import held_interrupt

    with held_interrupt(submission.scheduler.submit_program) as is_interrupted:
        job_id, problem = submit_module.submit(submission)
        facts = {
            "job_id": job_id,
            "scheduler": submission.scheduler.name,
            "script": str(submission.work_dir / submission.path),
            "run_dir": str(submission.run_dir) if submission.run_dir else None,
            "work_dir": str(submission.work_dir),
        }
        submitted = f"job {job_id} was submitted; to cancel it: ddp-hpc cancel {shlex.quote(job_id)}"
        try:
            click.echo(json.dumps(facts) if as_json else job_id)
        except OSError as error:  # stdout was closed by its reader, such as `head`
            click.echo(f"cannot write to stdout ({error.strerror}): {submitted}", err=True)
            raise
        _warn(problem)
        if is_interrupted():
            click.echo(submitted, err=True)
            raise KeyboardInterrupt


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
        return submission, lint.lint_script(
            text, site, num_nodes=job.num_nodes, directory=here, installed_version=version
        )
    profile, account = request.pop("profile"), request.pop("account") or ""
    arguments = request.pop("command")
    if given := given_options(request):
        raise RequestError(
            f"{script} cannot be combined with {given[0]}; change the directives of the script, or render a "
            "new one"
        )
    text = read_script(script)
    if not account and not submit_module.names_account(text):
        account = os.environ.get("DDP_HPC_ACCOUNT", "")
    site_or_none = site_finder(profile)(text)
    submission = submit_module.submission_of_script(
        text, script, here, account=account, arguments=arguments, site=site_or_none
    )
    version = lint.installed_version_for(text, site_or_none)
    findings = lint.lint_script(
        text, site_or_none, directory=here, path=script, installed_version=version, is_submitted=True
    )
    return submission, [each for each in findings if not (account and each.check == _NO_ACCOUNT)]


def _warn(text: str) -> None:
    if text:
        click.echo(f"warning: {text}", err=True)


def _note(text: str) -> None:
    if text:
        click.echo(f"note: {text}", err=True)


def check_findings(findings: list[LintFinding], *, force: bool) -> None:
    """Prints the findings of lint on stderr, before the script is submitted.

    Raises:
        RequestError: a finding is an error, and `force` is not set.
    """
    # A template has only a note of lint, but the scheduler would get its placeholders.
    findings = [replace(each, severity="error") if each.check == _TEMPLATE else each for each in findings]
    shown = [each for each in findings if each.severity != "note" and each.check != _NO_LOG_DIRECTORY]
    for each in shown:
        click.echo(f"{each.severity}: {each.check}, line {each.line}: {each.what}; {each.remedy}", err=True)
    errors = sum(each.severity == "error" for each in shown)
    if errors and not force:
        counted = f"{errors} error{'s' if errors > 1 else ''}"
        raise RequestError(
            f"lint found {counted}, and nothing was submitted; fix the script, or use --force "
            "to submit it anyway"
        )
