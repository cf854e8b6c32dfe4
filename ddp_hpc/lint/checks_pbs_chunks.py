"""Checks of PBS scripts: the ranks and the threads of a chunk."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.check_registry import Problem, Subject, check, shown
from ddp_hpc.lint.checks_mpi import mpi_of
from ddp_hpc.schedulers.script_options import whole_number

_PLACES = re.compile(
    r"ppn|perhost|npernode|map-by[ =]\S*ppr|oversubscribe|host|machinefile|\s-f\s|\s-H\s|rankfile|"
    r"singularity|apptainer|allow-run-as-root"
)
_SIZED = re.compile(rf"{_PLACES.pattern}|\s--?(?:np?|c)\b|\s\$|--?(?:version|help)")
# This file is also the default.
_OWN_FILE = re.compile(r"\s--?(?:hostfile|machinefile|machine)[ =]\"?\$\{?PBS_NODEFILE\b")
# Compilers and collections with an MPI of their own.
_LOADS_OTHER = re.compile(r"(?i)(?:module|ml|source|\.)\s[^#]*(?:intel|impi|psxe|mpich|mvapich|cray|mpt\b)")
# Resources other than `nodes` that request CPUs, of PBS or a site.
_OF_CPUS = frozenset(
    ("ncpus", "ppn", "procs", "size", "select", "mppwidth", "tpn", "procs_bitmap", "naccesspolicy", "feature")
)
# How an MPI passes on a variable to the ranks.
_PASSED_ON = {
    "Open MPI": ", and mpirun -x OMP_NUM_THREADS",
    "PALS": ", or use mpiexec --env OMP_NUM_THREADS=...",
}


@check("PBS019", "note", "OMP_NUM_THREADS is set by PBS")
def _threads_of_the_chunk(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    chunks = [value for _, name, value in script.resources() if name == "select"]  # Torque sets no number
    if not chunks or "OMP_NUM_THREADS" in script.text or any("ompthreads" in value for value in chunks):
        return
    for command in script.launches("mpiexec", "mpirun"):
        ranks = command.option("--ppn", "-ppn") or str(subject.ranks_per_node or 1)
        if ranks != "1":
            what = "PBS sets OMP_NUM_THREADS to the cores of the whole chunk, and every rank uses that many"
            passed_on = _PASSED_ON.get(mpi_of(subject), "")
            remedy = f"add export OMP_NUM_THREADS=CORES_PER_RANK{passed_on}"
            yield Problem(command.line, f"{what} threads", remedy)
            return


@check("PBS021", "warning", "more ranks or threads than CPUs of a chunk")
def _ranks_on_a_small_chunk(subject: Subject) -> Iterator[Problem]:
    found = _chunks(subject)
    for chunk, sizes in found:
        num_cpus, ranks, threads = (sizes.get(name) for name in ("ncpus", "mpiprocs", "ompthreads"))
        # A core may have two hardware threads.
        if num_cpus and ranks and threads and ranks * threads > 2 * num_cpus:
            what = f"{counted(ranks, 'rank')} with {counted(threads, 'thread')} each share the "
            what += f"{counted(num_cpus, 'CPU')} of the chunk {shown(chunk)}"
            yield Problem(subject.line_of("select"), what, f"request ncpus={ranks * threads}", "note")
            break
    for command in subject.script.launches() if found else ():
        given = command.option("--ppn", "-ppn", "--npernode", "-npernode")
        per_node = whole_number(subject.value_of(given)) if given else None
        for chunk, sizes in found if per_node else ():
            num_cpus = sizes.get("ncpus")
            if per_node and num_cpus and per_node > max(num_cpus, sizes.get("mpiprocs") or 0):
                what = f"{command.name} starts {per_node} ranks on each node, but the chunk {shown(chunk)} "
                what += f"has {counted(num_cpus, 'CPU')}"
                remedy = f"request at least {per_node} CPUs in each chunk, or start fewer ranks per node"
                place = next((v for _, name, v in subject.script.resources() if name == "place"), "")
                number = re.match(r"(\d{1,4}):", chunk)
                # All chunks may be on one node, or cores have two hardware threads.
                may_fit = "pack" in place and number and int(number[1]) * num_cpus >= per_node
                may_fit = may_fit or ("excl" in place and per_node == 2 * num_cpus)
                yield Problem(command.line, what, remedy, "note" if may_fit else None)
                break


@check("PBS025", "note", "more ranks than lines of PBS_NODEFILE")
def _ranks_beyond_nodefile(subject: Subject) -> Iterator[Problem]:
    # Other MPIs start as many ranks as they are told.
    of_chunks, of_nodes = _lines_of_chunks(subject), _lines_of_nodes(subject)
    title = mpi_of(subject)
    others = any(_LOADS_OTHER.match(command.text) for command in subject.script.commands)
    others |= "I_MPI_" in subject.script.text
    slots = of_chunks or of_nodes if title == "Open MPI" or not (title or others) else 0
    for command in subject.script.launches("mpirun", "mpiexec") if slots else ():
        total = whole_number(subject.value_of(command.option("-n", "-np", "--np", "--n") or "")) or 0
        if total > slots and not _PLACES.search(_OWN_FILE.sub("", command.text)):
            lines, name = "1 line" if slots == 1 else f"{slots} lines", "mpiprocs" if of_chunks else "ppn"
            what = f"PBS_NODEFILE has {lines} without {name}, and Open MPI starts no more ranks than that"
            where = "to the chunk" if of_chunks else "after the number of nodes"
            yield Problem(command.line, what, f"add :{name}={-(-total // slots)} {where}")
    is_threaded = re.search(r"ompthreads(?!=1\b)|ngpus", subject.script.text)
    for command in subject.script.launches("mpirun", "mpiexec") if of_chunks and not is_threaded else ():
        options = _OWN_FILE.sub("", command.text)
        # A number of ranks that the script computes from this file.
        given = command.option("-n", "-np", "--np") or ""
        value = subject.script.set_once.get(given.strip("${}"), given)
        of_file = re.search(r"\bwc\b.{,40}NODEFILE|NODEFILE.{,40}\bwc\b", value) and "uniq" not in value
        of_file = of_file and "sort -u" not in value and not _PLACES.search(options)
        is_bare = not _SIZED.search(options) and len(command.words) > 1
        if of_file or is_bare:
            by = "with the number of lines of PBS_NODEFILE" if of_file else "without -n"
            what = f"{by}, {command.name} starts one rank for each chunk ({of_chunks}), as none has"
            yield Problem(
                command.line, f"{what} mpiprocs, unless the site sets it", "add :mpiprocs=RANKS to the chunk"
            )
            return


def _chunks(subject: Subject) -> list[tuple[str, dict[str, int]]]:
    """Returns the chunks of the last `select`, each with its resources that are numbers."""
    selects = [value for _, name, value in subject.script.resources() if name == "select"]
    return [
        (chunk, {name: int(value) for name, value in re.findall(r":(\w+)=(\d{1,6})\b", f":{chunk}")})
        for chunk in (selects[-1].split("+") if selects else ())
    ]


def _lines_of_chunks(subject: Subject) -> int:
    """Returns the lines of PBS_NODEFILE for chunks of several CPUs without mpiprocs; 0 for others."""
    found = _chunks(subject)
    if any("ncpus" not in sizes or "mpiprocs" in chunk for chunk, sizes in found):
        return 0
    # A chunk without mpiprocs has one line (pbs_resources(7B)).
    numbers = [(re.match(r"(\d{1,4}):", chunk), sizes["ncpus"]) for chunk, sizes in found]
    return sum(int(number[1]) if number else 1 for number, num_cpus in numbers if num_cpus > 1)


def _lines_of_nodes(subject: Subject) -> int:
    """Returns the number in `-l nodes=NUMBER`, if nothing requests several CPUs; otherwise 0."""
    given = {name: value for _, name, value in subject.script.resources()}
    number = re.fullmatch(r"(\d{1,4})(?::[A-Za-z]\w*)*", given.get("nodes", ""))
    return int(number[1]) if number and given.keys().isdisjoint(_OF_CPUS) else 0
