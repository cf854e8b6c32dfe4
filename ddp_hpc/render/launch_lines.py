"""Command lines of the launchers: one function per launcher, which returns the words of its command line.

Words are quoted once, when they are joined to text (`shell_quoting.sh_join`). Counts that are known only in
the running job are shell variables of the script: num_nodes, num_ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.render.container import container_words
from ddp_hpc.render.shell_quoting import Raw, Word
from ddp_hpc.request.job import Job
from ddp_hpc.request.program import module_of
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.raw_options import launcher_words
from ddp_hpc.schedulers.directive_values import cpus_per_task
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.site import Site

NUM_NODES = Raw('"$num_nodes"')
NUM_RANKS = Raw('"$num_ranks"')
STEP_SCRIPT, STEP_MODULE = "torchrun_script.sh", "ddp_hpc.torchrun.step"

# Modules for `python -m` that detect their rank without `ddp-hpc exec`, or start their own ranks.
_DETECT_THEIR_RANKS = ("ddp_hpc", "data_gen", "mpi4py", "torch.distributed.")

DIALECTS = ("pals", "hydra", "openmpi", "auto")

# Without this option, the other ranks would wait for a dead rank until the end of the walltime.
_END_TOGETHER = ("--kill-on-bad-exit=1",)

Words = Sequence[Word]
LauncherWords = Callable[[Job, Site, Layout], Words]


def launch_words(job: Job, site: Site, layout: Layout) -> tuple[list[Word], list[Word]]:
    """Returns the words of the launcher and the words of the command that it starts.

    Raises:
        RequestError: the launcher cannot start the command, or the profile has an unknown mpiexec dialect.
    """
    launcher = [*_LAUNCHER_WORDS[layout.launcher](job, site, layout)]
    if job.launcher_arg and not launcher:
        raise RequestError(
            "--launcher-arg was given, but torchrun starts the ranks on this machine without another "
            "launcher. Remove --launcher-arg."
        )
    options, wrap = container_words(job, site, launcher)
    launcher += [*options, *(word for text in job.launcher_arg for word in launcher_words(text))]
    if layout.launcher == "torchrun":
        _check_python(job.command)
        # The path of a script of this machine is not valid in a container, and `wrap` can start one.
        is_inside = job.container or site.launch.wrap
        return launcher, [
            *wrap,
            *(("python", "-m", STEP_MODULE) if is_inside else (STEP_SCRIPT,)),
            *job.command,
        ]
    return launcher, [*_exec(job, layout, options), *wrap, *job.command]


def _exec(job: Job, layout: Layout, options_of_container: Words) -> Words:
    """Returns the command that sets the variables of torchrun; it runs outside of a container if possible."""
    if not uses_exec(job, layout):
        return []
    return ["python", "-m", "ddp_hpc.exec"] if options_of_container else ["ddp-hpc", "exec", "--"]


def uses_exec(job: Job, layout: Layout) -> bool:
    """Returns whether the command is a Python program that does not detect its rank itself."""
    if job.env_style == "none" or layout.launcher == "torchrun":
        return False
    program = job.command[0]
    if PurePosixPath(program).name.startswith("python"):
        return not module_of(job.command).startswith(_DETECT_THEIR_RANKS)
    return program.endswith(".py")


NOT_CHECKED = (
    "the nodes are not checked before a start, because the program is not started with ddp_hpc.train, "
    "ddp-hpc exec or torchrun_script.sh; start it with ddp-hpc exec, or use --node-check off"
)
"""A warning if `runs_node_check` is false."""


def runs_node_check(words: Words) -> bool:
    """Returns whether the ranks of this launch line can check the nodes in place of the program."""
    has_command = {("ddp-hpc", "exec"), ("ddp-hpc", "train")} & {*pairwise(words)}
    return bool(has_command or {"ddp_hpc.exec", "ddp_hpc.train", STEP_SCRIPT, STEP_MODULE} & {*words})


def copies_output(job: Job, layout: Layout) -> bool:
    """Returns whether the output of each rank can be copied to a file of its own: by `ddp-hpc exec`, by
    ddp_hpc.train, or by what a program starts that is not Python.
    """
    is_python = PurePosixPath(job.command[0]).name.startswith("python") or job.command[0].endswith(".py")
    is_own = module_of(job.command) in ("ddp_hpc", "ddp_hpc.train", "ddp_hpc.exec")
    return is_own or not is_python or layout.launcher == "torchrun" or uses_exec(job, layout)


def dialect_of(site: Site) -> str:
    """Returns the kind of the site's mpiexec: pals, hydra, openmpi, or auto if the job must detect it.

    Raises:
        RequestError: the profile has another value.
    """
    if site.launch.dialect not in DIALECTS:
        raise RequestError(
            f"profile {site.name} has unknown dialect {site.launch.dialect!r}"
            f"{nearest(site.launch.dialect, DIALECTS)}; choose one of {', '.join(DIALECTS)}"
        )
    return site.launch.dialect


def _per_node(site: Site, ranks: int) -> Words:
    # The supervisor replaces this option with the one that the machine's mpiexec has.
    return ["-ppn" if dialect_of(site) == "hydra" else "--ppn", str(ranks)]


def _mpiexec(_job: Job, site: Site, layout: Layout) -> Words:
    words = ["mpiexec", "-n", NUM_RANKS, *_per_node(site, layout.ranks_per_node)]
    words += site.launch.options
    if site.launch.cpu_bind:
        words += ["--cpu-bind", "list:" + ":".join(site.launch.cpu_bind[: layout.ranks_per_node])]
    return words


def _srun(job: Job, site: Site, layout: Layout) -> Words:
    words = [*_srun_tasks(NUM_RANKS, layout.ranks_per_node, layout), *_END_TOGETHER]
    words += site.slurm.srun_options
    if job.mpi:
        words.append(f"--mpi={job.mpi}")
    return words


def _srun_tasks(num_tasks: Raw, tasks_per_node: int, layout: Layout) -> Words:
    # srun since 22.05 does not inherit --cpus-per-task from sbatch, so it is passed explicitly.
    return [
        "srun",
        Raw(f"--nodes={NUM_NODES}"),
        Raw(f"--ntasks={num_tasks}"),
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus_per_task(layout)}",
    ]


def _ibrun(_job: Job, _site: Site, _layout: Layout) -> Words:
    # ibrun detects the MPI library, and takes nodes and tasks per node from the directives.
    return ["ibrun", "-np", NUM_RANKS]


def _torchrun(job: Job, site: Site, layout: Layout) -> Words:
    """Returns the command that starts one torchrun agent per node."""
    if site.launch.default == "ibrun":
        return ["ibrun", "-np", NUM_NODES]
    agent_launcher = SCHEDULERS[site.scheduler].writer.agent_launcher
    return _AGENTS[agent_launcher](job, site, layout) if agent_launcher else []


def _srun_agent(_job: Job, site: Site, layout: Layout) -> Words:
    gpus = [text.format(devices=layout.devices) for text in site.slurm.agent_options]
    return [*_srun_tasks(NUM_NODES, 1, layout), *_END_TOGETHER, *gpus]


def _mpiexec_agent(_job: Job, site: Site, _layout: Layout) -> Words:
    words = ["mpiexec", "-n", NUM_NODES, *_per_node(site, 1)]
    # PALS would otherwise bind the agent, and thus all of its ranks, to one core.
    return [*words, "--cpu-bind", "none"] if dialect_of(site) == "pals" else words


def _check_python(command: tuple[str, ...]) -> None:
    """Checks that torchrun can start the command, which must be a Python module or file."""
    program = command[0]
    if PurePosixPath(program).name.startswith("python"):
        rest = [word for word in command[1:] if word != "-u"]
        if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            problem = f" and cannot pass it the argument {rest[0]!r}" if rest else ", but got no program"
            raise RequestError(
                f"torchrun starts Python itself{problem}. Use -- python -m MODULE or -- python FILE.py."
            )
    elif not program.endswith(".py"):
        raise RequestError(
            f"torchrun can only start Python programs, not {program!r}. Use -- python -m MODULE or -- "
            "FILE.py."
        )


_LAUNCHER_WORDS: dict[str, LauncherWords] = {
    "mpiexec": _mpiexec,
    "srun": _srun,
    "ibrun": _ibrun,
    "torchrun": _torchrun,
}

_AGENTS: dict[str, LauncherWords] = {"srun": _srun_agent, "mpiexec": _mpiexec_agent}
