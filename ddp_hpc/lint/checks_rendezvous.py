"""Checks of how ranks find each other: addresses, ports and ranks, under any scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain
from ddp_hpc.lint.launch_commands import (
    STARTS_ALL_RANKS,
    Start,
    expanded_in_shell,
    has_whole_nodes,
    reaches_other_nodes,
    requests_gpus,
    single_quoted,
    starts,
    takes_rank_of_slurm,
    torchruns,
)
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.schedulers.script_options import whole_number

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0")
_ON_LOOPBACK = re.compile(r"\s(?:-H|--?hosts?)[ =]\"?(?:localhost|127[.]0[.]0[.]1)(?::\d+)?(?=[\"\s]|$)")
_PORT_OF_TASK = re.compile(
    r"(?<![A-Za-z])(?:PORT|port|rdzv[-_]id)[= ]\S*?(?:\$\(\(?[^)]*)?(?:\bRANDOM\b|\bshuf\b)"
)
_CONNECTS = re.compile(
    r"MASTER_PORT|--(?:master|main[-_]process|dist|ddp|tcp|nccl)[-_]port|--rdzv|--dist[-_]url|--init[-_]method"
)
_WRONG_ID = re.compile(
    r"(?<!_)\bRANK=\$\{?SLURM_(?:LOCALID|NODEID)|\bLOCAL_RANK=\$\{?SLURM_(?:PROCID|NODEID)|"
    r"--(?:node|machine)[-_]rank[= ]\$\{?SLURM_LOCALID"
)
_LAST_PORT = 65535
_OF_A_TASK = re.compile(r"\$\{?(SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID)\b")
# As a value, not as a part of the name of a file, which may be the same for all tasks.
_VALUE_OF_TASK = re.compile(rf"(?:^|[\s=,:\"'(]){_OF_A_TASK.pattern}\}}?(?=[\s,;\"')]|$)")
_OPTION_OF_TASK = re.compile(rf"\s--?\w[\w-]*[= ]{_OF_A_TASK.pattern}")
_HOSTNAME = re.compile(
    r"\bMASTER_ADDR=[\"']?(?:\$\(\s*(?:/bin/)?hostname\b[^)|]*\)|`hostname\b[^`|]*`|\$\{?HOSTNAME\}?)"
)
# Options that name the first node.
_ENDPOINT = re.compile(
    r"--(?:rdzv[-_]endpoint|master[-_]addr|main[-_]process[-_]ip|dist[-_]url|init[-_]method)[= ]+[\"']?(?:tcp://)?"
    r"(\$\([^)]*\)|[^\s\"':]+)"
)


@check("RANK008", "note", "a fixed MASTER_PORT")
def _fixed_port(subject: Subject) -> Iterator[Problem]:
    script, started = subject.script, torchruns(subject)
    runs = [
        start for start in started if "--standalone" not in start.options
    ]  # otherwise, it chooses a free port
    ports = [
        (line, value)
        for line, name, value in script.assignments
        if name == "MASTER_PORT" and whole_number(value) and _is_used(script, not started or bool(runs))
    ]
    given = [(start.command.line, start.given("--master-port") or "") for start in runs]
    ports += [(line, port) for line, port in given if whole_number(port)]
    for line, port in ports:
        if int(port) > _LAST_PORT:
            what = f"{port} is not a port, as the last one is {_LAST_PORT}"
            yield Problem(line, what, "use a smaller number", "error")
    ports = [(line, port) for line, port in ports if int(port) <= _LAST_PORT]
    in_background = [start for start in runs if start.command.ends == "&"]
    of_each = [s.given("--master-port") or s.given("--rdzv-endpoint") or "29500" for s in in_background]
    for start, port in zip(in_background[1:], of_each[1:], strict=False):
        if (subject.num_nodes or 1) < 2 and "$" not in port and of_each.count(port) > 1:
            what = f"several torchrun run at the same time, and only one can open the port {plain(port)}"
            remedy = "use torchrun --standalone, or give each another --master-port"
            yield Problem(start.command.line, what, remedy, "error")
            return
    if has_whole_nodes(subject):
        return  # no other job runs on the nodes
    for value, line in {value: line for line, value in reversed(ports)}.items():
        what = f"port {value} is the same for every job, so a second job or step on the node cannot open it"
        own = subject.scheduler.reader.port_of_job
        remedy = f"use {own}, or torchrun --standalone on one node"
        yield Problem(line, what, remedy)


def _is_used(script: Script, is_read: bool) -> bool:
    """Returns whether a command expands MASTER_PORT, or, if programs read it, whether they can see it."""
    seen = (
        r"|\b(?:export|declare -x)\b.*\bMASTER_PORT\b|^\s*MASTER_PORT=\S+\s+\w|\bset -a\b" if is_read else ""
    )
    return any(re.search(r"\$\{?MASTER_PORT\b" + seen, line) for line in script.lines)


@check("RANK009", "error", "MASTER_ADDR is a loopback address")
def _loopback_master(subject: Subject) -> Iterator[Problem]:
    if (subject.num_nodes or 1) < 2:
        return
    # Which variables a program reads is not known: DeepSpeed without RANK gets the address through MPI.
    has_deepspeed = "deepspeed" in subject.script.text.lower()
    # Each step may connect the ranks of one node.
    launched = [start for start in starts(subject) if start.is_launched]
    is_local = bool(launched) and all(start.num_nodes == 1 for start in launched)
    is_local &= all(start.given("--nnodes") in (None, "1") for start in starts(subject))
    found: list[tuple[int, str, Severity | None]] = [
        (line, f"{name}={value}", "note" if _has_other_value(subject.script, line, name) else "warning")
        for line, name, value in subject.script.assignments
        if not (has_deepspeed or is_local)
        if (name == "MASTER_ADDR" and _LOOPBACK.fullmatch(value))
        or (name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and value in ("lo", "=lo"))
    ]
    for start in starts(subject):
        endpoint = _ENDPOINT.search(start.command.text)
        is_everywhere = start.is_launched and (start.num_nodes or 1) > 1 and start.given("--nnodes") != "1"
        if endpoint and is_everywhere and _LOOPBACK.fullmatch(subject.value_of(endpoint[1])):
            found.append((start.command.line, endpoint[0].strip(), None))
        elif (
            start.program in ("horovodrun", "mpirun")
            and _ON_LOOPBACK.search(start.command.text)
            and start.num_nodes != 1
        ):
            what = f"{start.program} -H localhost uses only the first of the {subject.num_nodes} nodes"
            remedy = "name all hosts with -H, or request one node"
            yield Problem(start.command.line, what, remedy, "warning")
    for line, what, severity in found:
        what = f"with {plain(what)}, each of the {subject.num_nodes} nodes can connect only to itself"
        is_interface = "IFNAME" in what
        remedy = (
            "remove it, as the library finds the network"
            if is_interface
            else "use the name of the first node"
        )
        yield Problem(line, what, remedy, severity)


def _has_other_value(script: Script, line: int, name: str) -> bool:
    """Returns whether a loopback address is replaced later, or is that of one of several cases."""
    is_case = line in script.conditions
    others = {n for n, other, value in script.assignments if other == name and not _LOOPBACK.fullmatch(value)}
    return any(is_case or number > line for number in others)


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
        options = start.options_of("accelerate")
        backend = start.given("--rdzv-backend") if start.is_torchrun else options.get("--rdzv-backend")
        if backend not in (None, "static") or options.get("--num-machines") == "1":
            # Only the static rendezvous of several machines uses their ranks.
            text = re.sub(r"--(?:node|machine)[-_]rank[= ]\S+", "", text)
        for name, task in of_task.items():
            is_read = name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if is_read and requests_gpus(subject):
                continue  # srun sets the variable for its tasks
            if is_read or re.search(rf"\$\{{?{name}\b", text + single_quoted(text)):
                text += f" ${task}"
        for name in dict.fromkeys(_VALUE_OF_TASK.findall(text)):
            several = start.num_nodes if name == "SLURM_NODEID" else start.num_ranks
            if several and several > 1:
                what = f"the batch shell expands ${name}, which is 0 there, so all tasks of srun get 0"
                remedy = f"let the tasks expand it: srun bash -c '... ${name} ...', with single quotes"
                yield Problem(command.line, what, remedy)
    yield from _assigned_too_early(subject)


def _assigned_too_early(subject: Subject) -> Iterator[Problem]:
    """Yields options for srun with a variable of its tasks that are in a variable of the batch shell."""
    texts = {command.line: command.text for command in subject.script.commands}
    several = [
        s for s in starts(subject) if (s.num_ranks or s.num_nodes or 1) > 1 and s.command.name == "srun"
    ]
    used = {name for start in several for name in re.findall(r"\$\{?(\w+)", start.command.text)}
    lines = {line for line, name, value in subject.script.assignments if name in used and " " in value}
    for line in sorted(lines):
        text = expanded_in_shell(texts[line])
        name = None if re.search(r"c10d|\bsrun ", text) else _OPTION_OF_TASK.search(text)
        if name:
            what = f"the batch shell expands ${name[1]} here, where it is 0, so all tasks of srun get 0"
            yield Problem(line, what, f"write \\${name[1]}, and start it with srun bash -c", "note")


@check("RANK011", "error", "the same rank for all tasks")
def _same_rank(subject: Subject) -> Iterator[Problem]:
    launched = [
        start
        for start in starts(subject)
        if start.is_launched
        and start.program not in ("bash", "sh", *STARTS_ALL_RANKS)
        and not start.program.endswith(".sh")
        and (start.num_ranks or 1) > 1
        and not start.launcher_hides_options
    ]
    for start in starts(subject):
        yield from _size_of_tasks(subject, start)
        wrong = _WRONG_ID.search(single_quoted(start.command.text)) if start.is_launched else None
        several = (start.ranks_per_node or 1) > 1 or (wrong and wrong[0][0] == "-")
        if wrong and (start.num_nodes or 1) > 1 and several:
            what = f"{plain(wrong[0])} has the same value on several nodes, or is too large on the others"
            remedy = "use SLURM_PROCID for RANK, SLURM_LOCALID for LOCAL_RANK, SLURM_NODEID for the node rank"
            yield Problem(start.command.line, what, remedy)
    for start in starts(subject):
        inner = start.inner
        options = inner.options if inner.is_torchrun or inner.program == "accelerate" else {}
        given = options.get("--node-rank", options.get("--machine-rank"))
        is_static = options.get("--rdzv-backend", "static") == "static" and options.get("--nnodes") != "1"
        if whole_number(given) is not None and start.is_launched and (start.num_nodes or 1) > 1 and is_static:
            what = f"all {start.num_nodes} nodes get the node rank {given}"
            remedy = "use --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT"
            if not inner.is_torchrun:
                remedy = "use srun bash -c '... --machine_rank $SLURM_NODEID ...'"
            yield Problem(start.command.line, what, remedy)
    launched = [start for start in launched if not start.is_torchrun and start.program != "accelerate"]
    if not launched:
        return
    first, total = launched[0], launched[0].num_ranks
    # Lightning reads the variables of Slurm instead.
    reads_others = "lightning" in subject.script.text.lower() or takes_rank_of_slurm(launched[0])
    severity: Severity = "note" if reads_others else "warning"
    for line, name, value in subject.script.exports:
        if line > first.command.line:
            continue
        of_a_task = _OF_A_TASK.fullmatch(value.rstrip("}"))
        is_rank = name in ("RANK", "LOCAL_RANK") and (of_a_task or whole_number(value) is not None)
        between = [c for c in subject.script.commands if line < c.line < first.command.line]
        is_unset = any(c.name == "unset" and name in c.words for c in between)
        is_rank = is_rank and not (is_unset or re.search(rf"\b{name}=", single_quoted(first.command.text)))
        if is_rank or (name == "CUDA_VISIBLE_DEVICES" and of_a_task):
            what = f"{name}={plain(value)} is set in the batch shell, so it is the same for all {total} tasks"
            own = "SLURM_PROCID" if name == "RANK" else "SLURM_LOCALID"
            remedy = f"set it in each task, as in srun bash -c 'export {name}=${own}; exec PROGRAM'"
            if "srun" not in subject.scheduler.reader.own_commands:
                remedy = "set it in each task, from a variable of its MPI such as PMI_RANK"
            yield Problem(line, what, remedy, severity if is_rank else "note")
        # A task may start a process for each GPU.
        of_gpus = (subject.num_nodes or 1) * (subject.gpus_per_node or 0)
        of_gpus = of_gpus or (total or 0) * (whole_number(subject.script.value("--gpus-per-task")) or 0)
        sizes = {start.num_ranks for start in launched} | {None, of_gpus}
        if name == "WORLD_SIZE" and whole_number(subject.value_of(value)) not in sizes:
            what = f"WORLD_SIZE={plain(value)}, but line {first.command.line} starts {total} ranks"
            yield Problem(line, what, f"use export WORLD_SIZE={total}, or start as many ranks", severity)


def _size_of_tasks(subject: Subject, start: Start) -> Iterator[Problem]:
    """Yields a WORLD_SIZE in the code of `bash -c`, or before it, that is not the number of its tasks."""
    code = single_quoted(start.command.text) if start.is_launched and start.inner is start else ""
    of_job = [size for n, name, size in subject.script.exports if name == "WORLD_SIZE"]
    sizes = re.findall(r"\bWORLD_SIZE=([^\s;&]+)", code) or (of_job[-1:] if "RANK=" in code else [])
    for size in sizes if not ("WORLD_SIZE=" in code and re.search("NTASKS|NPROCS|STEP", code)) else ():
        number = whole_number(subject.value_of(size))
        if number and number != (start.num_ranks or number):
            what = f"WORLD_SIZE={plain(size)}, but this starts {start.num_ranks} ranks"
            remedy = f"use WORLD_SIZE={start.num_ranks}, or start {number} ranks"
            yield Problem(start.command.line, what, remedy, "warning")


@check("RANK012", "error", "each task uses its own host as MASTER_ADDR")
def _own_master(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        several = start.num_nodes or 1
        is_shell = start.program in ("bash", "sh") and "-c" in " ".join(start.words[1:3])
        if not (start.is_launched and is_shell and several > 1) or start.launcher_hides_options:
            continue
        in_task = single_quoted(start.command.text)
        is_own = start.inner.is_torchrun and not start.inner.hides_options  # each node may work on its own
        is_own &= start.inner.given("--nnodes") in (None, "1") or "--standalone" in start.inner.options
        if _PORT_OF_TASK.search(in_task) and _CONNECTS.search(in_task) and "--standalone" not in in_task:
            what = "each task chooses another port or rendezvous id, so the ranks cannot connect"
            yield Problem(start.command.line, what, f"set it before {start.command.name}, and export it")
        endpoint = _ENDPOINT.search(in_task)
        if in_task.count("MASTER_ADDR=") > 1 and re.search(r"\bif\b|&&|\|\||\bcase\b", in_task):
            continue  # only one of the tasks may use its own host
        if _HOSTNAME.search(in_task) or (endpoint and _HOSTNAME.match(f"MASTER_ADDR={endpoint[1]}")):
            yield Problem(
                start.command.line,
                f"each task sets MASTER_ADDR to its own host, so the ranks of {several} nodes cannot connect",
                f"set it before {start.command.name} instead: export MASTER_ADDR=$(hostname)",
                "note" if is_own else None,
            )


@check("RANK020", "error", "accelerate launch does not connect the machines")
def _accelerate_alone(subject: Subject) -> Iterator[Problem]:
    with_rank = "a wrapper script that mpiexec starts once per node and that sets --machine_rank"
    if "srun" in subject.scheduler.reader.own_commands:
        with_rank = "srun --ntasks-per-node=1 bash -c '... --machine_rank $SLURM_NODEID ...'"
    for start in starts(subject):
        options = start.options_of("accelerate")
        machines, processes = options.get("--num-machines"), options.get("--num-processes")
        num_machines = whole_number(subject.value_of(machines or ""))
        is_several = start.is_launched and (start.num_nodes or 1) > 1 and start.inner.program == "accelerate"
        if is_several and {"--num-machines", "--config-file"}.isdisjoint(options) and not start.hides_options:
            what = "each node trains alone, unless the default configuration of accelerate connects them"
            yield Problem(start.command.line, what, f"add --num_machines {start.num_nodes}", "note")
        if not options or not num_machines or num_machines < 2 or start.hides_options:
            continue
        if not start.is_launched and (subject.num_nodes or 1) > 1 and not reaches_other_nodes(subject):
            what = f"accelerate waits for {num_machines} machines, but only the first node starts it"
            yield Problem(start.command.line, what, f"use {with_rank}", "note")
        is_static = options.get("--rdzv-backend", "static") == "static"
        # The configuration of each machine may have its rank.
        of_each = re.search("NODEID|PROCID|(?i:host)|RANK", options.get("--config-file", ""))
        if start.is_launched and "--machine-rank" not in options and is_static and not of_each:
            yield Problem(
                start.command.line,
                f"accelerate launch --num_machines {num_machines} has no --machine_rank, so all have rank 0",
                f"use {with_rank}, or --rdzv_backend c10d",
            )
        if start.is_launched and options.keys().isdisjoint(
            ("--main-process-ip", "--config-file", "--rdzv-conf")
        ):
            what = f"accelerate launch --num_machines {num_machines} has no --main_process_ip"
            yield Problem(start.command.line, what, "add --main_process_ip FIRST_NODE", "warning")
        total, gpus = whole_number(subject.value_of(processes or "")), subject.gpus_per_node
        if total and gpus and total == gpus:
            what = f"--num_processes {total} is for all {num_machines} machines together, not for each"
            yield Problem(start.command.line, what, f"use --num_processes {num_machines * gpus}", "warning")
