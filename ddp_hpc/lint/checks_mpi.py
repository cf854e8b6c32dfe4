"""Checks of options that belong to another MPI, and of the cores on which an MPI binds its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.script_options import whole_number

_LOADS = re.compile(r"(?:module|ml)\s+(?!(?:un|r)\w*\s|-\w+\s|purge|swap)")
# Names of modules, without their directories and versions, and the MPI that they contain.
_MODULES = {
    "Open MPI": r"(?:open-?mpi|ompi|hpcx)\b\S*",
    "Intel MPI": r"(?:impi|intel-?mpi|intel-oneapi-mpi)\b\S*",
    "MPICH": r"(?:mpich|mvapich2?)\b\S*",
}
# After one of these, mpirun may be that of another MPI.
_OTHER_MPI = re.compile(
    r"(?:source|\.)\s.*(?:oneapi|setvars|mpivars)|(?:module|ml)\s+(?:purge|re\w+)\s*$|(?:export\s+)?PATH=\S*mpi"
)
# Options that the mpirun or mpiexec of an MPI does not have, and what to write instead.
_OF_HYDRA = {
    r"--?genv(?:all|none|list)?|-env(?:all|none|list)?": "-x NAME, or -x NAME=VALUE",
    r"-perhost|-ppn": "--map-by ppr:RANKS:node",
    r"-rr": "--map-by node",
    r"-bootstrap": "no such option",
}
_OF_OPEN_MPI = {
    r"--?(?:g?mca|report-bindings|oversubscribe|allow-run-as-root|display-map)": "no such option",
    r"-x": "-genv NAME VALUE",
    r"-npernode|--npernode": "-ppn RANKS",
}
# Intel MPI accepts these, but does not document them (tried with 2021.1 to 2021.19).
_UNDOCUMENTED = r"--?(?:map-by|bind-to)"
_HOSTS_OF_HYDRA = r"--?hosts|-iface|-launcher"
_FOREIGN = {
    "Open MPI": {
        **_OF_HYDRA,
        _HOSTS_OF_HYDRA: "--host, --hostfile or others, see mpirun --help",
    },
    "Intel MPI": {**_OF_OPEN_MPI, _UNDOCUMENTED: "-ppn RANKS, and I_MPI_PIN_DOMAIN"},
    "MPICH": _OF_OPEN_MPI,
    "PALS": {
        **_OF_OPEN_MPI,
        r"--?map-by": "--ppn RANKS",
        r"--?bind-to": "--cpu-bind",
        r"-x": "--env NAME=VALUE",
    },
}
_BINDS = re.compile(r"bind[-_]to|map-by|bynode|bysocket|cpus-per-(?:proc|rank)|rankfile|cpu-set|hwloc|PE=")
_CORES_OF_RANK = re.compile(
    r"\s--?(?:num[-_]?|n[-_]?)?(?:cores|threads|cpus|workers|jobs)[= ]\"?(\d{1,3})(?=[\"\s]|$)"
)
# Launchers of MPI run the program after their options, whose values may be anything.
_MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra")


def mpi_of(subject: Subject) -> str:
    """Returns the MPI that the site has, or that the script loads; empty if it is unknown."""
    if subject.site and subject.site.launch.dialect == "pals":
        return "PALS"
    words = [
        word.lower()
        for c in subject.script.commands
        if _LOADS.match(c.text)
        for word in re.split(r"[/\s]", c.text)
    ]
    last = max((c.line for c in subject.script.commands if _LOADS.match(c.text)), default=0)
    if any(c.line > last and _OTHER_MPI.match(c.text) for c in subject.script.commands if last):
        return ""
    found = {title for title, names in _MODULES.items() for word in words if re.fullmatch(names, word)}
    return found.pop() if len(found) == 1 else ""


@check("RANK028", "error", "an option of another MPI")
def _option_of_another_mpi(subject: Subject) -> Iterator[Problem]:
    yield from _type_of_mpi(subject)
    title = mpi_of(subject)
    for command in subject.script.commands if title else ():
        if command.name not in _MPIRUN or "/" in subject.value_of(command.argv[0]):
            continue
        for word in _own_options(command):
            for names, instead in _FOREIGN[title].items():
                if re.fullmatch(names, word):
                    remedy = (
                        f"use {instead}" if instead.startswith("-") else "remove it, and its values if any"
                    )
                    is_accepted = names is _UNDOCUMENTED
                    has = "does not document the" if is_accepted else "has no"
                    what = f"{command.name} of {title} {has} option {plain(word)}"
                    is_note = names in (_UNDOCUMENTED, _HOSTS_OF_HYDRA)
                    yield Problem(command.line, what, remedy, "note" if is_note else None)
        yield from _ignored_ppn(subject, command) if title == "Intel MPI" else ()


def _ignored_ppn(subject: Subject, command: Command) -> Iterator[Problem]:
    """Yields ranks per node of Intel MPI, which takes those of Slurm instead."""
    own = whole_number(subject.value_of(command.option("-ppn", "-perhost") or ""))
    of_job, is_slurm = subject.ranks_per_node, subject.scheduler.name == "slurm"
    is_open = re.search(r"_PLACEMENT|\s-(?:f|machinefile|hosts?|hostfile|bootstrap)\s", subject.script.text)
    if own and of_job and own != of_job and is_slurm and (subject.num_nodes or 1) > 1 and not is_open:
        what = f"Intel MPI takes the {of_job} tasks per node of Slurm, and ignores -ppn {own}"
        remedy = f"use --ntasks-per-node={own}, or I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=0"
        yield Problem(command.line, what, remedy, "note")


def _type_of_mpi(subject: Subject) -> Iterator[Problem]:
    """Yields steps of Open MPI 5, which knows no PMI-1 and PMI-2, with one of these types."""
    loads = (c.text for c in subject.script.commands if _LOADS.match(c.text))
    if any(re.search(r"(?i)\bopen-?mpi/5\.\d", text) for text in loads):
        for command in subject.script.launches("srun"):
            if (given := command.option("--mpi")) in ("pmi2", "pmi1"):
                what = f"Open MPI 5 does not support {given}, so each process is rank 0 of 1"
                yield Problem(command.line, what, "use srun --mpi=pmix", "note")


def _own_options(command: Command) -> list[str]:
    return [word.partition("=")[0] for word in command.own_words if word.startswith("-")]


@check("RANK029", "warning", "all threads of a rank on one core")
def _threads_on_one_core(subject: Subject) -> Iterator[Problem]:
    exports = [(line, value) for line, name, value in subject.script.exports if name == "OMP_NUM_THREADS"]
    # The supervisor adds --bind-to none.
    is_open_mpi = mpi_of(subject) == "Open MPI" and not subject.script.supervised
    for command in subject.script.launches("mpirun", "mpiexec") if is_open_mpi else ():
        exported = next((value for line, value in reversed(exports) if line < command.line), "")
        threads = whole_number(exported) or 1
        given = _CORES_OF_RANK.search(command.text)
        number = threads if threads > 1 or not given else int(given[1])
        ranks = whole_number(subject.value_of(command.option("-n", "-np", "--np") or ""))
        is_bound = _BINDS.search(command.text) or re.search(r"_BIND|MCA|SLURM_CPU_BIND", subject.script.text)
        if ranks in (1, 2) and number > 1 and not is_bound:
            kind = "threads" if threads > 1 else "threads or processes"
            what = f"with one or two ranks, Open MPI binds each to one core, so its {number} {kind} share it"
            remedy = f"add --map-by slot:PE={number}, or --bind-to none"
            yield Problem(command.line, what, remedy, None if threads > 1 else "note")
        is_set = _BINDS.search(command.text) or re.search(r"_MCA_|(?<!PROC)_BIND", subject.script.text)
        of_rank = whole_number(subject.value_of(exported)) or 1
        if (ranks or 0) > 2 and ranks == subject.num_nodes and of_rank > 8 and not is_set:
            what = f"Open MPI binds each rank to one socket or NUMA domain, which its {of_rank} threads share"
            yield Problem(command.line, what, "add --bind-to none, unless it has as many cores", "note")
