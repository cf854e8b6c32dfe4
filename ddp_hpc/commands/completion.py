"""Shell completion of profiles and job IDs. It asks no scheduler, and reads no profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_profiles(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Returns the names of profiles that begin with `incomplete`, and for a path, the shell's completion."""
    from click.shell_completion import CompletionItem

    from ddp_hpc.sites.site import profile_files

    if "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(name) for name in profile_files() if name.startswith(incomplete)]


def complete_jobs(context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Returns the IDs of the jobs that the run directories record, the newest first, with their runs."""
    from click.shell_completion import CompletionItem

    from ddp_hpc.queue.run_directories import runs_in
    from ddp_hpc.queue.submission_ledger import job_ids

    given = context.params.get("run_dir")
    found = {job: run.name for run in ([given] if given else runs_in(Path.cwd())) for job in job_ids(run)}
    return [
        CompletionItem(job, help=run) for job, run in reversed(found.items()) if job.startswith(incomplete)
    ]
