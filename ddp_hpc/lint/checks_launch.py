"""Checks of the launch commands and the rendezvous of ranks, under any scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import (
    ONE_PROCESS,
    Start,
    expanded_in_shell,
    has_whole_nodes,
    reaches_other_nodes,
    single_quoted,
    starts,
    trains_with_torch,
)
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.schedulers.script_options import whole_number

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0")
_SIGNALS = re.compile(r"(?:SIG)?(?:TERM|USR1|USR2|INT|HUP)|1|2|10|12|15")
_OF_A_TASK = re.compile(r"\$\{?(SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID)\b")
_HOSTNAME = re.compile(
    r"\bMASTER_ADDR=[\"']?(?:\$\(\s*(?:/bin/)?hostname\b[^)|]*\)|`hostname\b[^`|]*`|\$\{?HOSTNAME\}?)"
)
_OF_SEVERAL_NODES = re.compile(
    r"--(?:num|n)?[-_]?(?:machines|hostfile|nodes|gpus|workers|jobs|nnodes)\b|-H$|--launcher|--cluster|slurm|"
    r".*(?:slurm\w*|\bdeepy)\.py$"
)


def _torchruns(subject: Subject) -> list[Start]:
    """Returns each command that starts torchrun."""
    return [start for start in starts(subject) if start.is_torchrun]


@check("RANK001", "error", "torchrun started once per rank")
def _torchrun_per_rank(subject: Subject) -> Iterator[Problem]:
    for start in _torchruns(subject):
        per_node = start.ranks_per_node if start.is_launched else None
        if per_node and per_node > 1 and not _is_for_one_rank(start):
            yield Problem(
                start.command.line,
                f"{start.command.name} starts torchrun {per_node} times per node, and each torchrun "
                "starts all ranks of the node",
                "start torchrun once per node (--ntasks-per-node=1, --ppn 1), or start python instead",
            )


def _is_for_one_rank(start: Start) -> bool:
    # The tasks of srun may be independent trainings of one rank, each with its own port.
    return start.given("--nproc-per-node") in (None, "1") and start.given("--nnodes") in (None, "1")


@check("RANK002", "error", "torchrun does not connect the nodes")
def _torchrun_alone(subject: Subject) -> Iterator[Problem]:
    if any(command.words[0] in ("for", "while") for command in subject.script.commands):
        return
    for start in _torchruns(subject):
        nodes = start.num_nodes or 1
        if nodes < 2 or start.hides_options or start.launcher_hides_options:
            continue
        given = start.given("--nnodes")
        if start.is_launched and (start.has("--standalone") or given in (None, "1")):
            if start.has("--standalone") or start.given("--rdzv-endpoint") is None:
                yield Problem(
                    start.command.line,
                    f"{start.command.name} starts torchrun on {nodes} nodes, but each node trains on its own",
                    f"use torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT",
                )
        elif (
            not start.is_launched and whole_number(given) not in (None, 1) and not _is_remote(subject, start)
        ):
            yield Problem(
                start.command.line,
                f"torchrun --nnodes waits for {given} nodes, but the script starts it on the first node only",
                "put srun --ntasks-per-node=1, or mpiexec --ppn 1, in front of it",
            )


def _is_remote(subject: Subject, start: Start) -> bool:
    return start.command.name in ("ssh", "pbsdsh", "pdsh") or reaches_other_nodes(subject)


@check("RANK003", "error", "more ranks than GPUs")
def _more_ranks_than_gpus(subject: Subject) -> Iterator[Problem]:
    gpus = subject.gpus_per_node
    if not gpus:
        return
    for start in starts(subject):
        if start.is_torchrun:
            ranks = whole_number(start.given("--nproc-per-node"))
        elif start.is_launched and start.program == "python" and trains_with_torch(subject):
            ranks = start.ranks_per_node
        else:
            continue
        if ranks and ranks > gpus:
            yield Problem(
                start.command.line,
                f"{ranks} ranks per node share {gpus} GPUs, but NCCL rejects two ranks on one device",
                f"start {gpus} ranks per node, or request {ranks} GPUs",
            )


@check("RANK004", "warning", "the number of ranks is not nodes x ranks per node")
def _literal_ranks(subject: Subject) -> Iterator[Problem]:
    nodes = subject.num_nodes or 0
    for command in subject.script.launches():
        if command.name not in ("mpiexec", "mpirun"):
            continue
        total = whole_number(command.option("-n", "-np", "--np", "--n"))
        own = whole_number(command.option("--ppn", "-ppn", "--npernode", "-npernode", "-N"))
        per_node = own or subject.ranks_per_node
        # With both options, a smaller total may be intended, to use only some of the nodes.
        is_part = own and total and total % own == 0 and total < nodes * own
        if total and nodes and per_node and total != nodes * per_node and not is_part:
            yield Problem(
                command.line,
                f"{total} ranks are started, but {nodes} nodes x {per_node} ranks are {nodes * per_node}",
                "compute the number of ranks in the script, as nodes x ranks per node",
            )


@check("RANK005", "warning", "more threads than cores")
def _more_threads_than_cores(subject: Subject) -> Iterator[Problem]:
    cpus = subject.scheduler.reader.cpus_per_rank(subject.script)
    tasks = subject.ranks_per_node or whole_number(subject.script.value("--ntasks"))
    if cpus and tasks and not any(command.launched for command in subject.script.launches()):
        cpus *= tasks  # a program in the batch shell can use the CPUs of all tasks
    for line, name, value in subject.script.assignments:
        threads = whole_number(value)
        if name == "OMP_NUM_THREADS" and threads and cpus and threads > cpus:
            yield Problem(
                line,
                f"OMP_NUM_THREADS={threads}, but each rank has {cpus} CPUs",
                f"use export OMP_NUM_THREADS={cpus}",
            )


@check("RANK006", "warning", "a trap that runs only after the launcher has ended")
def _trap_and_foreground(subject: Subject) -> Iterator[Problem]:
    commands = subject.script.commands
    traps = [
        c for c in commands if c.name == "trap" and any(_SIGNALS.fullmatch(w.upper()) for w in c.words[2:])
    ]
    # A trap that also covers EXIT is for cleaning up, so it may run late.
    if not traps or traps[0].words[1:2] == ("",) or "EXIT" in traps[0].words:
        return
    # Only the last launch is checked: earlier ones are usually short.
    for command in list(subject.in_foreground())[-1:]:
        starts_program = command.name == "torchrun" or (command.launched and command.launched[1:2] != ("-c",))
        if command.line > traps[0].line and starts_program:
            yield Problem(
                command.line,
                f"{command.name} runs in the foreground, so the trap of line {traps[0].line} runs only "
                "after it ends",
                "start it in the background and wait for it: ... & wait $!",
            )


@check("RANK007", "warning", "a trap on CONT")
def _trap_on_cont(subject: Subject) -> Iterator[Problem]:
    for command in subject.script.commands:
        if command.name == "trap" and any(w.upper() in ("CONT", "SIGCONT", "18") for w in command.words[2:]):
            yield Problem(
                command.line,
                "Slurm sends CONT right after the warning signal, and bash then does not run the other trap",
                "trap only the warning signal",
            )


@check("RANK008", "warning", "a fixed MASTER_PORT")
def _fixed_port(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    ports = [
        (line, value)
        for line, name, value in script.assignments
        if name == "MASTER_PORT" and whole_number(value) and _is_used(script, name)
    ]
    given = [
        (start.command.line, start.given("--master-port") or "")
        for start in _torchruns(subject)
        if not start.has("--standalone")  # then torchrun chooses a free port
    ]
    ports += [(line, port) for line, port in given if whole_number(port)]
    if has_whole_nodes(subject):
        return  # no other job runs on the nodes
    # One node with four GPUs or 64 cores may be a whole node, or a part of one.
    cpus = (subject.scheduler.reader.cpus_per_rank(script) or 1) * (subject.ranks_per_node or 1)
    may_be_whole = not subject.site and ((subject.gpus_per_node or 0) >= 4 or cpus >= 64)
    for value, line in {value: line for line, value in reversed(ports)}.items():
        yield Problem(
            line,
            f"port {value} is the same for every job, so a second job or step on the node cannot open it",
            "derive the port from the job id, or omit it, as ddp-hpc finds a free one",
            "note" if may_be_whole else None,
        )


def _is_used(script: Script, name: str) -> bool:
    """Returns whether a program can see a variable, or a command of the script expands it."""
    pattern = rf"\$\{{?{name}\b|\b(?:export|declare -x)\b.*\b{name}\b|^\s*{name}=\S+\s+\w|\bset -a\b"
    return any(re.search(pattern, line) for line in script.lines)


@check("RANK009", "error", "MASTER_ADDR is a loopback address")
def _loopback_master(subject: Subject) -> Iterator[Problem]:
    if (subject.num_nodes or 1) < 2:
        return
    for line, name, value in subject.script.assignments:
        if name == "MASTER_ADDR" and _LOOPBACK.fullmatch(value):
            yield Problem(
                line,
                f"MASTER_ADDR={plain(value)} refers to a different machine on each of the "
                f"{subject.num_nodes} nodes",
                "use the first node of the job, or omit it, as ddp-hpc sets it",
            )


@check("RANK010", "error", "a per-task variable that the batch shell expands")
def _expanded_too_early(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        command = start.command
        if command.name != "srun" or not start.is_launched or start.launcher_hides_options:
            continue
        text = expanded_in_shell(command.text)
        if start.is_torchrun and start.given("--rdzv-backend") is not None:
            # Only the static rendezvous uses --node-rank.
            text = re.sub(r"--node[-_]rank[= ]\S+", "", text)
        for name in dict.fromkeys(_OF_A_TASK.findall(text)):
            several = start.num_nodes if name == "SLURM_NODEID" else start.num_ranks
            if several and several > 1:
                yield Problem(
                    command.line,
                    f"the batch shell expands ${name}, which is 0 there, so all tasks of srun get 0",
                    f"let the tasks expand it: srun bash -c '... ${name} ...', with single quotes",
                )


@check("RANK011", "error", "the same rank for all tasks")
def _same_rank(subject: Subject) -> Iterator[Problem]:
    launched = [
        start
        for start in starts(subject)
        if start.is_launched
        and start.program == "python"
        and not start.is_torchrun
        and (start.num_ranks or 1) > 1
        and not start.launcher_hides_options
    ]
    if not launched:
        return
    first, total = launched[0], launched[0].num_ranks
    for line, name, value in subject.script.exports:
        if line > first.command.line:
            continue
        is_rank = name in ("RANK", "LOCAL_RANK") and (
            whole_number(value) is not None or _OF_A_TASK.fullmatch(value.rstrip("}"))
        )
        if is_rank:
            yield Problem(
                line,
                f"{name}={plain(value)} is set in the batch shell, so all {total} tasks get the same rank",
                "let each task set it from SLURM_PROCID or SLURM_LOCALID",
            )
        elif name == "WORLD_SIZE" and whole_number(value) not in (None, total):
            yield Problem(
                line,
                f"WORLD_SIZE={plain(value)}, but line {first.command.line} starts {total} ranks",
                "use export WORLD_SIZE=$SLURM_NTASKS",
            )


@check("RANK012", "error", "each task uses its own host as MASTER_ADDR")
def _own_master(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        several = start.num_nodes or 1
        is_shell = start.program in ("bash", "sh") and "-c" in " ".join(start.words[1:3])
        if not (start.is_launched and is_shell and several > 1) or start.launcher_hides_options:
            continue
        if _HOSTNAME.search(single_quoted(start.command.text)):
            yield Problem(
                start.command.line,
                f"each task sets MASTER_ADDR to its own host, so the ranks of {several} nodes cannot connect",
                'set it first: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


@check("RANK013", "warning", "only the first node is used")
def _first_node_only(subject: Subject) -> Iterator[Problem]:
    nodes = subject.num_nodes or 1
    if nodes < 2 or reaches_other_nodes(subject) or subject.script.is_supervised:
        return
    for start in starts(subject):
        # A program with one of these options may start srun itself.
        has_hosts = any(_OF_SEVERAL_NODES.match(word) for word in start.words[:60])
        is_python = start.program == "python" and any(word.endswith(".py") for word in start.words[1:])
        is_alone = start.is_torchrun and start.given("--nnodes") in (None, "1") and not start.hides_options
        is_agent = start.program in ("accelerate", "deepspeed") and not start.is_torchrun
        if is_alone or (not start.is_torchrun and (is_python or is_agent) and not has_hosts):
            yield Problem(
                start.command.line,
                f"the job has {nodes} nodes, but {plain(start.program)} runs on the first one only",
                "start it with srun, or request one node",
            )
            return


@check("RANK014", "warning", "one rank on a node with several GPUs")
def _one_rank(subject: Subject) -> Iterator[Problem]:
    gpus = subject.gpus_per_node or 1
    if gpus < 2 or any(c.ends == "&" or c.words[0] in ("for", "while") for c in subject.script.commands):
        return  # processes in the background or in a loop may share the GPUs
    for start in starts(subject):
        if start.launcher_hides_options:
            continue
        if start.is_torchrun:
            is_one = whole_number(start.given("--nproc-per-node") or "1") == 1 and start.ranks_per_node == 1
            if is_one and not start.hides_options:
                what = f"torchrun starts one rank on a node with {gpus} GPUs"
                remedy = f"use torchrun --nproc-per-node={gpus}, or request one GPU"
                yield Problem(start.command.line, what, remedy)
        elif _is_single_task(start) and not ONE_PROCESS.search(start.command.text):
            what = f"srun starts one task on a node with {gpus} GPUs"
            remedy = f"use srun --ntasks-per-node={gpus} if each rank uses one GPU, or request one GPU"
            yield Problem(start.command.line, what, remedy, "note")


def _is_single_task(start: Start) -> bool:
    """Returns whether srun starts Python in a single task."""
    if start.command.name != "srun" or start.program != "python":
        return False
    script = start.subject.script
    if start.command.option("-n", "--ntasks", "--ntasks-per-node", "--gpus", "--gres", "-G") is not None:
        return False
    requested = script.value("--ntasks"), script.value("--ntasks-per-node"), script.value("--ntasks-per-gpu")
    return (
        requested[2] is None
        and requested[0] in (None, "1")
        and requested[1] in (None, "1")
        and not start.subject.asked_nodes
    )
