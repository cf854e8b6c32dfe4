"""Checks of how ranks are started and find each other, under any scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.batch.checks_registry import Seen, Subject, check, plain, whole
from ddp_hpc.batch.script import Command

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0")
_SIGNALS = re.compile(r"(?:SIG)?(?:TERM|USR1|USR2|INT|HUP)|1|2|10|12|15")


def _is_torchrun(words: tuple[str, ...]) -> bool:
    start = words[:4]
    return any(word.rpartition("/")[2] in ("torchrun", "torchrun_jsc") for word in start[:1]) or (
        "-m" in start and any(word in ("torch.distributed.run", "torch.distributed.launch") for word in start)
    )


def _torchruns(subject: Subject) -> list[tuple[Command, tuple[str, ...]]]:
    """Each torchrun, with its words; what is before it is the launcher that starts it."""
    found = []
    for command in subject.script.commands:
        words = command.launched or command.argv
        if words and _is_torchrun(words):
            found.append((command, words))
    return found


def _given(words: tuple[str, ...], name: str) -> str | None:
    """The value of torchrun's option, which may be spelled with - or _."""
    for index, word in enumerate(words[:40]):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag == name:
            return value if equals else (words[index + 1] if index + 1 < len(words) else "")
    return None


def _ranks_per_node(subject: Subject, command: Command) -> int | None:
    """Ranks that the launcher starts on each node, by its own words, else by the directives."""
    own = command.option("--ntasks-per-node", "--ppn", "-ppn", "--npernode", "-npernode")
    if own is not None:
        return whole(own)
    if command.name == "srun":
        tasks, nodes = whole(command.option("-n", "--ntasks")), whole(command.option("-N", "--nodes"))
        nodes = nodes or subject.num_nodes
        if tasks and nodes:
            return tasks // nodes
    tasks = whole(command.option("-n", "-np", "--np"))
    if command.name != "srun" and tasks and subject.num_nodes:
        return tasks // subject.num_nodes
    return subject.ranks_per_node


@check("RANK001", "error", "torchrun once for each rank")
def _torchrun_per_rank(subject: Subject) -> Iterator[Seen]:
    for command, words in _torchruns(subject):
        per_node = _ranks_per_node(subject, command) if command.launched else None
        if per_node and per_node > 1:
            yield Seen(
                command.line,
                f"{command.name} starts torchrun {per_node} times a node, and each starts all its ranks",
                "one torchrun a node (--ntasks-per-node=1, --ppn 1), or python in its place",
            )
        elif _given(words, "--nproc-per-node") in (None, "1") and (subject.gpus_per_node or 0) > 1:
            yield Seen(
                command.line,
                f"torchrun starts one rank on a node with {subject.gpus_per_node} GPUs",
                f"torchrun --nproc-per-node={subject.gpus_per_node}",
            )


@check("RANK002", "error", "torchrun that knows of one node only")
def _torchrun_alone(subject: Subject) -> Iterator[Seen]:
    nodes = subject.num_nodes or 1
    if nodes < 2:
        return
    in_a_loop = any(command.words[0] == "for" for command in subject.script.commands)
    for command, words in _torchruns(subject):
        if "--standalone" in words[:40] or _given(words, "--nnodes") in (None, "1"):
            yield Seen(
                command.line,
                f"the job has {nodes} nodes, and this torchrun forms a world of one",
                f"torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT",
            )
        elif not command.launched and command.name not in ("ssh", "pbsdsh") and not in_a_loop:
            yield Seen(
                command.line,
                f"torchrun --nnodes waits for {nodes} nodes, and the script starts it on the first one alone",
                "put srun --ntasks-per-node=1, or mpiexec --ppn 1, in front of it",
            )


@check("RANK003", "error", "more ranks than GPUs")
def _more_ranks_than_gpus(subject: Subject) -> Iterator[Seen]:
    gpus = subject.gpus_per_node
    if not gpus:
        return
    for command in subject.script.commands:
        words = command.launched or command.argv
        if _is_torchrun(words):
            ranks = whole(_given(words, "--nproc-per-node"))
        elif command.name in ("srun", "mpiexec", "mpirun") and command.launched:
            ranks = _ranks_per_node(subject, command)
        else:
            continue
        if ranks and ranks > gpus:
            yield Seen(
                command.line,
                f"{ranks} ranks on each node share {gpus} GPUs; NCCL refuses two ranks on one device",
                f"start {gpus} ranks a node, or ask for {ranks} GPUs",
            )


@check("RANK004", "warning", "a number of ranks that is not nodes x ranks a node")
def _literal_ranks(subject: Subject) -> Iterator[Seen]:
    nodes = subject.num_nodes
    for command in subject.script.launches():
        if command.name not in ("mpiexec", "mpirun") or not nodes:
            continue
        total = whole(command.option("-n", "-np", "--np", "--n"))
        per_node = (
            whole(command.option("--ppn", "-ppn", "--npernode", "-npernode", "-N")) or subject.ranks_per_node
        )
        if total and per_node and total != nodes * per_node:
            yield Seen(
                command.line,
                f"{total} ranks are started; {nodes} nodes x {per_node} ranks are {nodes * per_node}",
                "count the nodes in the script, and start nodes x ranks a node",
            )


@check("RANK005", "warning", "more threads than cores")
def _more_threads_than_cores(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    cpus = whole(script.value("--cpus-per-task"))
    if script.scheduler == "pbs":
        ncpus = [
            re.search(r":ncpus=(\d{1,6})\b", value)
            for _, name, value in script.resources()
            if name == "select"
        ]
        ranks = subject.ranks_per_node
        cpus = max(1, int(ncpus[-1][1]) // ranks) if ncpus and ncpus[-1] and ranks else None
    for line, name, value in script.assignments:
        threads = whole(value)
        if name == "OMP_NUM_THREADS" and threads and cpus and threads > cpus:
            yield Seen(
                line,
                f"OMP_NUM_THREADS={threads}, and a rank has {cpus} CPUs",
                f"export OMP_NUM_THREADS={cpus}",
            )


@check("RANK006", "warning", "a trap that waits for the launcher")
def _trap_and_foreground(subject: Subject) -> Iterator[Seen]:
    commands = subject.script.commands
    traps = [
        c for c in commands if c.name == "trap" and any(_SIGNALS.fullmatch(w.upper()) for w in c.words[2:])
    ]
    if not traps or traps[0].words[1:2] == ("",):
        return
    for command in subject.in_foreground():
        if command.line > traps[0].line and (command.launched or command.name == "torchrun"):
            yield Seen(
                command.line,
                f"{command.name} is in the foreground; the trap of line {traps[0].line} runs only after it",
                "end the line with & and wait for it: ... & wait $!",
            )
            return


@check("RANK007", "warning", "a trap on CONT")
def _trap_on_cont(subject: Subject) -> Iterator[Seen]:
    for command in subject.script.commands:
        if command.name == "trap" and any(w.upper() in ("CONT", "SIGCONT", "18") for w in command.words[2:]):
            yield Seen(
                command.line,
                "Slurm sends CONT right after the warning signal, and bash then loses the other trap",
                "trap the warning signal alone",
            )


@check("RANK008", "warning", "a fixed MASTER_PORT")
def _fixed_port(subject: Subject) -> Iterator[Seen]:
    found = [
        (line, value)
        for line, name, value in subject.script.assignments
        if name == "MASTER_PORT" and whole(value)
    ]
    for command, words in _torchruns(subject):
        if whole(port := _given(words, "--master-port") or ""):
            found.append((command.line, port))
    for line, value in found:
        yield Seen(
            line,
            f"port {value} is the same for every job; a second job or step on the node cannot open it",
            "derive it from the job id, or leave it out: ddp-hpc finds a free one",
        )


@check("RANK009", "error", "MASTER_ADDR is this machine's loopback")
def _loopback_master(subject: Subject) -> Iterator[Seen]:
    if (subject.num_nodes or 1) < 2:
        return
    for line, name, value in subject.script.assignments:
        if name == "MASTER_ADDR" and _LOOPBACK.fullmatch(value):
            yield Seen(
                line,
                f"MASTER_ADDR={plain(value)} is another machine on each of the {subject.num_nodes} nodes",
                "take the first node of the job, or leave it out: ddp-hpc tells the ranks",
            )
