"""Submits points as jobs, each with a script from `render`, in the same way as `ddp-hpc submit`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.bench.results_output import say
from ddp_hpc.bench.scaling import scaling_directory
from ddp_hpc.bench.scaling.points import Point, Size
from ddp_hpc.commands.job_options import request_of
from ddp_hpc.commands.scaling.choose_points import TRAINER, Request, counts, make_request
from ddp_hpc.commands.scaling.point_states import look
from ddp_hpc.commands.submit import check_findings
from ddp_hpc.lint.run_checks import LintFinding, installed_version_for, lint_script
from ddp_hpc.queue import submit as submit_module
from ddp_hpc.queue.python_environment import with_own_environment
from ddp_hpc.queue.submit import Submission
from ddp_hpc.render.rejection_warnings import advice, choices_made
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import lay_out
from ddp_hpc.schedulers.run_command import held_interrupt, need
from ddp_hpc.sites.site import Site

# Parameters of `request_of` that scaling sets for each point, so that they cannot be given as options.
_SET_PER_POINT = ("nodes", "run_dir", "max_attempts", "min_nodes", "command")


def submit_points(options: Mapping[str, Any], job_options: Sequence[str]) -> None:
    """Submits a job for each point that is neither done nor submitted, and prints the job IDs.

    With --dry-run, only prints the scripts.

    Raises:
        RequestError: the request is invalid for `render`, `lint`, the scheduler or the directory.
        DdpHpcError: the scheduler does not respond, or the directory is not writable.
    """
    option, numbers = counts(options)
    if not option:
        raise RequestError("--submit requires --nodes or --ranks, such as --nodes 1,2,4")
    given = {name: options[name] for name in job_options}
    job, site = request_of({**given, **dict.fromkeys(_SET_PER_POINT)})
    job = with_own_environment(job, Path.cwd(), os.environ)
    request = make_request(options, _sizes(job, site, option, numbers))
    folder, todo = request.folder, []
    for point in request.points:
        state = look(folder, point, request.settings, must_answer=True)
        if state.measured or state.is_live:
            say(state.line(point))
        else:
            todo.append(point)
    submissions, findings = _submissions(request, todo, job, site)
    check_findings(findings, force=False)
    if options["dry_run"]:
        for submission in submissions.values():
            sys.stdout.buffer.write(submission.content)
            sys.stdout.flush()
            say(f"would run: {shlex.join(submission.argv())}")
    elif submissions:
        scheduler = next(iter(submissions.values())).scheduler
        what = f"the jobs are for {scheduler.title}"
        program = scheduler.submit_program
        need(program, f"{what}, where {program} submits them")
        with scaling_directory.locked(folder), held_interrupt(program) as is_interrupted:
            scaling_directory.write_plan(folder, request.plan)
            _send(folder, submissions, is_interrupted)
    else:
        say("all points are done or submitted; use --gather for the table")


def _send(folder: Path, submissions: Mapping[Point, Submission], is_interrupted: Callable[[], bool]) -> None:
    for number, (point, submission) in enumerate(submissions.items()):
        so_far = (
            f"{number} of {len(submissions)} jobs were submitted; run the same command again for the others"
        )
        if is_interrupted():
            say(so_far)
            raise KeyboardInterrupt
        scaling_directory.empty_point(folder / point.folder)
        submit_module.prepare(submission)
        try:
            job_id, problem = submit_module.submit(submission)
        except DdpHpcError as error:
            if not number:
                raise
            raise DdpHpcError(f"{point}: {so_far}") from error
        click.echo(job_id)
        say(f"{point}: job {job_id}" + (f"; warning: {problem}" if problem else ""))


def _sizes(job: Job, site: Site, option: str, numbers: Sequence[int]) -> list[Size]:
    per_node = lay_out(job, site).ranks_per_node
    if option == "--nodes":
        return [Size(number * per_node, number, per_node) for number in numbers]
    for number in numbers:
        if number > per_node and number % per_node:
            raise RequestError(
                f"--ranks {number} is not a multiple of {per_node}, the number of ranks per node; use a "
                "multiple, or set --ranks-per-node"
            )
    return [Size(number, max(1, number // per_node), min(number, per_node)) for number in numbers]


def _submissions(
    request: Request, points: Sequence[Point], job: Job, site: Site
) -> tuple[dict[Point, Submission], list[LintFinding]]:
    """Returns the job of each point, and the findings of lint without duplicates."""
    submissions: dict[Point, Submission] = {}
    findings: dict[tuple[str, str], LintFinding] = {}
    notes: dict[str, None] = {}
    warnings: dict[str, None] = {}
    version: str | None = None
    for point in points:
        of_point = replace(
            job,
            num_nodes=point.size.nodes,
            ranks_per_node=point.size.ranks_per_node,
            name=f"{job.name}-{point.size.ranks}x{point.batch_size}",
            run_dir=str(request.folder / point.folder),
            command=("python", *TRAINER, *request.arguments(point)),
        )
        text = render(of_point, site)
        submissions[point] = submission = submit_module.submission_of_request(
            text, site.scheduler, Path.cwd()
        )
        if submission.run_dir is None:  # without a run directory, --gather could not find the job
            raise RequestError(
                f"the run directory of {point} cannot be determined from its script. Use a --dir "
                "without $ and `, and a --template that exports DDP_HPC_RUN_DIR."
            )
        if version is None:
            version = installed_version_for(text, site)
        notes |= dict.fromkeys(choices_made(of_point, site))
        warnings |= dict.fromkeys(advice(of_point, site))
        for finding in lint_script(text, site, num_nodes=point.size.nodes, installed_version=version):
            findings.setdefault((finding.check, finding.what), finding)
    for line in notes:
        say(line)
    for line in warnings:
        say(f"warning: {line}")
    return submissions, list(findings.values())
