"""Run all checks on a job script before it is submitted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ddp_hpc.lint import (
    checks_form,
    checks_launch,
    checks_launched_program,
    checks_pbs,
    checks_sbatch,
    checks_site,
    checks_slurm,
)
from ddp_hpc.lint.check_registry import CHECKS, LintFinding, Problem, Subject, check, plain
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.lint.select_checks import chosen_checks, without_ignored
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.schedulers.registry import NO_SCHEDULER, SCHEDULERS
from ddp_hpc.sites.detect import may_be_here
from ddp_hpc.sites.site import Site

__all__ = [
    "CHECKS",
    "LintFinding",
    "ask_sbatch",
    "has_directives",
    "installed_version_for",
    "lint_request",
    "lint_script",
]

# Importing these modules registers their checks.
_MODULES = (
    checks_form,
    checks_pbs,
    checks_sbatch,
    checks_slurm,
    checks_launch,
    checks_launched_program,
    checks_site,
)

# If this check has a finding, the text is not a script, and the other checks are skipped.
_IS_A_SCRIPT = "JOB001"
_TEST_ONLY_LIMIT_S = 30
# Maximum number of findings of one check, in case a long script repeats a mistake on every line.
_MAX_OF_ONE_CHECK = 20


def lint_script(
    text: str,
    site: Site | None = None,
    *,
    num_nodes: int | None = None,
    directory: Path | None = None,
    installed_version: str = "",
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> list[LintFinding]:
    """Returns the findings for a script, ordered by line. The script is not run.

    With `site`, the script is also compared with the site's profile. Give `num_nodes` for a site whose
    directives do not contain the number of nodes. `directory` is the directory from which the script will be
    submitted; without it, log directories with relative paths are not checked. `installed_version` is the
    version of the scheduler if the profile contains none, see `installed_version_for`. `select` and `ignore`
    are ids of checks, or their beginnings.

    Raises:
        RequestError: no check has an id, or the beginning of an id, in `select` or `ignore`.
    """
    checks = chosen_checks(select, ignore)
    subject = Subject(
        script=parse_script(text),
        site=site,
        asked_nodes=num_nodes,
        directory=directory,
        installed_version=installed_version,
    )
    findings = list(CHECKS[_IS_A_SCRIPT].findings(subject))
    if not findings:
        for chosen in checks:
            findings += islice(chosen.findings(subject), _MAX_OF_ONE_CHECK)
    left = without_ignored(findings, subject.script.lines)
    return sorted(left, key=lambda finding: (finding.line, finding.check))


def has_directives(text: str) -> bool:
    """Returns whether a script has directives of a known scheduler; otherwise, only commands are checked."""
    return bool(parse_script(text).scheduler)


def installed_version_for(text: str, site: Site | None) -> str:
    """Returns the version of the script's scheduler on this machine, such as 25.05.3.

    The version is empty if the scheduler is not installed, and if `site` is another machine or contains the
    version.
    """
    scheduler = SCHEDULERS.get(parse_script(text).scheduler, NO_SCHEDULER)
    if site is not None and (scheduler.reader.version_of(site) or not may_be_here(site.detect, os.environ)):
        return ""
    return scheduler.commands.installed_version()


def lint_request(
    job: Job,
    site: Site,
    *,
    directory: Path | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> list[LintFinding]:
    """Returns the findings for the script that is rendered for the job; lines refer to that script.

    `directory` is that of `lint_script`.

    Raises:
        RequestError: the job cannot be rendered for the site.
    """
    text = render(job, site, directory)
    version = installed_version_for(text, site)
    return lint_script(
        text,
        site,
        num_nodes=job.num_nodes,
        directory=directory,
        installed_version=version,
        select=select,
        ignore=ignore,
    )


@check("SLURM900", "error", "sbatch --test-only rejects the script")
def _refused(_subject: Subject) -> Iterator[Problem]:
    # Only `ask_sbatch` returns this finding, because it runs sbatch, which users must request.
    yield from ()


def ask_sbatch(path: Path) -> list[LintFinding]:
    """Returns the errors that `sbatch --test-only` reports. Nothing is queued.

    The list is empty if sbatch is not on the PATH.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return []
    try:
        done = subprocess.run(
            [sbatch, "--test-only", str(path.resolve())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TEST_ONLY_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"sbatch --test-only did not finish within {_TEST_ONLY_LIMIT_S} s"
    except OSError as err:
        what = f"cannot start sbatch: {err.strerror}"
    else:
        if done.returncode == 0:
            return []
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        messages = [
            re.sub(r"^(?:sbatch|allocation failure): (?:error: )?", "", line).strip() for line in lines
        ]
        what = f"sbatch --test-only reports: {plain('; '.join(filter(None, messages)) or 'no message')}"
    refused = CHECKS["SLURM900"]
    remedy = "fix the request; sinfo and sacctmgr show the partitions and accounts of the site"
    return [LintFinding(check=refused.id, severity=refused.severity, line=1, what=what, remedy=remedy)]
