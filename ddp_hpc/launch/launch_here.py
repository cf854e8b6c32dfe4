"""Builds the launch command of a job script for the current shell: arguments and environment variables.

The words and values are the same as in a script of `render`. bash evaluates them, as in the script, so that
both have the same meaning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.process_control import UMASK, umask_text
from ddp_hpc.launch.capacity import fit
from ddp_hpc.launch.find_allocation import find_allocation
from ddp_hpc.launch.rank_environment import kernel_cache_paths, launch_id, local_dir
from ddp_hpc.launch.resolve_launcher import resolve
from ddp_hpc.render.environment_exports import Export, all_exports, multi_node_exports
from ddp_hpc.render.launch_lines import launch_words
from ddp_hpc.render.shell_quoting import Word, sh, sh_join
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.allocation import THIS_MACHINE, Allocation
from ddp_hpc.schedulers.deadline import kill_delay_variable
from ddp_hpc.schedulers.registry import SCHEDULERS, check_launch, is_same_scheduler, scheduler_of_site
from ddp_hpc.sites.detect import choose_profile
from ddp_hpc.sites.site import Site, load_site, with_fallback

# Variables of runs that are resumed automatically. A manual launch does not save state unless requested.
_OF_A_CHAIN = ("DDP_HPC_RUN_DIR",)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command to execute: `argv` with an absolute program, and changes of the environment.

    `about` describes it for users, and `why` gives the reason for the profile. Each of the `num_nodes` nodes
    has `ranks_per_node` ranks, the last one possibly fewer.
    """

    argv: tuple[str, ...]
    exports: dict[str, str]
    unset: tuple[str, ...]
    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    about: str
    why: str

    def line(self) -> str:
        """Returns the command as one line of bash: `env A=B mpiexec ...`."""
        changes = [word for name in self.unset for word in ("-u", name)]
        changes += [f"{name}={value}" for name, value in self.exports.items()]
        return sh_join(["env", *changes, *self.argv])

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ` with the changes applied."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        return {**kept, **self.exports}


def plan(job: Job, profile: str, num_ranks: int | None, environ: Mapping[str, str]) -> Launch:
    """Returns the command that starts `job.command` here as `num_ranks` ranks, or as many as fit if None.

    Only ranks_per_node, launcher, mpi, env, fallback and command of `job` are used. Runs `mpiexec --version`,
    nvidia-smi and bash.

    Raises:
        RequestError: the allocation, profile or launcher does not allow the launch, or a program is missing.
    """
    if num_ranks is not None and num_ranks < 1:
        raise RequestError(f"-n must be at least 1 (got {num_ranks})")
    allocation = find_allocation(environ)
    site, why = _choose_site(profile, allocation, environ)
    site = with_fallback(site, job.fallback)
    scheduler = scheduler_of_site(site)
    if not scheduler.has_queue:
        allocation = THIS_MACHINE
    job, layout, num_ranks = fit(job, site, allocation, num_ranks, environ)
    exports = _exports_of(job, site, layout)
    words = [word for part in launch_words(job, site, layout) for word in part]
    settings = {"num_nodes": sh(str(job.num_nodes)), "num_ranks": sh(str(num_ranks))}
    variables, argv = _read_by_bash(words, exports, settings, site.env.unset, environ)
    variables |= _of_this_launch(site, {**environ, **variables})
    argv, added = resolve(argv, {**environ, **variables}, list(variables), has_queue=scheduler.has_queue)
    if argv[0] == "srun" and "SLURM_STEP_ID" in environ:
        # In the shell of `srun --pty bash`, a new step would wait forever for the CPUs of that shell.
        added["SLURM_OVERLAP"] = "1"
    path = {**environ, **variables}.get("PATH", os.defpath)
    _check_program(job, site, layout, path)
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise RequestError(
            f"the launcher {argv[0]} was not found on the PATH. Load its module, or choose another one with "
            "--launcher."
        )
    used = f"{job.num_nodes} of {allocation}" if job.num_nodes < allocation.num_nodes else f"{allocation}"
    shown = program if layout.launcher in program else f"{layout.launcher} ({program})"
    return Launch(
        argv=(program, *argv[1:]),
        exports={**added, **variables},
        unset=tuple(name for name in site.env.unset if name in environ),
        num_ranks=num_ranks,
        num_nodes=job.num_nodes,
        ranks_per_node=layout.ranks_per_node,
        about=f"{num_ranks} rank{'s' * (num_ranks > 1)} on {used}, by {shown}",
        why=f"profile {site.name}: {why}",
    )


def _choose_site(profile: str, allocation: Allocation, environ: Mapping[str, str]) -> tuple[Site, str]:
    """Returns the site and the reason for it. The allocation of this shell overrides a detected profile."""
    name, why = choose_profile(profile, "", environ)
    site = load_site(name)
    scheduler = scheduler_of_site(site)
    if is_same_scheduler(site, allocation.scheduler) or not scheduler.has_queue:
        return site, why
    is_guess = not profile and not environ.get("DDP_HPC_PROFILE")
    if allocation is not THIS_MACHINE:
        has_profiles = "writer" in SCHEDULERS[allocation.scheduler].roles
        if is_guess and not has_profiles:
            return load_site("local"), f"only this node is used, although this shell is inside {allocation}"
        if is_guess:
            return load_site(f"generic_{allocation.scheduler}"), f"inside {allocation}"
        other = f"choose one for {allocation.scheduler}" if has_profiles else "use local for this node only"
        raise RequestError(
            f"profile {site.name} ({why}) is for {site.scheduler}, but this shell is inside {allocation}. "
            f"Omit --profile, or {other}."
        )
    if is_guess and not (site.detect.host_patterns or site.detect.environment):
        # No profile matches this machine. The command of a scheduler does not prove that this is a cluster:
        # personal machines can have it too.
        return load_site("local"), f"this shell is not in an allocation ({why})"
    command = scheduler.commands.interactive_command
    raise RequestError(
        f"{site.title} ({why}) uses {site.scheduler}, but this shell is not in an allocation. Get one"
        f"{command and f' with {command}'}, or use --profile local to start ranks on this machine only."
    )


def _exports_of(job: Job, site: Site, layout: Layout) -> list[Export]:
    """Returns the exports of the script in its order; the user's variables come last and take precedence."""
    check_launch(job, site, layout)
    exports = [
        *all_exports(job, site, layout, scheduler_of_site(site)),
        *(multi_node_exports(site) if job.num_nodes > 1 else ()),
    ]
    kept = [export for export in exports if export.name not in _OF_A_CHAIN]
    return [*kept, *(Export(name, value) for name, value in job.env.items())]


def _of_this_launch(site: Site, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the supervisor would set in a job and that are not in `environ`."""
    scheduler = scheduler_of_site(site)
    variables = {"DDP_HPC_LAUNCH": launch_id(), UMASK: umask_text()}
    if scheduler.has_queue:
        variables |= kernel_cache_paths(environ, local_dir(site.node, environ))
        variables |= kill_delay_variable(scheduler)
    return {name: value for name, value in variables.items() if name not in environ}


def _read_by_bash(
    words: Sequence[Word],
    exports: Sequence[Export],
    settings: Mapping[str, str],
    unset: Sequence[str],
    environ: Mapping[str, str],
) -> tuple[dict[str, str], list[str]]:
    """Returns the exported variables and the words after evaluation by bash, as in the script."""
    names = list(dict.fromkeys(export.name for export in exports))
    lines = [
        *(f"unset {name}" for name in unset),
        *(f"export {export.name}={sh(export.value)}" for export in exports),
        *(f"printf '%s\\0' \"${name}\"" for name in names),
        *(f"{name}={value}" for name, value in settings.items()),
        f"printf '%s\\0' {sh_join(words)}",
    ]
    bash = shutil.which("bash", path=environ.get("PATH", os.defpath)) or "/bin/bash"
    try:
        # The option -p prevents bash from reading the user's startup files and functions.
        done = subprocess.run(
            [bash, "-p", "-s"],
            input=os.fsencode("\n".join([*lines, ""])),
            capture_output=True,
            env=dict(environ),
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        message = os.fsdecode(getattr(error, "stderr", b"")).strip().partition("\n")[0] or error
        raise RequestError(
            f"bash cannot evaluate the launch command: {message}. Check --env and the profile."
        ) from None
    values = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
    return dict(zip(names, values, strict=False)), values[len(names) :]


def _check_program(job: Job, site: Site, layout: Layout, path: str) -> None:
    """Checks that the program exists before ranks are started, unless it runs in a container."""
    program = job.command[0]
    is_file = os.path.isfile(program)  # noqa: PTH113 - a word, which need not be a path
    if site.launch.wrap or shutil.which(program, path=path) or (is_file and layout.launcher == "torchrun"):
        return
    problem = "is not executable (run chmod +x, or put python in front)" if is_file else "was not found"
    raise RequestError(
        f"{program} {problem}. Give the name of a program on the PATH, or the path of a program."
    )
