"""The options of `python -m ddp_hpc.job` in a job script, and the comments that explain them."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import format_walltime
from ddp_hpc.render.environment_exports import local_directory
from ddp_hpc.render.launch_lines import uses_exec
from ddp_hpc.render.shell_quoting import Raw, Word
from ddp_hpc.request.job import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESTARTS,
    REQUEUE_POLICIES,
    Job,
    default_node_check,
)
from ddp_hpc.request.program import module_of, program_of
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.resumption import Resumption, Way, resumption_of
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.profile_tables import DEFAULT_LOCAL_FOLDER
from ddp_hpc.sites.site import Site


def supervisor_options(job: Job, site: Site, layout: Layout, scheduler: Scheduler) -> list[Word]:
    """Returns the options of `python -m ddp_hpc.job` that differ from its defaults."""
    words: list[Word] = ["--scheduler", scheduler.name, "--script", Raw('"$0"')]
    if layout.walltime_s is not None:
        words += ["--walltime", format_walltime(layout.walltime_s)]
    if not scheduler.has_queue:
        return words
    if scheduler.writer.passes_arguments:
        words += ["--num-arguments", Raw('"$#"')]
    if job.max_attempts != DEFAULT_MAX_ATTEMPTS:
        words += ["--max-attempts", str(job.max_attempts)]
    if job.restarts != DEFAULT_RESTARTS:
        words += ["--restarts", str(job.restarts)]
    if job.spare_nodes:
        words += ["--spare-nodes", str(job.spare_nodes)]
    if job.min_nodes is not None:
        words += ["--min-nodes", str(job.min_nodes)]
    if job.node_check is not None and job.node_check != default_node_check(job.spare_nodes):
        words += ["--node-check", job.node_check]
    if (directory := local_directory(site)) != DEFAULT_LOCAL_FOLDER:
        words += ["--local-dir", directory]
    if job.requeue != REQUEUE_POLICIES[0]:
        words += ["--requeue", job.requeue]
    if job.signal:
        words += ["--signal", job.signal]
    if job.idle_timeout_s is not None:
        _check_exec(job, layout)
        words += ["--idle-timeout", f"{job.idle_timeout_s:g}"]
    for pattern in job.progress:
        words += ["--progress", pattern]
    if not site.pbs.submit_from_nodes:
        words.append("--no-submit")
    return words


def _check_exec(job: Job, layout: Layout) -> None:
    """Checks that `ddp-hpc exec` starts the ranks, since it reports where they are.

    Raises:
        RequestError: it does not.
    """
    option, program = f"--idle-timeout {job.idle_timeout_s:g} was given, but", program_of(job.command)
    if program is not None and program.is_trainer:
        raise RequestError(f"{option} ddp_hpc.train itself notices hangs; use its option --hang-timeout")
    is_given = module_of(job.command) == "ddp_hpc.exec" or job.command[:2] == ("ddp-hpc", "exec")
    if not (is_given or uses_exec(job, layout) or layout.launcher == "torchrun"):
        raise RequestError(
            f"{option} ddp-hpc exec, which watches a rank, does not start this command; begin it with "
            "ddp-hpc exec --, or omit --env-style"
        )


_WHEN: dict[Way, str] = {
    "snapshots": "If the run is not complete shortly before the walltime ends, it saves a snapshot, and",
    "checkpoints": "If the program saves a checkpoint and stops before the walltime ends,",
    "exit 75": "If the program saves a checkpoint and exits with code 75,",
    "signal": "If the program has saved a checkpoint when the signal before the end of the walltime ends it,",
    "unknown": "If the program saves a checkpoint and exits with code 75 (docs/how-to/any-program.md),",
}


_NOT_RESUBMITTED = "Jobs that are cancelled, or fail because of the program, are not resubmitted."
_AFTER_FAILURE = "After a failure, it first starts the ranks again in the same job (--restarts). "


def resumption_of_job(job: Job, directory: Path | None) -> Resumption:
    """Returns how the program of a job is resumed, if the job is submitted from `directory`."""
    return resumption_of(
        job.command,
        directory,
        on_signal=job.requeue == "on-signal",
        has_progress=bool(job.progress),
    )


def supervisor_comments(
    site: Site, layout: Layout, scheduler: Scheduler, resumption: Resumption, restarts: int
) -> list[str]:
    """Returns the comments about what `python -m ddp_hpc.job` does in this script."""
    if scheduler.has_queue and (warning := resumption.warning(layout.walltime_s)):
        comments = [f"{_sentence(warning)} {_sentence(resumption.how_to_resume)}"]
    elif not scheduler.inside_job.can_requeue:
        comments = ["If the run is not complete at the end, ddp_hpc.job prints how to resume it."]
    elif not site.pbs.submit_from_nodes:
        comments = [f"{_WHEN[resumption.way]} the next job with this script resumes the run."]
    else:
        comments = [
            f"{_WHEN[resumption.way]} ddp_hpc.job resubmits this script ($0) with the same account. "
            f"{_AFTER_FAILURE if restarts else ''}{_NOT_RESUBMITTED}"
        ]
    options = []
    if layout.walltime_s is not None:
        options.append("--walltime: the time limit, if the scheduler does not report it.")
    if scheduler.has_queue and local_directory(site) != DEFAULT_LOCAL_FOLDER:
        options.append("--local-dir: the node's local disk, for kernels that torch.compile writes.")
    if scheduler.writer.passes_arguments:
        options.append(
            '"$@": the arguments of the script; with --num-arguments, a resubmitted job gets them too.'
        )
    return [*comments, " ".join(options)] if options else comments


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
