"""`render(job, site)` is the whole script; `write_script` puts it into a file or not at all.

The contract of every script: directives, then as the first comment the command
line that writes it again, then plain bash that needs no ddp-hpc on the login
node. It goes to the folder of submission, prepares the site's software, exports
what the compute side reads, starts the launcher in the background, hands
signals on to it, and ends with its exit code. Under a scheduler it reads the run
folder's `state` too: where the trainer says `again` it has itself run again and
ends with 75; `attempts` in the same folder counts the starts.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ddp_hpc import __version__
from ddp_hpc.batch.exports import Export, all_exports, exported_names, multi_node_exports, single_node_exports
from ddp_hpc.batch.job import DEFAULT_COMMAND, DEFAULT_MAX_ATTEMPTS, Job
from ddp_hpc.batch.launchers import MPIEXEC, dialect_of, launch_words
from ddp_hpc.batch.layout import Layout, lay_out
from ddp_hpc.batch.schedulers import scheduler_of
from ddp_hpc.batch.shell import Word, sh_join
from ddp_hpc.batch.site import Site, with_fallback
from ddp_hpc.batch.templates import find_template, render_own, render_shipped
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.units import format_walltime


def render(job: Job, site: Site) -> str:
    """The script for that job at that site, byte for byte what is submitted.

    Raises:
        RequestError: what the site, its scheduler or the launcher cannot do.
    """
    site = with_fallback(site, job.fallback)
    layout = lay_out(job, site)
    scheduler = scheduler_of(job, site, layout)
    launcher, program = launch_words(job, site, layout)
    needs_mpiexec = launcher[:1] == [MPIEXEC]
    exports = all_exports(job, site, layout, scheduler.kill_delay_s)
    single_node, multi_node = single_node_exports(site), multi_node_exports(site)
    job_env = [Export(name, value) for name, value in job.env.items()]
    launch_line = f"{sh_join(launcher)} \\\n  {sh_join(program)}" if launcher else sh_join(program)
    # docs/templates.md tells the users what each of these is.
    names: dict[str, object] = {
        "shell": site.shell,
        "version": __version__,
        "written_with": sh_join(written_with(job, site)),
        "notes": _notes(job, site, scheduler.submit),
        "directives": scheduler.directives(job, site, layout),
        "job": job,
        "site": site,
        "layout": layout,
        "exports": exports,
        "single_node": single_node,
        "multi_node": multi_node,
        "job_env": job_env,
        "exported_names": exported_names([*exports, *single_node, *multi_node, *job_env], layout),
        "needs_mpiexec": needs_mpiexec,
        "asks_mpiexec": needs_mpiexec and dialect_of(site) in ("auto", "openmpi"),
        "own_mpiexec": site.launch.own_mpiexec,
        # One's own machine may have fewer cores than ranks; Open MPI wants that said.
        "oversubscribe": ":OVERSUBSCRIBE" if site.scheduler == "local" else "",
        "tasks_per_node": 1 if layout.launcher == "torchrun" else layout.ranks_per_node,
        "cpu_bind_why": site.why.get("cpu_bind", "") if layout.launcher == "mpiexec" else "",
        "submit": _submit(job, site, scheduler.submit),
        "goes_on": scheduler.goes_on,
        "banner": _banner(site, layout, needs_mpiexec),
        "started_by_srun": launcher[:1] == ["srun"],
        "launch_line": launch_line,
    }
    if job.template or site.template:
        return render_own(find_template(job.template) if job.template else Path(site.template), names)
    return render_shipped(scheduler.template, names)


def render_step() -> str:
    """`torchrun_script.sh`: what `srun --nodes=2 torchrun_script.sh` runs once on every node."""
    written = sh_join(["ddp-hpc", "render", "--step"])
    return render_shipped("torchrun_step.sh.j2", {"version": __version__, "written_with": written})


def written_with(job: Job, site: Site) -> list[Word]:
    """The command line that writes this script again: what differs from the defaults, and no local path."""
    options: list[tuple[str, object]] = [
        ("--nodes", job.num_nodes if job.num_nodes != 1 else None),
        ("--ranks-per-node", job.ranks_per_node),
        ("--gpus-per-node", job.gpus_per_node),
        ("--cpus-per-node", job.cpus_per_node),
        ("--walltime", format_walltime(job.walltime_s) if job.walltime_s else None),
        ("--queue", job.queue),
        ("--qos", job.qos),
        ("--account", job.account),
        ("--name", job.name if job.name != "ddp" else None),
        ("--launcher", job.launcher),
        ("--mpi", job.mpi),
        *(("--env", f"{name}={value}") for name, value in job.env.items()),
        *(("--setup", line) for line in job.setup),
        ("--run-dir", job.run_dir),
        ("--filesystems", job.filesystems),
        ("--fallback", job.fallback),
        ("--max-attempts", job.max_attempts if job.max_attempts != DEFAULT_MAX_ATTEMPTS else None),
        ("--min-nodes", job.min_nodes),
        ("--template", job.template),
    ]
    words: list[Word] = ["ddp-hpc", "render", "--profile", site.file or site.name]
    for option, value in options:
        if value not in (None, ""):
            words += [option, str(value)]
    if job.command != DEFAULT_COMMAND:
        words += ["--", *job.command]
    return words


def write_script(text: str, path: Path) -> None:
    """`text` as an executable file: all of it, or the file as it was before.

    Raises:
        RequestError: the folder is missing, or `path` is something else than a plain file.
        DdpHpcError: the file system refused.
    """
    if not path.parent.is_dir():
        raise RequestError(f"{path}: the folder {path.parent} does not exist; make it first (mkdir -p)")
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is not a plain file; choose another name for the script")
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(script_bytes(text))
            os.fchmod(file.fileno(), 0o755)
        Path(temporary).replace(path)
    except OSError as err:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise DdpHpcError(
            f"{path}: cannot be written ({err.strerror}); choose another place with -o"
        ) from err


def script_bytes(text: str) -> bytes:
    """The script as it is stored; bytes of the command line that are no UTF-8 come out as they went in."""
    return text.encode("utf-8", "surrogateescape")


def _submit(job: Job, site: Site, submit: str) -> str:
    """The command that submits a script again; Grid Engine is told the group in no other way."""
    return (
        f"{submit} {site.account.option} {job.account}" if job.account and site.scheduler == "age" else submit
    )


def _notes(job: Job, site: Site, submit: str) -> list[str]:
    notes = []
    if site.scheduler == "age" and job.account:
        command = _submit(job, site, submit)
        notes.append(f"No directive names the group that pays; submit this script with: {command} SCRIPT")
    if site.account.required and not job.account:
        notes.append(
            f"{site.title} wants an account and this script names none; "
            f"submit it with: {submit} {_account_words(site)} SCRIPT"
        )
    if not site.pbs.submit_from_nodes:
        notes.append("Compute nodes may not submit here; for more than one walltime: bash SCRIPT --chain N")
    return notes


def _account_words(site: Site) -> str:
    option = {"slurm": "-A", "flux": "--setattr=bank="}.get(site.scheduler, site.account.option)
    return f"{option}PROJECT" if option.endswith("=") else f"{option} PROJECT"


def _banner(site: Site, layout: Layout, needs_mpiexec: bool) -> str:
    job_id = {
        "local": "",
        "pbs": "job ${PBS_JOBID:-none}, ",
        "slurm": "job ${SLURM_JOB_ID:-none}, ",
    }.get(site.scheduler, "job $job_id, ")
    ranks = f"{layout.ranks_per_node} ranks each" if layout.launcher == "torchrun" else "$num_ranks ranks"
    with_mpiexec = " ($mpiexec)" if needs_mpiexec else ""
    return f"ddp-hpc: {job_id}$num_nodes nodes, {ranks}, by {layout.launcher}{with_mpiexec}"
