"""The launchers: each is a function from job, site and layout to the words of its command line.

Quoting happens once, where the words become text (`shell.sh_join`). Counts that
only the running job knows are shell variables of the script: num_nodes, num_ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.layout import Layout
from ddp_hpc.batch.schedulers import cpus_per_task
from ddp_hpc.batch.shell import Raw, Word
from ddp_hpc.batch.site import Site
from ddp_hpc.errors import RequestError, nearest

NUM_NODES = Raw('"$num_nodes"')
NUM_RANKS = Raw('"$num_ranks"')
MPIEXEC = Raw('"$mpiexec"')
HOSTS = Raw('"$hosts"')
STEP_SCRIPT = Raw('"$step_script"')
# The script fills this array after it has asked mpiexec what it is.
PER_NODE = Raw('"${per_node[@]}"')

# Without it the ranks beside a dead one wait for it until the walltime.
_END_TOGETHER = ("--kill-on-bad-exit=1",)
# Said aloud, as a site may have made 1 the default (KillOnBadExit).
_GO_ON_WITHOUT_THE_LOST = ("--no-kill", "--kill-on-bad-exit=0")

Words = Sequence[Word]
Launcher = Callable[[Job, Site, Layout], Words]


def launch_words(job: Job, site: Site, layout: Layout) -> tuple[list[Word], list[Word]]:
    """The launcher's own words, and the words of what it starts.

    Raises:
        RequestError: a command that the launcher cannot start, or an unknown mpiexec dialect in the profile.
    """
    launcher = [*LAUNCHERS[layout.launcher](job, site, layout)]
    if layout.launcher == "torchrun":
        _check_python(job.command)
        return launcher, [*site.launch.wrap, STEP_SCRIPT, *job.command]
    return launcher, [*site.launch.wrap, *job.command]


def dialect_of(site: Site) -> str:
    """Which mpiexec the site has: pals, hydra, openmpi, or auto where the script has to ask.

    Raises:
        RequestError: for any other word in the profile.
    """
    if site.launch.dialect not in _PER_NODE:
        known = tuple(_PER_NODE)
        raise RequestError(
            f"profile {site.name} names dialect {site.launch.dialect!r}{nearest(site.launch.dialect, known)}"
            f"; use one of {', '.join(known)}"
        )
    return site.launch.dialect


def _mpiexec(_job: Job, site: Site, layout: Layout) -> Words:
    words = [MPIEXEC, "-n", NUM_RANKS, *_PER_NODE[dialect_of(site)](layout.ranks_per_node)]
    if site.scheduler == "age":
        words += ["--hostfile", HOSTS]
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
    # srun >= 22.05 does not take --cpus-per-task from sbatch, so it is given again.
    return [
        "srun",
        Raw(f"--nodes={NUM_NODES}"),
        Raw(f"--ntasks={num_tasks}"),
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus_per_task(layout)}",
    ]


def _ibrun(_job: Job, _site: Site, _layout: Layout) -> Words:
    # It finds the MPI beneath, and takes nodes and tasks a node from the directives.
    return ["ibrun", "-np", NUM_RANKS]


def _flux(_job: Job, _site: Site, layout: Layout) -> Words:
    return [
        "flux",
        "run",
        "--exclusive",
        Raw(f"--nodes={NUM_NODES}"),
        f"--tasks-per-node={layout.ranks_per_node}",
    ]


def _torchrun(job: Job, site: Site, layout: Layout) -> Words:
    """One agent a node, which starts the node's ranks by itself."""
    if site.launch.default == "ibrun":
        return ["ibrun", "-np", NUM_NODES]
    if site.scheduler == "slurm":
        end = _GO_ON_WITHOUT_THE_LOST if job.min_nodes else _END_TOGETHER
        gpus = [text.format(devices=layout.devices) for text in site.slurm.agent_options]
        return [*_srun_tasks(NUM_NODES, 1, layout), *end, *gpus]
    if site.scheduler == "pbs":
        words = [MPIEXEC, "-n", NUM_NODES, *_PER_NODE[dialect_of(site)](1)]
        # PALS would otherwise bind the agent, and with it all the ranks, to one core.
        return [*words, "--cpu-bind", "none"] if dialect_of(site) == "pals" else words
    return []


def _check_python(command: tuple[str, ...]) -> None:
    """Torchrun brings the interpreter: what follows `python` has to be a module or a file."""
    program = command[0]
    if PurePosixPath(program).name.startswith("python"):
        rest = [word for word in command[1:] if word != "-u"]
        if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            raise RequestError(
                f"torchrun starts Python itself and cannot give it {rest[0] if rest else 'no program'!r}; "
                "use -- python -m MODULE or -- python FILE.py"
            )
    elif not program.endswith(".py"):
        raise RequestError(
            f"torchrun starts Python programs and {program!r} is none; use -- python -m MODULE or -- FILE.py"
        )


LAUNCHERS: dict[str, Launcher] = {
    "mpiexec": _mpiexec,
    "srun": _srun,
    "ibrun": _ibrun,
    "flux": _flux,
    "torchrun": _torchrun,
}

_PER_NODE: dict[str, Callable[[int], Words]] = {
    "pals": lambda n: ["--ppn", str(n)],
    "hydra": lambda n: ["-ppn", str(n)],
    # Which variables Open MPI has to be told to hand on is known only when the script runs.
    "openmpi": lambda _: [PER_NODE],
    "auto": lambda _: [PER_NODE],
}
