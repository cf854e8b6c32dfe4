"""All that is wrong with a job script, found on the login node before it costs a wait in the queue."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ddp_hpc.batch import checks_form, checks_launch, checks_pbs, checks_site, checks_slurm
from ddp_hpc.batch.checks_registry import CHECKS, Check, Finding, Seen, Severity, Subject, check, plain
from ddp_hpc.batch.job import Job
from ddp_hpc.batch.render import render
from ddp_hpc.batch.script import parse_script
from ddp_hpc.batch.site import Site

__all__ = ["CHECKS", "Check", "Finding", "Severity", "ask_sbatch", "lint_request", "lint_script"]

# Importing them is what registers the checks.
_MODULES = (checks_form, checks_pbs, checks_slurm, checks_launch, checks_site)

# The other checks have nothing to read in such a script.
_HOPELESS = "JOB001"
_TEST_ONLY_LIMIT_S = 30
# One wrong habit in a long script is one thing to mend.
_MAX_OF_ONE_CHECK = 20


def lint_script(text: str, site: Site | None = None, *, num_nodes: int | None = None) -> list[Finding]:
    """What is wrong with the script, in the order of its lines; nothing of it is run.

    With `site` it is compared with the site's facts too; `num_nodes` is for sites whose
    directives do not count nodes. Log folders are looked
    for from the current folder, as the schedulers do.
    """
    subject = Subject(script=parse_script(text), site=site, asked_nodes=num_nodes)
    found = list(CHECKS[_HOPELESS].findings(subject))
    if not found:
        for one in CHECKS.values():
            found += list(one.findings(subject))[:_MAX_OF_ONE_CHECK]
    return sorted(found, key=lambda finding: (finding.line, finding.check))


def lint_request(job: Job, site: Site) -> list[Finding]:
    """What is wrong with the script that the job gets at the site; lines are those of the rendered script.

    Raises:
        RequestError: the job cannot be rendered there at all.
    """
    return lint_script(render(job, site), site, num_nodes=job.num_nodes)


@check("SLURM900", "error", "sbatch --test-only refuses the script")
def _refused(_subject: Subject) -> Iterator[Seen]:
    # Asks the scheduler, so `ask_sbatch` does it where the user wants that.
    yield from ()


def ask_sbatch(path: Path) -> list[Finding]:
    """What the scheduler itself has against the script: `sbatch --test-only` queues nothing.

    An empty list where there is no sbatch on the PATH.
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
        what = f"sbatch --test-only gave no answer within {_TEST_ONLY_LIMIT_S} s"
    except OSError as err:
        what = f"sbatch cannot be started ({err.strerror})"
    else:
        if done.returncode == 0:
            return []
        said = done.stderr.decode("utf-8", "replace").splitlines()
        words = [re.sub(r"^(?:sbatch|allocation failure): (?:error: )?", "", line).strip() for line in said]
        what = f"sbatch --test-only says: {plain('; '.join(filter(None, words)) or 'nothing')}"
    refused = CHECKS["SLURM900"]
    remedy = "mend what it names; squeue, sinfo and sacctmgr show what the site has"
    return [Finding(check=refused.id, severity=refused.severity, line=1, what=what, remedy=remedy)]
