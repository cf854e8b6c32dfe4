"""Checks of the launch commands and the rendezvous of ranks, under any scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.checks_registry import Problem, Subject, check, plain
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.base import whole_number

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0")
_SIGNALS = re.compile(r"(?:SIG)?(?:TERM|USR1|USR2|INT|HUP)|1|2|10|12|15")


def _is_torchrun(words: tuple[str, ...]) -> bool:
    program = words[0].rpartition("/")[2] if words else ""
    modules = {"torch.distributed.run", "torch.distributed.launch"}
    return program in ("torchrun", "torchrun_jsc") or (
        "-m" in words[:4] and not modules.isdisjoint(words[:4])
    )


def _torchruns(subject: Subject) -> list[tuple[Command, tuple[str, ...]]]:
    """Return each command that starts torchrun, with torchrun's own words: the program and its arguments."""
    commands = [(command, command.launched or command.argv) for command in subject.script.commands]
    return [(command, words) for command, words in commands if _is_torchrun(words)]


def _given(words: tuple[str, ...], name: str) -> str | None:
    """Return the value of a torchrun option: None without the option, which may be spelled with - or _."""
    for index, word in enumerate(words[:40]):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag == name:
            return value if equals else (words[index + 1] if index + 1 < len(words) else "")
    return None


def _ranks_per_node(subject: Subject, command: Command) -> int | None:
    """Return the number of ranks per node, from the launcher's options if possible, else the directives."""
    own = command.option("--ntasks-per-node", "--ppn", "-ppn", "--npernode", "-npernode")
    if own is not None:
        return whole_number(own)
    tasks, nodes = whole_number(command.option("-n", "-np", "--np")), subject.num_nodes
    if command.name == "srun":
        tasks = whole_number(command.option("-n", "--ntasks"))
        nodes = whole_number(command.option("-N", "--nodes")) or nodes
    return tasks // nodes if tasks and nodes else subject.ranks_per_node


@check("RANK001", "error", "torchrun started once per rank")
def _torchrun_per_rank(subject: Subject) -> Iterator[Problem]:
    for command, words in _torchruns(subject):
        per_node = _ranks_per_node(subject, command) if command.launched else None
        if per_node and per_node > 1:
            yield Problem(
                command.line,
                f"{command.name} starts torchrun {per_node} times per node, and each torchrun starts all "
                "ranks of the node",
                "start torchrun once per node (--ntasks-per-node=1, --ppn 1), or start python instead",
            )
        elif _given(words, "--nproc-per-node") in (None, "1") and (subject.gpus_per_node or 0) > 1:
            yield Problem(
                command.line,
                f"torchrun starts one rank on a node with {subject.gpus_per_node} GPUs",
                f"use torchrun --nproc-per-node={subject.gpus_per_node}",
            )


@check("RANK002", "error", "torchrun started for one node only")
def _torchrun_alone(subject: Subject) -> Iterator[Problem]:
    nodes = subject.num_nodes or 1
    if nodes < 2:
        return
    in_a_loop = any(command.words[0] == "for" for command in subject.script.commands)
    for command, words in _torchruns(subject):
        if "--standalone" in words[:40] or _given(words, "--nnodes") in (None, "1"):
            yield Problem(
                command.line,
                f"the job has {nodes} nodes, but this torchrun uses only one",
                f"use torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT",
            )
        elif not command.launched and command.name not in ("ssh", "pbsdsh") and not in_a_loop:
            yield Problem(
                command.line,
                f"torchrun --nnodes waits for {nodes} nodes, but the script starts it on the first node only",
                "put srun --ntasks-per-node=1, or mpiexec --ppn 1, in front of it",
            )


@check("RANK003", "error", "more ranks than GPUs")
def _more_ranks_than_gpus(subject: Subject) -> Iterator[Problem]:
    gpus = subject.gpus_per_node
    if not gpus:
        return
    for command in subject.script.commands:
        words = command.launched or command.argv
        if _is_torchrun(words):
            ranks = whole_number(_given(words, "--nproc-per-node"))
        elif command.name in ("srun", "mpiexec", "mpirun") and command.launched:
            ranks = _ranks_per_node(subject, command)
        else:
            continue
        if ranks and ranks > gpus:
            yield Problem(
                command.line,
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
        per_node = whole_number(command.option("--ppn", "-ppn", "--npernode", "-npernode", "-N"))
        per_node = per_node or subject.ranks_per_node
        if total and nodes and per_node and total != nodes * per_node:
            yield Problem(
                command.line,
                f"{total} ranks are started, but {nodes} nodes x {per_node} ranks are {nodes * per_node}",
                "compute the number of ranks in the script, as nodes x ranks per node",
            )


@check("RANK005", "warning", "more threads than cores")
def _more_threads_than_cores(subject: Subject) -> Iterator[Problem]:
    cpus = subject.scheduler.cpus_per_rank(subject.script)
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
    if not traps or traps[0].words[1:2] == ("",):
        return
    for command in subject.in_foreground():
        if command.line > traps[0].line and (command.launched or command.name == "torchrun"):
            yield Problem(
                command.line,
                f"{command.name} runs in the foreground, so the trap of line {traps[0].line} runs only "
                "after it ends",
                "start it in the background and wait for it: ... & wait $!",
            )
            return


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
    found = [
        (line, value)
        for line, name, value in subject.script.assignments
        if name == "MASTER_PORT" and whole_number(value)
    ]
    for command, words in _torchruns(subject):
        if whole_number(port := _given(words, "--master-port") or ""):
            found.append((command.line, port))
    for line, value in found:
        yield Problem(
            line,
            f"port {value} is the same for every job, so a second job or step on the node cannot open it",
            "derive the port from the job id, or omit it, as ddp-hpc finds a free one",
        )


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
