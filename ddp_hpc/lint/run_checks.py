"""Run all checks on a job script before it is submitted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ddp_hpc.lint import (
    checks_commands,
    checks_conda,
    checks_containers,
    checks_devices,
    checks_effects,
    checks_environment,
    checks_form,
    checks_job_steps,
    checks_launch,
    checks_launched_program,
    checks_mail,
    checks_mpi,
    checks_output,
    checks_pbs,
    checks_pbs_chunks,
    checks_placeholders,
    checks_program_arguments,
    checks_program_limits,
    checks_rendezvous,
    checks_request,
    checks_sbatch,
    checks_shell,
    checks_site,
    checks_slurm,
    checks_start_options,
    checks_syntax,
    checks_traps,
    checks_unused_nodes,
    checks_variables,
)
from ddp_hpc.lint.check_registry import CHECKS, LintFinding, Subject
from ddp_hpc.lint.kind_of_file import without_unsubmitted
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.lint.select_checks import chosen_checks, without_ignored
from ddp_hpc.schedulers.registry import NO_SCHEDULER, SCHEDULERS
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.detect import may_be_here
from ddp_hpc.sites.site import Site

__all__ = [
    "CHECKS",
    "LintFinding",
    "has_directives",
    "installed_version_for",
    "lint_script",
    "shell_for",
]

# Importing these modules registers their checks.
_MODULES = (
    checks_form,
    checks_placeholders,
    checks_request,
    checks_syntax,
    checks_pbs,
    checks_pbs_chunks,
    checks_sbatch,
    checks_mail,
    checks_slurm,
    checks_job_steps,
    checks_launch,
    checks_traps,
    checks_unused_nodes,
    checks_launched_program,
    checks_rendezvous,
    checks_variables,
    checks_conda,
    checks_commands,
    checks_shell,
    checks_environment,
    checks_program_arguments,
    checks_program_limits,
    checks_start_options,
    checks_containers,
    checks_effects,
    checks_mpi,
    checks_output,
    checks_devices,
    checks_site,
)

# The checks of whether the text is a script; if it is none, the other checks are skipped.
_IS_A_SCRIPT = ("JOB001", "JOB027")
# Maximum number of findings of one check, in case a long script repeats a mistake on every line.
_MAX_OF_ONE_CHECK = 20


def lint_script(
    text: str,
    site: Site | None = None,
    *,
    num_nodes: int | None = None,
    directory: Path | None = None,
    path: Path | None = None,
    installed_version: str = "",
    shell: str = "",
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    is_submitted: bool = False,
) -> list[LintFinding]:
    """Returns the findings for a script, ordered by line. The script is not run.

    With `site`, the script is also compared with the site's profile. Give `num_nodes` for a site whose
    directives do not contain the number of nodes. `directory` is the directory from which the script will be
    submitted; without it, log directories with relative paths are not checked. `path` is the file of the
    script; its name may say that it is a template, and the programs beside it that it is a part of others.
    `installed_version` is the version of the scheduler if the profile contains none, see
    `installed_version_for`. `shell` is the program of /bin/sh on the nodes, such as bash, if it is known.
    `select` and `ignore` are ids of checks, or their beginnings.
    With `is_submitted`, the findings are those of a job script, whatever the name and the text of the file,
    and nobody will replace its placeholders.

    Raises:
        RequestError: no check has an id, or the beginning of an id, in `select` or `ignore`.
    """
    checks = chosen_checks(select, ignore)
    subject = Subject(
        script=parse_script(text),
        site=site,
        asked_nodes=num_nodes,
        directory=directory,
        path=path,
        installed_version=installed_version,
        shell=shell,
    )
    first = [CHECKS[id_] for id_ in _IS_A_SCRIPT if not id_.startswith(tuple(ignore))]
    findings = [found for one in first for found in one.findings(subject)]
    template = subject.template if findings and findings[0].check == "JOB027" else None
    if not findings or (template and not template.has_statements):
        # Those of other checks are needed, too: they may say that the script is to be filled in.
        for one in CHECKS.values():
            if one not in first:
                findings += islice(one.findings(subject), _MAX_OF_ONE_CHECK)
    if template:
        findings = [f for f in findings if f.line not in template.lines or f.check == "JOB027"]
    findings = list(without_ignored(findings, subject.script.lines))
    if not is_submitted:
        findings = list(without_unsubmitted(findings, subject.script, path))
    chosen = {one.id for one in (*first, *checks)}
    left = (f for f in findings if f.check in chosen)
    return sorted(left, key=lambda finding: (finding.line, finding.check))


def has_directives(text: str) -> bool:
    """Returns whether a script has directives of a known scheduler; otherwise, only commands are checked."""
    return bool(parse_script(text).scheduler)


def installed_version_for(text: str, site: Site | None) -> str:
    """Returns the version of the script's scheduler on this machine, such as 25.05.3.

    The version is empty if the scheduler is not installed, and if `site` is another machine or contains the
    version.
    """
    scheduler = _scheduler_here(text, site)
    is_in_profile = site is not None and scheduler.reader.version_of(site)
    return "" if is_in_profile else scheduler.commands.installed_version()


def shell_for(text: str, site: Site | None) -> str:
    """Returns what /bin/sh is on this machine, such as bash or dash; empty if jobs run on another one."""
    is_here = _scheduler_here(text, site).commands.installed_version()
    return Path("/bin/sh").resolve().name if is_here else ""


def _scheduler_here(text: str, site: Site | None) -> Scheduler:
    """Returns the scheduler of a script; NO_SCHEDULER, which has no version, if `site` is another machine."""
    is_here = site is None or may_be_here(site.detect, os.environ)
    return SCHEDULERS.get(parse_script(text).scheduler, NO_SCHEDULER) if is_here else NO_SCHEDULER
