"""The launch line of a job script, for the shell that one sits in: words of an argv, and variables.

Words and values are those that `render` writes. bash reads them here as it would in the script, so that
both mean the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc import local_mpi
from ddp_hpc.assets import asset_folder
from ddp_hpc.batch.allocation import THIS_MACHINE, Allocation, find_allocation
from ddp_hpc.batch.detect import choose_profile
from ddp_hpc.batch.exports import Export, all_exports, exported_names, multi_node_exports, single_node_exports
from ddp_hpc.batch.find_mpiexec import find_mpiexec, per_node_words, version_of
from ddp_hpc.batch.fit import fit
from ddp_hpc.batch.job import Job
from ddp_hpc.batch.launchers import MPIEXEC, PER_NODE, STEP_SCRIPT, launch_words
from ddp_hpc.batch.layout import Layout
from ddp_hpc.batch.schedulers import scheduler_of
from ddp_hpc.batch.shell import Word, sh, sh_join
from ddp_hpc.batch.site import Site, load_site, with_fallback
from ddp_hpc.errors import RequestError

# The schedulers whose allocations are understood, and the command that gives one.
_GETS_ONE = {"pbs": "qsub -I", "slurm": "salloc"}
# What belongs to a run that goes on by itself: a launch by hand keeps nothing that nobody asked for.
_OF_A_CHAIN = ("DDP_HPC_RUN_DIR", "DDP_HPC_MAX_ATTEMPTS")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be executed: `argv` with an absolute program, and what changes in the environment.

    `about` says for people what it is, `why` why this profile was taken. Of `num_ranks` on `num_nodes`
    each node has `ranks_per_node`, the last one perhaps fewer.
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
        """The whole as one line of bash: `env A=B mpiexec ...`."""
        changes = [word for name in self.unset for word in ("-u", name)]
        changes += [f"{name}={value}" for name, value in self.exports.items()]
        return sh_join(["env", *changes, *self.argv])

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with the changes."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        return {**kept, **self.exports}


def plan(job: Job, profile: str, num_ranks: int | None, environ: Mapping[str, str]) -> Launch:
    """How `job.command` is started as `num_ranks` ranks here; None: as many as there is room for.

    Of `job` count ranks_per_node, launcher, mpi, env, fallback and command. Starts `mpiexec --version`,
    nvidia-smi and bash, and on a machine without a scheduler perhaps two ranks on trial.

    Raises:
        RequestError: what the allocation, the profile or the launcher cannot do; a program is missing.
    """
    if num_ranks is not None and num_ranks < 1:
        raise RequestError(f"-n {num_ranks} was given; at least 1 rank is needed")
    allocation = find_allocation(environ)
    site, why = _choose_site(profile, allocation, environ)
    site = with_fallback(site, job.fallback)
    if site.scheduler == "local":
        allocation = THIS_MACHINE
    job, layout, num_ranks = fit(job, site, allocation, num_ranks, environ)
    exports = _exports_of(job, site, layout)
    words = [word for part in launch_words(job, site, layout) for word in part]
    settings, more = _settings(words, exports, site, layout, environ)
    settings |= {"num_nodes": sh(str(job.num_nodes)), "num_ranks": sh(str(num_ranks))}
    variables, argv = _read_by_bash(words, exports, settings, site.env.unset, {**environ, **more})
    path = {**environ, **variables}.get("PATH", os.defpath)
    _check_program(job, site, layout, path)
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise RequestError(
            f"{argv[0]} was not found on the PATH; it starts the ranks at {site.title}; load its module, or "
            "choose another one with --launcher"
        )
    used = f"{job.num_nodes} of {allocation}" if job.num_nodes < allocation.num_nodes else f"{allocation}"
    told = program if layout.launcher in program else f"{layout.launcher} ({program})"
    return Launch(
        argv=(program, *argv[1:]),
        exports={**more, **variables},
        unset=tuple(name for name in site.env.unset if name in environ),
        num_ranks=num_ranks,
        num_nodes=job.num_nodes,
        ranks_per_node=layout.ranks_per_node,
        about=f"{num_ranks} rank{'s' * (num_ranks > 1)} on {used}, by {told}",
        why=f"profile {site.name}: {why}",
    )


def _choose_site(profile: str, allocation: Allocation, environ: Mapping[str, str]) -> tuple[Site, str]:
    """The profile's facts and why it was chosen: what is guessed gives way to what this shell is in."""
    name, why = choose_profile(profile, "", environ)
    site = load_site(name)
    if site.scheduler in (allocation.scheduler, "local"):
        return site, why
    is_guess = not profile and not environ.get("DDP_HPC_PROFILE")
    if site.scheduler not in _GETS_ONE:
        raise RequestError(
            f"{site.title} ({why}) has {site.scheduler}, and launch knows allocations of "
            f"{' and '.join(_GETS_ONE)}; write a script with ddp-hpc render, or say --profile local to start "
            "ranks on this machine alone"
        )
    if allocation is not THIS_MACHINE:
        if is_guess:
            return load_site(f"generic_{allocation.scheduler}"), f"inside {allocation}"
        raise RequestError(
            f"profile {site.name} is of a machine with {site.scheduler} ({why}), and this is inside "
            f"{allocation}; leave --profile out, or name one with {allocation.scheduler}"
        )
    if is_guess and not (site.detect.host_patterns or site.detect.environment):
        # Only a scheduler's command is here, at most: one's own machine may have it too.
        return load_site("local"), f"this shell is in no allocation ({why})"
    raise RequestError(
        f"{site.title} ({why}) has {site.scheduler}, and this shell is in no allocation; get one with "
        f"{_GETS_ONE[site.scheduler]}, or say --profile local to start ranks on this machine alone"
    )


def _exports_of(job: Job, site: Site, layout: Layout) -> list[Export]:
    """What the script would export, in its order; the user's own come last, and win."""
    exports = [
        *all_exports(job, site, layout, scheduler_of(job, site, layout).kill_delay_s),
        *(multi_node_exports(site) if job.num_nodes > 1 else single_node_exports(site)),
    ]
    kept = [export for export in exports if export.name not in _OF_A_CHAIN]
    return [*kept, *(Export(name, value) for name, value in job.env.items())]


def _settings(
    words: Sequence[Word], exports: Sequence[Export], site: Site, layout: Layout, environ: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The script's own variables that these words name, as text of bash, and exports that mpiexec needs."""
    settings: dict[str, str] = {}
    more: dict[str, str] = {}
    if MPIEXEC in words:
        mpiexec, more = _mpiexec(site, environ)
        settings["mpiexec"] = sh(mpiexec)
        if PER_NODE in words:
            names = ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *more, *exported_names([*exports], layout)]
            there = {*environ, *more, *(export.name for export in exports)}
            per_node = per_node_words(
                version_of(mpiexec, environ),
                1 if layout.launcher == "torchrun" else layout.ranks_per_node,
                [name for name in dict.fromkeys(names) if name in there],
                may_oversubscribe=site.scheduler == "local",
            )
            settings["per_node"] = f"({sh_join(per_node)})"
    if words[0] == "srun" and "SLURM_STEP_ID" in environ:
        # In the shell of `srun --pty bash` a step would wait for ever for the CPUs of that shell.
        more["SLURM_OVERLAP"] = "1"
    if STEP_SCRIPT in words:
        on_path = shutil.which("torchrun_script.sh", path=environ.get("PATH", os.defpath))
        settings["step_script"] = sh(on_path or str(asset_folder("jobs") / "torchrun_script.sh"))
    return settings, more


def _mpiexec(site: Site, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The mpiexec to use, and the variables that go with it."""
    if site.scheduler != "local":
        return find_mpiexec(environ), {}
    path, its_environ, _ = local_mpi.choose(environ.get("DDP_HPC_MPIEXEC"))
    return str(path), {name: value for name, value in its_environ.items() if environ.get(name) != value}


def _read_by_bash(
    words: Sequence[Word],
    exports: Sequence[Export],
    settings: Mapping[str, str],
    unset: Sequence[str],
    environ: Mapping[str, str],
) -> tuple[dict[str, str], list[str]]:
    """The exported variables and the words, as the script's bash would hand them to the launcher."""
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
        # -p: none of the user's own files and functions.
        done = subprocess.run(
            [bash, "-p", "-s"],
            input=os.fsencode("\n".join([*lines, ""])),
            capture_output=True,
            env=dict(environ),
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = os.fsdecode(getattr(error, "stderr", b"")).strip().partition("\n")[0] or error
        raise RequestError(
            f"bash cannot read the launch line ({said}); look at --env and the profile"
        ) from None
    found = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
    return dict(zip(names, found, strict=False)), found[len(names) :]


def _check_program(job: Job, site: Site, layout: Layout, path: str) -> None:
    """A program that is not there is known before ranks are started; within a container nobody can tell."""
    program = job.command[0]
    is_file = os.path.isfile(program)  # noqa: PTH113 - a word, which need not be a path
    if site.launch.wrap or shutil.which(program, path=path) or (is_file and layout.launcher == "torchrun"):
        return
    what = "cannot be executed (chmod +x, or put python in front)" if is_file else "was not found"
    raise RequestError(f"{program} {what}; give a program that is on the PATH, or its path")
