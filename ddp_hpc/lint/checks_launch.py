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
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.schedulers.script_options import whole_number

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0")
_ON_LOOPBACK = re.compile(r"\s(?:-H|--?hosts?)[ =]\"?(?:localhost|127[.]0[.]0[.]1)(?::\d+)?(?=[\"\s]|$)")
_PORT_OF_TASK = re.compile(r"(?:PORT|port|rdzv[-_]id)[= ]\S*?(?:\$\(\(?[^)]*)?(?:\bRANDOM\b|\bshuf\b)")
_HOSTS_OF_DEEPSPEED = re.compile(r"--(?:hostfile|launcher|no_ssh|include)\b|-H$")
_DDP = re.compile(r"(?<![a-z])ddp(?![a-z])|fsdp|distributed", re.IGNORECASE)
_CORES_OF_NODE = re.compile(r"\bnproc\b|\$\{?SLURM_CPUS_ON_NODE\}?$")
_WORKERS = re.compile(r"--(?:dataloader[-_])?(?:num[-_])?workers[= ](\d{1,3})\b")
_WRONG_ID = re.compile(r"(?<!_)\bRANK=\$\{?SLURM_(?:LOCALID|NODEID)|\bLOCAL_RANK=\$\{?SLURM_(?:PROCID|NODEID)")
_LAST_PORT = 65535
_SIGNALS = re.compile(r"(?:SIG)?(?:TERM|USR1|USR2|INT|HUP)|1|2|10|12|15")
_OF_A_TASK = re.compile(r"\$\{?(SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID)\b")
_HOSTNAME = re.compile(
    r"\bMASTER_ADDR=[\"']?(?:\$\(\s*(?:/bin/)?hostname\b[^)|]*\)|`hostname\b[^`|]*`|\$\{?HOSTNAME\}?)"
)
_OF_SEVERAL_NODES = re.compile(
    r"--(?:num|n)?[-_]?(?:machines|hostfile|nodes|gpus|workers|jobs|nnodes)\b|-H$|--launcher|--cluster|slurm|"
    r".*(?:slurm\w*|\bdeepy)\.py$"
)


# Launchers that start the ranks of all nodes, and options with which they start those of one node.
_STARTS_ALL_NODES = ("deepspeed", "horovodrun", "mpirun", "mpiexec")
_OF_ONE_NODE = re.compile(r"--no_ssh|--node_rank|--launcher|-np? 1\b|--num_nodes[= ]1\b")
# Where ranks or launchers find the first node: options and the variables of the environment.
_ENDPOINT = re.compile(
    r"--(?:rdzv[-_]endpoint|master[-_]addr|main[-_]process[-_]ip|dist[-_]url|init[-_]method)[= ]+[\"']?(?:tcp://)?"
    r"([^\s\"':]+|\$\([^)]*\))"
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
    for start in starts(subject):
        if start.program in _STARTS_ALL_NODES and start.is_launched and not start.launcher_hides_options:
            times = start.num_ranks or start.num_nodes or 1
            if times > 1 and not _OF_ONE_NODE.search(start.command.text):
                yield Problem(
                    start.command.line,
                    f"{start.command.name} starts {start.program} {times} times, and each {start.program} starts "
                    "all ranks",
                    f"start {start.program} once, without {start.command.name}",
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


@check("RANK020", "error", "accelerate launch does not connect the machines")
def _accelerate_alone(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        options = start.options_of("accelerate")
        machines, processes = options.get("num-machines"), options.get("num-processes")
        num_machines = whole_number(subject.value_of(machines or ""))
        if not options or not num_machines or num_machines < 2 or start.hides_options:
            continue
        if start.is_launched and "machine-rank" not in options and options.get("rdzv-backend", "static") == "static":
            yield Problem(
                start.command.line,
                f"accelerate launch --num_machines {num_machines} has no --machine_rank, so all machines have rank 0",
                "use srun bash -c '... --machine_rank $SLURM_NODEID ...', or --rdzv_backend c10d",
            )
        total, gpus = whole_number(subject.value_of(processes or "")), subject.gpus_per_node
        if total and gpus and total == gpus:
            yield Problem(
                start.command.line,
                f"--num_processes {total} is the number of processes of all {num_machines} machines, not of one",
                f"use --num_processes {num_machines * gpus}",
                "warning",
            )


def _is_remote(subject: Subject, start: Start) -> bool:
    return start.command.name in ("ssh", "pbsdsh", "pdsh") or reaches_other_nodes(subject)


@check("RANK003", "error", "more ranks than GPUs")
def _more_ranks_than_gpus(subject: Subject) -> Iterator[Problem]:
    total = whole_number((subject.script.value("--gpus") or "").rpartition(":")[2])
    gpus = subject.gpus_per_node or (total // subject.num_nodes if total and subject.num_nodes else None)
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
        is_part = is_part or total == 1  # a serial program, for example before or after the parallel one
        cpus = subject.scheduler.reader.cpus_per_rank(subject.script)
        if total and not per_node and _has_one_slot(subject, command) and (cpus or 1) >= total > 1:
            yield Problem(
                command.line,
                f"{total} ranks are started, but the job requests one task with {cpus} CPUs, so Open MPI has one slot",
                f"request --ntasks={total} instead of --cpus-per-task={cpus}",
            )
        if total and nodes and per_node and total != nodes * per_node and not is_part:
            yield Problem(
                command.line,
                f"{total} ranks are started, but {nodes} nodes x {per_node} ranks are {nodes * per_node}",
                "compute the number of ranks in the script, as nodes x ranks per node",
            )


def _has_one_slot(subject: Subject, command: Command) -> bool:
    if re.search(r"oversubscribe|--map-by|-map-by|hwthread|--?host\b|-H\b|hostfile|-f\b", command.text):
        return False
    return subject.script.scheduler != "" and subject.script.value("--ntasks") in (None, "1")


@check("RANK005", "warning", "more threads than cores")
def _more_threads_than_cores(subject: Subject) -> Iterator[Problem]:
    cpus = subject.scheduler.reader.cpus_per_rank(subject.script)
    tasks = subject.ranks_per_node or whole_number(subject.script.value("--ntasks"))
    if cpus and tasks and not any(command.launched for command in subject.script.launches()):
        cpus *= tasks  # a program in the batch shell can use the CPUs of all tasks
    per_node = subject.ranks_per_node or 1
    has_ranks = any(command.name == "srun" and command.launched for command in subject.script.launches())
    for line, name, value in subject.script.assignments:
        threads = whole_number(value)
        if name == "OMP_NUM_THREADS" and _CORES_OF_NODE.search(value) and per_node > 1 and has_ranks:
            yield Problem(
                line,
                f"OMP_NUM_THREADS={plain(value)} is the number of all cores of the node, for each of {per_node} ranks",
                "use export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
            )
        if name == "OMP_NUM_THREADS" and threads and cpus and threads > cpus:
            yield Problem(
                line,
                f"OMP_NUM_THREADS={threads}, but each rank has {cpus} CPUs",
                f"use export OMP_NUM_THREADS={cpus}",
            )
    for start in starts(subject):
        workers = _WORKERS.search(start.command.text)
        local_ranks = whole_number(start.given("--nproc-per-node")) or 1
        if workers and cpus and start.program in ("python", "torchrun") and int(workers[1]) * local_ranks > cpus:
            yield Problem(
                start.command.line,
                f"{int(workers[1]) * local_ranks} workers of DataLoaders share the {cpus} CPUs of a task",
                f"request more with --cpus-per-task, or use {max(1, cpus // local_ranks)} workers",
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
    for line, port in ports:
        if int(port) > _LAST_PORT:
            yield Problem(line, f"{port} is not a port, as the last one is {_LAST_PORT}", "use a smaller number", "error")
    ports = [(line, port) for line, port in ports if int(port) <= _LAST_PORT]
    in_background = [s for s in _torchruns(subject) if s.command.ends == "&" and not s.has("--standalone")]
    of_each = [s.given("--master-port") or s.given("--rdzv-endpoint") or "29500" for s in in_background]
    for start, port in zip(in_background[1:], of_each[1:], strict=False):
        if (subject.num_nodes or 1) < 2 and "$" not in port and of_each.count(port) > 1:
            yield Problem(
                start.command.line,
                f"several torchrun run at the same time with the port {plain(port)}, which only the first one can open",
                "use torchrun --standalone, or give each another --master-port",
                "error",
            )
            return
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
    found = [
        (line, f"{name}={value}")
        for line, name, value in subject.script.assignments
        if (name == "MASTER_ADDR" and _LOOPBACK.fullmatch(value))
        or (name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and value in ("lo", "=lo"))
    ]
    for start in starts(subject):
        endpoint = _ENDPOINT.search(start.command.text)
        is_everywhere = start.is_launched and (start.num_nodes or 1) > 1 and start.given("--nnodes") != "1"
        if endpoint and is_everywhere and _LOOPBACK.fullmatch(subject.value_of(endpoint[1])):
            found.append((start.command.line, endpoint[0].strip()))
        elif start.program in ("horovodrun", "mpirun") and _ON_LOOPBACK.search(start.command.text):
            found.append((start.command.line, f"{start.program} -H localhost"))
    for line, what in found:
        yield Problem(
            line,
            f"{plain(what)} refers to a different machine on each of the {subject.num_nodes} nodes",
            "use the first node, or the network between the nodes; ddp-hpc sets both itself",
        )


@check("RANK010", "error", "a per-task variable that the batch shell expands")
def _expanded_too_early(subject: Subject) -> Iterator[Problem]:
    of_task = {
        name: match[1]
        for line, name, value in subject.script.assignments
        if (match := _OF_A_TASK.fullmatch(value.rstrip("}")))
        and not any(c.line == line and c.argv for c in subject.script.commands if c.argv[:1] != ("export",))
    }
    for start in starts(subject):
        command = start.command
        if command.name != "srun" or not start.is_launched or start.launcher_hides_options:
            continue
        text = expanded_in_shell(command.text)
        if start.is_torchrun and start.given("--rdzv-backend") is not None:
            # Only the static rendezvous uses --node-rank.
            text = re.sub(r"--node[-_]rank[= ]\S+", "", text)
        for name, task in of_task.items():
            is_read = name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if is_read or re.search(rf"\$\{{?{name}\b", text + single_quoted(text)):
                text += f" ${task}"
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
        and start.program not in ("bash", "sh", *_STARTS_ALL_NODES)
        and not start.program.endswith(".sh")
        and (start.num_ranks or 1) > 1
        and not start.launcher_hides_options
    ]
    for start in starts(subject):
        wrong = _WRONG_ID.search(single_quoted(start.command.text)) if start.is_launched else None
        if wrong and (start.num_nodes or 1) > 1 and (start.ranks_per_node or 1) > 1:
            yield Problem(
                start.command.line,
                f"{plain(wrong[0])} has the same value on several nodes, or is too large on the others",
                "use RANK=$SLURM_PROCID and LOCAL_RANK=$SLURM_LOCALID",
            )
    for start in launched:
        given = start.given("--node-rank") or start.options_of("accelerate").get("machine-rank")
        is_static = start.given("--rdzv-backend") in (None, "static") and start.given("--nnodes") != "1"
        if given is not None and whole_number(given) is not None and (start.num_nodes or 1) > 1 and is_static:
            yield Problem(
                start.command.line,
                f"all {start.num_nodes} nodes get the node rank {given}",
                "use srun bash -c '... --node_rank=$SLURM_NODEID ...', or --rdzv-backend=c10d",
            )
    launched = [start for start in launched if not start.is_torchrun and start.program != "accelerate"]
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
        elif name == "WORLD_SIZE" and whole_number(subject.value_of(value)) not in (None, total):
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
        in_task = single_quoted(start.command.text)
        if _PORT_OF_TASK.search(in_task):
            yield Problem(
                start.command.line,
                "each task chooses another port or rendezvous id, so the ranks cannot connect",
                "set it before srun, and export it",
            )
        endpoint = _ENDPOINT.search(in_task)
        if _HOSTNAME.search(in_task) or (endpoint and _HOSTNAME.match(f"MASTER_ADDR={endpoint[1]}")):
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
        of_several = _HOSTS_OF_DEEPSPEED if start.program == "deepspeed" else _OF_SEVERAL_NODES
        has_hosts = any(of_several.match(word) for word in start.words[:60])
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
            is_ddp = bool(_DDP.search(start.command.text))
            yield Problem(start.command.line, what, remedy, None if is_ddp else "note")


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
