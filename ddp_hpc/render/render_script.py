"""Renders job scripts: `render(job, site)` returns a script, `write_script` writes it atomically.

Every script has the same structure: directives, then as the first comment the
command line that renders it, then plain bash. It changes to the submission
directory, loads the site's software, exports variables for the ranks, and
replaces itself with the supervisor, `python -m ddp_hpc.job`, which starts the
launcher and resumes the run in another job if it is not complete. ddp-hpc must
be installed in the environment of the job, but not on the login node.
"""

from __future__ import annotations

import os
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.version import __version__
from ddp_hpc.render.check_raw_directives import check_raw_directives
from ddp_hpc.render.container import container_notes, site_for_container
from ddp_hpc.render.environment_exports import (
    Export,
    all_exports,
    multi_node_exports,
)
from ddp_hpc.render.launch_lines import launch_words, uses_exec
from ddp_hpc.render.shell_quoting import Raw, Word, sh_join
from ddp_hpc.render.supervisor_line import (
    resumption_of_job,
    supervisor_comments,
    supervisor_options,
)
from ddp_hpc.render.templates import find_template, render_own, render_shipped
from ddp_hpc.request.job import (
    DEFAULT_COMMAND,
    Job,
    given_arguments,
)
from ddp_hpc.request.part_of_node import part_of_node
from ddp_hpc.request.rank_layout import lay_out
from ddp_hpc.schedulers.registry import check_launch, scheduler_of_site
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.sites.site import Site, with_fallback


def render(job: Job, site: Site, directory: Path | None = None) -> str:
    """Returns the job script for a job at a site, exactly as it is submitted.

    With `directory`, from which the script will be submitted, the program is read there, so that the script
    says how it is resumed.

    Raises:
        RequestError: the site, its scheduler or the launcher does not support the request.
    """
    site = part_of_node(job, site_for_container(job, with_fallback(site, job.fallback)))
    layout = lay_out(job, site)
    scheduler = scheduler_of_site(site)
    check_launch(job, site, layout)
    launcher, program = launch_words(job, site, layout)
    exports = all_exports(job, site, layout, scheduler)
    job_env = [Export(name, value) for name, value in job.env.items()]
    if scheduler.writer.passes_arguments or not scheduler.has_queue:
        # The arguments of the script, such as those of `sbatch SCRIPT --epochs 3`; qsub passes none.
        program.append(Raw('"$@"'))
    launch_line = f"{sh_join(launcher)} \\\n  {sh_join(program)}" if launcher else sh_join(program)
    # These names are documented in docs/how-to/write-a-template.md.
    names: dict[str, object] = {
        "shell": site.shell,
        "version": __version__,
        "written_with": sh_join(written_with(job, site)),
        "notes": [*_notes(job, site, scheduler), *container_notes(job, program)],
        "directives": scheduler.writer.script_directives(job, site, layout),
        "job": job,
        "site": site,
        "layout": layout,
        "exports": exports,
        "multi_node": multi_node_exports(site),
        "job_env": job_env,
        "uses_exec": uses_exec(job, layout),
        "cpu_bind_why": site.why.get("cpu_bind", "") if layout.launcher == "mpiexec" else "",
        "supervisor_options": sh_join(supervisor_options(job, site, layout, scheduler)),
        "own_program": _own_program(job, site),
        "supervisor_comments": supervisor_comments(
            site, layout, scheduler, resumption_of_job(job, directory), job.restarts
        ),
        "launch_line": launch_line,
    }
    if job.template or site.template:
        text = render_own(find_template(job.template) if job.template else Path(site.template), names)
    else:
        text = render_shipped(scheduler.writer.template, names)
    check_raw_directives(text, job, scheduler)
    return text


def render_step() -> str:
    """Returns torchrun_script.sh, which `srun --nodes=2 torchrun_script.sh` runs once per node."""
    written = sh_join(["ddp-hpc", "render", "--step"])
    return render_shipped("torchrun_step.sh.j2", {"version": __version__, "written_with": written})


def written_with(job: Job, site: Site) -> list[Word]:
    """Returns the command line that renders this script, with the options that differ from the defaults."""
    words = _render_command(job, site)
    if job.command != DEFAULT_COMMAND:
        words += ["--", *job.command]
    return words


def write_script(text: str, path: Path) -> None:
    """Writes `text` to an executable file atomically.

    Raises:
        RequestError: the directory does not exist, or `path` is not a regular file.
        DdpHpcError: the file cannot be written.
    """
    from ddp_hpc.base.atomic_files import partial_file, remove_leftovers

    if not path.parent.is_dir():
        raise RequestError(
            f"cannot write {path}: the directory {path.parent} does not exist. Create it first (mkdir -p)."
        )
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is not a regular file. Choose another name for the script.")
    try:
        remove_leftovers(path.parent, "render")
        with partial_file(path, "render") as partial:
            with partial.open("xb") as file:
                file.write(script_bytes(text))
                os.fchmod(file.fileno(), 0o755)
            partial.replace(path)
    except OSError as err:
        raise DdpHpcError(f"cannot write {path}: {err.strerror}. Choose another path with -o.") from None


def script_bytes(text: str) -> bytes:
    """Encodes a script as UTF-8; other bytes from the command line are kept unchanged."""
    return text.encode("utf-8", "surrogateescape")


def _render_command(job: Job, site: Site) -> list[Word]:
    return ["ddp-hpc", "render", "--profile", site.file or site.name, *given_arguments(job)]


def _own_program(job: Job, site: Site) -> str:
    """Returns the command that renders this job with another program; empty if the job has a command."""
    if job.command != DEFAULT_COMMAND:
        return ""
    return sh_join([*_render_command(job, site), "--", "python", "PROGRAM.py"])


def _notes(job: Job, site: Site, scheduler: Scheduler) -> list[str]:
    notes = []
    if "-k doe" in site.pbs.options:
        notes.append("-j oe, -k doe: stdout and stderr go to one file, which can be read while the job runs.")
    if site.account.required and not job.account:
        notes.append(
            f"{site.title} requires an account, but this script does not set one; "
            f"submit it with: {scheduler.submit_program} {scheduler.writer.account_placeholder(site)} SCRIPT"
        )
    if not site.pbs.submit_from_nodes:
        notes.append(
            "Compute nodes cannot submit jobs at this site. If one walltime is not enough, submit the "
            "script again after the end of the job."
        )
    return notes
