"""Checks of jobs whose programs run on fewer nodes, or as fewer tasks, than the job requests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain
from ddp_hpc.lint.checks_program_limits import IS_LIGHT, ONE_THREAD, threads_of
from ddp_hpc.lint.launch_commands import ONE_PROCESS, Start, reaches_other_nodes, requests_gpus, starts
from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import text_of
from ddp_hpc.schedulers.script_options import whole_number

_HOSTS_OF_DEEPSPEED = re.compile(r"--(?:hostfile|launcher|no_ssh|include)\b|-H$")
_OF_SEVERAL_NODES = re.compile(
    r"--(?:\w*[-_])?n?(?:machines|hostfile|nodes|gpus|workers|jobs|nnodes)\b|-H$|--launcher|--cluster|slurm|"
    r".*(?:slurm\w*|\bdeepy)\.py$"
)
# Programs that are always built with MPI, and commands that start ranks.
_WITH_MPI = re.compile(
    r"lmp(?!_serial)(?:_\w+)?|vasp_(?:std|gam|ncl)|(?:pw|ph|cp|neb|pp|projwfc|epw|turbo_\w+)\.x|cp2k\.p(?:smp|opt)|"
    r"(?:wrf|real|cesm)\.exe|nwchem|siesta|xhpl|abinit|SU2_CFD|DLPOLY\.Z|"
    r"(?!gmx|(?:setup|load|init|build|compile|make|install|run)_)\w{1,30}[._-](?:mpi|MPI)"
)
# Programs that start their own ranks on the tasks of the job, with the path that some of them need.
_WITH_OWN_RANKS = re.compile(
    r"(?:\(which )?(?:orca|ams|adf|starccm\+|fluent|ridft|dscf|jobex|molpro|gpaw|runparallel|allrun|"
    r"mpprun)\)?"
)
# Other scripts, and commands whose words this one does not show.
_HIDES_PROGRAM = re.compile(
    r"(?:(?:ba|c|k|tc|z)?sh\s+)?(?:(?!\S*logue)\S+\.c?sh|make|eval|\$\{?\w+\}?)(?:\s|$)"
)
# Partitions and clusters for jobs of one node: bwHPC, DKRZ and SDSC, PSC, LRZ, and Pittsburgh.
_FOR_ONE_NODE = re.compile(r"(?:dev_)?single|dev_gpu_\w+|shared|(?:RM|GPU)-shared|GPU-small|serial\w*|smp")
_TESTS_NODES = re.compile(
    r"\bsbatch\s[^\n]{0,200}\s(?:-N|--nodes)|\bSLURM_(?:NNODES|JOB_NUM_NODES)\b[^\n]{0,9}\s1\b"
)
# Scripts, and other solvers that may have a launcher of their own.
_MAY_START_RANKS = re.compile(
    r"(?:\./)?(?:[Aa]ll)?[Rr]un\w*|\S+\.c?sh|(?:ba|c|tc|k)?sh|make|abaqus|ansys\w*|q-?chem|matlab"
)
_NUMBER_OF_RANKS = re.compile(r"--?n[-_]?(?:p|procs?|tasks|ranks)\b|\$\{?(?i:n_?(?:p|procs?|tasks|ranks))\b")
_MAX_CHARS = 1_000  # of a path
_DISTRIBUTES = "Slurm may distribute the tasks over several nodes"
_ONE_TASK = "request --ntasks=1 and --cpus-per-task=NUMBER"
_STARTS_RANKS = re.compile(
    r"\b(?:srun|mpi(?:run|exec)(?:_\w+)?|[acijop]\w{0,4}run|charmrun|parallel|ccc_mprun|gerun|poe)\b|(?i:launch|mpi_?cmd)"
    r"|^\$\{?\w*(?i:mpi|run|para|exec)\w*\}?\s+\S"
)


@check("RANK013", "warning", "only the first node is used")
def _first_node_only(subject: Subject) -> Iterator[Problem]:
    nodes = subject.num_nodes or 1
    if nodes > 1 or subject.scheduler.name != "slurm":
        yield from _mpi_alone(subject)
    if nodes < 2 or reaches_other_nodes(subject) or subject.script.supervised:
        return
    # A program for which the script loads MPI, or requests ranks of MPI, may start it itself.
    may_spread = subject.scheduler.reader.requests_by_resources and (subject.ranks_per_node or 1) > 1
    # Chunks may be on one node.
    selects = [value for _, name, value in subject.script.resources() if name == "select"]
    may_spread |= bool(selects) and "scatter" not in subject.script.text
    may_spread |= _prepares_ranks(subject)
    for start in starts(subject):
        # A program with one of these options may start srun itself.
        of_several = _HOSTS_OF_DEEPSPEED if start.program == "deepspeed" else _OF_SEVERAL_NODES
        has_hosts = any(of_several.match(word) for word in start.words[:60])
        is_python = start.program == "python" and any(word.endswith(".py") for word in start.words[1:])
        is_alone = start.is_torchrun and start.given("--nnodes") in (None, "1") and not start.hides_options
        is_agent = start.program in ("accelerate", "deepspeed") and not start.is_torchrun
        if is_alone or (not start.is_torchrun and (is_python or is_agent) and not has_hosts):
            what = f"the job has {nodes} nodes, but {plain(start.program)} runs on the first one only"
            launcher = "mpiexec" if subject.scheduler.reader.requests_by_resources else "srun"
            remedy = f"request one node, or start it with {launcher} if it can use several nodes"
            with_ranks = any(map(_NUMBER_OF_RANKS.match, start.words)) or any(
                map(_may_start_ranks, starts(subject))
            )
            is_note = is_python and (may_spread or with_ranks or _names_launcher(start))
            # With a file of hosts in its configuration, accelerate reaches the others.
            has_config = any(word.startswith("--config") for word in start.words)
            is_note |= has_config and bool(re.search("hostfile|slots=", subject.script.text))
            yield Problem(start.command.line, what, remedy, "note" if is_note else None)
            return
    others = [
        one for one in starts(subject) if not IS_LIGHT.fullmatch(one.program) or one.program in ONE_THREAD
    ]
    if others and all(one.program in ONE_THREAD for one in others):
        what = f"the job has {nodes} nodes, but {plain(others[0].program)} can use only the first one"
        yield Problem(others[0].command.line, what, "request one node")
        return
    own = [one for one in others if re.fullmatch(r"\./[\w-]+", one.words[0])]
    if not own and {one.program for one in others} <= {"make", "Rscript", "matlab"}:
        own = others
    if own and not may_spread:
        what = f"the job has {nodes} nodes, but {plain(own[0].program)} runs on the first one only, unless it"
        remedy = "request one node, or start it with srun or mpiexec if it uses MPI"
        yield Problem(own[0].command.line, f"{what} starts others itself", remedy, "note")


def _mpi_alone(subject: Subject) -> Iterator[Problem]:
    """Yields a program with MPI that the script starts without a launcher, as one rank."""
    body = [c for c in subject.script.commands if c.name not in ("module", "ml", "echo", "source", ".")]
    if (
        not subject.has_many_tasks
        or requests_gpus(subject)
        or any(_STARTS_RANKS.search(c.text) for c in body)
    ):
        return
    for start in starts(subject):
        is_mpi4py = start.program == "python" and start.words[1:3] == ("-m", "mpi4py")
        has_mpi = is_mpi4py or _WITH_MPI.fullmatch(start.program)
        if has_mpi and {"-h", "-help", "--help", "--version"}.isdisjoint(start.words):
            # Built with OpenMP, one rank may use all CPUs of a node.
            has_threads = re.search(
                r"\somp\b|OMP_NUM_THREADS=(?!1\b)|\s-k\w* on .{0,40}\bt [2-9]", subject.script.text
            )
            is_psmp = "psmp" in start.program and "OMP_NUM_THREADS" not in subject.script.text
            is_note = has_threads or is_psmp or _are_in_background(subject)
            program = "mpi4py" if is_mpi4py else plain(start.program)
            what = f"{program} uses MPI, and without a launcher it runs as one rank"
            remedy = "write mpirun, or srun on Slurm, before it"
            yield Problem(start.command.line, what, remedy, "note" if is_note else None)
            return


def _may_start_ranks(start: Start) -> bool:
    """Returns whether a program that is not at hand may start ranks, or a variable may be a launcher."""
    is_variable = re.fullmatch(r"\$\{?\w+\}?", start.words[0][:_MAX_CHARS]) and len(start.words) > 1
    return bool(is_variable or _MAY_START_RANKS.fullmatch(start.words[0][:_MAX_CHARS]))


def _names_launcher(start: Start) -> bool:
    """Returns whether the program, if it is at hand, may start a launcher, also in another script."""
    path, program = start.subject.path, program_of(start.words)
    if program is None or program.kind != "file":
        return False
    # Scripts in a directory of their own are often submitted from the one above.
    of_path = path.absolute().parents[:2] if path else ()
    directories = [start.subject.directory] if start.subject.directory else of_path
    found = next(filter(None, (text_of(one / program.name) for one in directories)), b"")
    without_comments = re.sub(rb"(?m)^[ \t]*#.*", b"", found)
    starts_others = rb"\b(?:mpirun|mpiexec|srun|aprun|subprocess|os\.system|popen)\b"
    return bool(re.search(starts_others, without_comments))


def _prepares_ranks(subject: Subject) -> bool:
    """Returns whether the script loads MPI, sets a number of ranks, which a program may start itself, starts
    such a program, or has started ranks in a line that is a comment now.
    """
    prepares = re.compile(
        r"(?i)(?:module|ml)\s.*(?:mpi|vasp|espresso|cp2k|lammps|gromacs|orca|ansys|fluent|abaqus|"
        r"siesta|nwchem|gpaw|openfoam|\bwrf|amber|namd)|export\s+(?:\w+_COMMAND|VASP_PP_PATH|ESPRESSO_\w+)=|export\s+(?=\w+=)\w*(?:mpi|nprocs|ranks|nnodes)"
    )
    sourced = [c.argv[1] for c in subject.script.commands if c.name in ("source", ".") and len(c.argv) > 1]
    if any(_WITH_OWN_RANKS.fullmatch(command.name) for command in subject.script.commands):
        return True
    with_mpi = r"/oneapi/.*\.sh$|mpivars|(?i:sparc|vasp|gpaw|espresso|siesta|cp2k)"
    files = (file[:_MAX_CHARS] for file in sourced if not file.endswith("/activate"))
    if any(re.search(with_mpi, file) for file in files):
        return True
    was_started = re.search(r"(?m)^[ \t]*#.*\b(?:srun|mpirun|mpiexec) -n", subject.script.text)
    return bool(was_started) or any(prepares.match(command.text) for command in subject.script.commands)


@check("SLURM012", "warning", "several tasks, but no launcher")
def _python_without_srun(subject: Subject) -> Iterator[Problem]:
    if not subject.has_many_tasks or (subject.num_nodes or 1) > 1:
        return  # RANK013 reports jobs with several nodes
    yield from _mpi_alone(subject)
    if reaches_other_nodes(subject):
        return
    has_one_node = _has_one_node(subject)
    # On one node, a single process can use the CPUs of all tasks. One task per GPU suggests ranks.
    if has_one_node and not _has_task_per_gpu(subject):
        return
    cpus = whole_number(subject.script.value("--cpus-per-task")) or 1
    severity: Severity | None = "note" if _may_have_one_node(subject) else None
    others = (start for start in starts(subject) if start.program != "python" and not has_one_node)
    if start := next((s for s in others if any(number > cpus for _, number in threads_of(s))), None):
        what = f"{_DISTRIBUTES}, but {plain(start.program)} uses only the first"
        remedy = f"{_ONE_TASK}, or add --nodes=1"
        yield Problem(start.command.line, what, remedy, severity)
    pythons = [start for start in starts(subject) if _is_python_program(start)]
    if not pythons or _run_together(subject, pythons):
        return
    size = whole_number(subject.value_of(subject.script.last_assigned("WORLD_SIZE") or "")) or 1
    uses_all = size == 1 and any(ONE_PROCESS.search(start.command.text) for start in starts(subject))
    if has_one_node and uses_all:
        return
    if has_one_node:
        what = f"the job has {subject.gpus_per_node} tasks and as many GPUs, but Python is started only once"
        remedy = "request one task, or put srun in front of a program that uses MPI or torch.distributed"
    else:
        what = f"{_DISTRIBUTES}, but Python is started once, on the first"
        remedy = f"{_ONE_TASK}, or start the program with srun if it uses MPI or torch.distributed"
    # What follows may start the ranks, and Python only prepare them.
    after = (c for c in subject.script.commands if c.line > pythons[-1].command.line)
    is_unsure = has_one_node or _prepares_ranks(subject) or any(map(_names_launcher, pythons))
    is_unsure |= _are_in_background(subject) or any(_HIDES_PROGRAM.match(" ".join(c.argv)) for c in after)
    yield Problem(pythons[0].command.line, what, remedy, "note" if is_unsure else severity)


def _is_python_program(start: Start) -> bool:
    is_program = any(word.endswith(".py") for word in start.words[1:10])
    return start.program == "python" and is_program and not start.is_torchrun


def _run_together(subject: Subject, pythons: list[Start]) -> bool:
    is_repeated = len(pythons) > 1 or any(c.words[0] in ("for", "while") for c in subject.script.commands)
    return is_repeated and any(start.command.ends == "&" for start in pythons)


def _are_in_background(subject: Subject) -> bool:
    """Returns whether the script starts several commands, functions or groups of commands in the background,
    and waits for them: often serial runs, one for each task.
    """
    commands = subject.script.commands
    num_started = sum(command.ends == "&" for command in commands)
    num_started += len(re.findall(r"[)}](?:[^\n;|&]|>&){0,200}&(?![&>\d])", subject.script.text))
    is_repeated = num_started > 1 or any(c.words[0] in ("for", "while", "foreach") for c in commands)
    return num_started > 0 and is_repeated and any(command.name == "wait" for command in commands)


def _may_have_one_node(subject: Subject) -> bool:
    """Returns whether the tasks are probably on one node: whole nodes have more CPUs than they need, or
    the partition, the usage or a test in the script says so.
    """
    script = subject.script
    tasks, cpus = (whole_number(script.value(f"--{of}")) or 1 for of in ("ntasks", "cpus-per-task"))
    fits = script.value("--exclusive") in ("", "exclusive") and tasks * cpus <= 32
    names = (script.value("--partition") or "", script.value("--clusters") or "")
    # The default partition of UPPMAX is core.
    is_uppmax = not names[0] and re.search(r"(?i)\buppmax|rackham|(?:-M|--clusters)[= ]snowy", script.text)
    is_named = any(map(_FOR_ONE_NODE.fullmatch, names))
    return bool(fits or is_named or is_uppmax or _TESTS_NODES.search(script.text))


def _has_one_node(subject: Subject) -> bool:
    script = subject.script
    hosts = script.value("--nodelist") or ","
    is_one_host = re.fullmatch(r"[^,\[]+(?:\[\d+\])?", hosts) is not None
    # The partitions core and devcore of UPPMAX give cores of one node, and node gives whole nodes.
    of_uppmax = ("core", "devcore", "node")
    is_range = script.value("--nodes") == "1-1" or script.value("--partition") in of_uppmax
    # Slurm only uses nodes on which so many tasks fit (tried with 22.05).
    tasks, per_node = (whole_number(script.value(f"--ntasks{part}")) for part in ("", "-per-node"))
    of_task = whole_number(script.value("--cpus-per-task")) or 1
    is_range |= (whole_number(script.value("--mincpus")) or 0) >= (tasks or 1) * of_task
    is_range |= script.value("--overcommit") is not None  # which requests one CPU
    is_range |= bool(tasks and per_node and tasks <= per_node)
    is_range |= subject.total_gpus == 1  # each node of a job needs one of its GPUs (gres_ctld.c)
    return subject.num_nodes == 1 or is_range or is_one_host or script.value("--ntasks") is None


def _has_task_per_gpu(subject: Subject) -> bool:
    tasks = subject.ranks_per_node or whole_number(subject.script.value("--ntasks"))
    return (tasks or 0) > 1 and tasks == subject.gpus_per_node
