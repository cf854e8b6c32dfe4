"""Checks of the commands that launch ranks, under any scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.checks_job_steps import is_in_loop
from ddp_hpc.lint.checks_mpi import mpi_of
from ddp_hpc.lint.checks_program_limits import threads_of
from ddp_hpc.lint.launch_commands import (
    ONE_PROCESS,
    STARTS_ALL_RANKS,
    Start,
    is_alone,
    reaches_other_nodes,
    runs_training,
    starts,
    takes_rank_of_slurm,
    torchruns,
    trains_with_torch,
)
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.script_options import whole_number

_CORES_OF_NODE = re.compile(r"(?:\$\(|`)\s*nproc(?:\s+--\S+)?\s*[)`]|\$\{?SLURM_CPUS_ON_NODE\}?")
# With these, Open MPI starts more ranks than the job has tasks.
_OTHER_SLOTS = re.compile(
    r"MCA_\w*(?:rmaps_base_(?:oversubscribe|mapping)|ras|hwloc_base_use_hw)|\benv\s.*-u SLURM|"
    r"\bunset\s.*(?:SLURM_(?:JOB_?ID|(?:JOB_)?NODELIST|N?TASKS)|\$\{!SLURM)|"
    r"mca (?:ras|plm) (?:\^slurm|isolated|simulator)"
)
_NO_TRAINING = re.compile(
    r"(?i)(?:^|/)(?!\w*(?:train|tun))\w*(?:infer|generat|embed|extract|predict|eval|preprocess|tokeniz)\w*\.py$"
)
_WORKERS = re.compile(
    r"--(?:[\w.]{1,40}\.)?(?:dataloader[-_])?(?:num[-_]|n(?:[-_](?=jobs))?)?"
    r"(?:workers|threads|cpus|cores|jobs)[= ](\d{1,3})\b"
)
_OF_JOBS = re.compile(r"--(?:profile|cluster|executor|slurm|workflow)")
_MORE_CPUS = re.compile(r"cpus|exclusive|--mem[= ]?0|-c\b|whole")
# Other resources of --gres may follow, such as gpu:4,nvme:100.
_GPUS_OF_STEP = re.compile(r"(?:(?:.*,)?gpu:)?(?:[^:,]*:)?(\d+)(?:,|$)")
_GPU_OPTIONS = {"--gpus", "--num-gpus", "--ngpus", "--devices", "--n-gpus"}
_OF_NODES = re.compile(
    r"(?:torchrun|distributed\.\w+|accelerate)\s[^#]*--n(?:nodes|um[-_]machines)[= ]([$\w{}]+)"
)
# Options with which these launchers start the ranks of one node.
_OF_ONE_NODE = re.compile(r"--no_ssh|--node_rank|--launcher|-np? 1\b|--num_nodes[= ]1\b")
# Arguments of fairseq without those with which it connects the tasks of Slurm.
_FAIRSEQ = re.compile(
    r"\sfairseq(?:-(?:hydra-)?train|_cli/(?:hydra_)?train\.py)\s(?![^#]*distributed[-_.](?:port|init))"
    r"(?:[^#]*\bdistributed[-_]world[-_]size[= ](?![01]\b)|(?![^#]*(?:world[-_]size|--config)))"
)


@check("RANK001", "error", "a launcher of ranks started once per rank")
def _launcher_per_rank(subject: Subject) -> Iterator[Problem]:
    is_connected = re.search(r"\bRANK=|torch\.dist|torchrun", subject.script.text)
    for start in starts(subject):
        inner, per_node = start.inner, start.ranks_per_node if start.is_launched else None
        times = start.num_ranks or start.num_nodes or 1
        by = start.command.name
        is_own = inner.words[:1] == (f"./{inner.program}",)  # a program of the user with this name
        is_for_job = inner.program in (*STARTS_ALL_RANKS, "srun") and not (
            is_own or _OF_ONE_NODE.search(start.command.text)
        )
        if is_for_job and start.is_launched and not start.launcher_hides_options and times > 1:
            what = f"{by} starts {inner.program} {times} times, and each of them starts all ranks"
            needs_hosts = inner.program in ("deepspeed", "horovodrun") and start.num_nodes != 1
            remedy = f"start {inner.program} once, without {by}{', with --hostfile' * needs_hosts}"
            yield Problem(start.command.line, what, remedy)
        elif start.is_launched and times > 1 and (whole_number(start.given("--num-gpus")) or 0) > 1:
            what = f"{by} starts the program {times} times, and with --num-gpus it may start ranks itself"
            yield Problem(start.command.line, what, f"start it once per node, without {by} on one", "note")
        elif by == "srun" and not is_connected and _FAIRSEQ.search(start.command.text):
            tasks = whole_number(subject.value_of(start.command.option("-n", "--ntasks") or "$SLURM_NTASKS"))
            if tasks and tasks > 1:
                what = f"each of the {tasks} tasks of srun starts all ranks of fairseq itself"
                remedy = "add --distributed-port, with which fairseq uses the tasks"
                yield Problem(start.command.line, what, remedy, "note")
        elif per_node and per_node > 1 and start.words[:2] == ("ray", "start"):
            what = f"{by} starts ray {per_node} times per node, and one is for the whole node"
            yield Problem(start.command.line, what, "give it as many tasks (-n) as nodes", "note")
        elif per_node and per_node > 1 and _starts_ranks_of_node(inner):
            name = "torchrun" if inner.is_torchrun else inner.program
            yield Problem(
                start.command.line,
                f"{by} starts {name} {per_node} times per node, and each {name} starts all ranks of the node",
                f"start {name} once per node (srun -n $SLURM_NNODES, mpiexec --ppn 1)",
            )


def _is_agent_of_task(start: Start) -> bool:
    """Returns whether each task is a node of torchrun with one rank, as for one task per GPU."""
    nodes = whole_number(start.given("--nnodes"))
    is_numbered = "NODEID" not in (start.options.get("--node-rank") or "")
    return (
        start.given("--nproc-per-node") == "1"
        and nodes is not None
        and nodes == start.num_ranks
        and is_numbered
    )


def _starts_ranks_of_node(start: Start) -> bool:
    """Returns whether a program is torchrun, accelerate or deepspeed, and starts several ranks."""
    if start.is_torchrun and _is_agent_of_task(start):
        return False
    if start.is_torchrun:
        # The tasks of srun may be independent trainings of one rank, each with its own port.
        return {start.given("--nproc-per-node"), start.given("--nnodes")} - {None, "1"} != set()
    options = start.options_of("accelerate", "deepspeed")
    machines = options.get("--num-machines", "1")
    processes = options.get("--num-processes", options.get("--num-gpus", "1"))
    # Each task can be a machine with one process.
    return processes not in ("1", machines) and not re.search("NTASKS|NPROCS|WORLD", machines)


@check("RANK002", "error", "torchrun does not connect the nodes")
def _torchrun_alone(subject: Subject) -> Iterator[Problem]:
    yield from _one_after_the_other(subject)
    if any(command.words[0] in ("for", "while") for command in subject.script.commands):
        return
    for start in torchruns(subject):
        nodes = start.num_nodes or 1
        yield from _wrong_node_rank(start, nodes)
        if nodes < 2 or start.hides_options or start.launcher_hides_options:
            continue
        given = start.given("--nnodes")
        if start.is_launched and ("--standalone" in start.options or given in (None, "1")):
            if "--standalone" in start.options or start.given("--rdzv-endpoint") is None:
                yield Problem(
                    start.command.line,
                    f"{start.command.name} starts torchrun on {nodes} nodes, but each node trains on its own",
                    f"use torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT",
                    # Each node may work on its own part of the data.
                    "note" if any(map(_NO_TRAINING.search, start.words)) else None,
                )
        elif not (start.is_launched or whole_number(given) in (None, 1) or _is_remote(subject, start)):
            what = (
                f"torchrun --nnodes waits for {given} nodes, but the script starts it on the first node only"
            )
            remedy = (
                "start it on each (srun -n $SLURM_NNODES, mpiexec --ppn 1), with --rdzv-backend=c10d "
                "--rdzv-endpoint=FIRST_NODE:PORT"
            )
            yield Problem(start.command.line, what, remedy)


def _one_after_the_other(subject: Subject) -> Iterator[Problem]:
    """Yields a launcher that waits for other nodes, whose launchers the script starts only after it."""
    found = []
    for start in starts(subject):
        command, several = start.command, _OF_NODES.search(start.command.text)
        is_part = command.name == "ssh" or (command.name == "srun" and start.num_nodes == 1)
        if several and is_part and whole_number(subject.value_of(several[1])) not in (None, 0, 1):
            found.append(command)
    in_loop = [c for c in found if is_in_loop(subject, c)]
    if len(in_loop or found) > 1 - bool(in_loop) and not any(c.ends == "&" for c in found):
        what = "this launcher waits for the other nodes, and theirs starts only after it has ended"
        remedy = "write & at its end, and wait after the last one, or start them with one srun"
        yield Problem((in_loop or found)[0].line, what, remedy, "note")


def _wrong_node_rank(start: Start, nodes: int) -> Iterator[Problem]:
    given, rank = start.given("--nnodes"), whole_number(start.given("--node-rank"))
    number = whole_number(given)
    if number and rank is not None and rank >= number:
        what = f"torchrun has node rank {rank}, but the ranks of {counted(number, 'node')} begin with 0"
        yield Problem(start.command.line, what, "number the nodes from 0, or correct --nnodes")
    backend, is_open = start.given("--rdzv-backend"), start.hides_options or start.launcher_hides_options
    if (
        start.is_launched
        and number
        and nodes > 1
        and number not in (1, nodes)
        and not (is_open or _is_agent_of_task(start))
    ):
        what = f"{start.command.name} starts torchrun on {nodes} nodes, and it waits for {number}"
        yield Problem(start.command.line, what, f"use --nnodes={nodes}, or start it on {number} nodes")
    has_endpoint = start.given("--rdzv-endpoint") is not None or "PET_" in start.subject.script.text
    if backend == "c10d" and start.is_launched and nodes > 1 and not (number == 1 or is_open or has_endpoint):
        what = "with c10d and without an endpoint, each node waits at itself; --master-addr is not read"
        yield Problem(start.command.line, what, "add --rdzv-endpoint=FIRST_NODE:PORT")
    is_static = backend in (None, "static") and start.given("--node-rank") is None
    connects = number != 1 and given is not None and "--standalone" not in start.options
    is_set = "PET_" in start.subject.script.text or "--rdzv-conf" in start.options or is_open
    if is_static and connects and start.is_launched and nodes > 1 and not is_set:
        what = "the rendezvous is static, so torchrun of each node has rank 0 unless --node-rank is given"
        remedy = "use --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:PORT"
        yield Problem(start.command.line, what, remedy)


def _is_remote(subject: Subject, start: Start) -> bool:
    return start.command.name in ("ssh", "pbsdsh", "pdsh") or reaches_other_nodes(subject)


@check("RANK003", "error", "more ranks than GPUs")
def _more_ranks_than_gpus(subject: Subject) -> Iterator[Problem]:
    gpus, text = subject.gpus_per_node, subject.script.text
    # With --exclusive, Slurm allocates all GPUs of the nodes; devices that the script names may exist.
    is_open = subject.script.value("--exclusive") == "" or subject.script.sets("CUDA_VISIBLE_DEVICES")
    site, of_site = subject.site, False
    is_pbs = subject.scheduler.reader.requests_by_resources
    if not gpus and site and is_pbs and "gpu" not in " ".join(site.pbs.resources):
        gpus, of_site = site.node.devices, True  # the site assigns whole nodes
    if not gpus or is_open:
        return
    for start in starts(subject):
        given = start.is_launched and start.command.option("--gres", "--gpus", "--gpus-per-node", "-G")
        for option in _GPU_OPTIONS & {*start.options} if start.program == "python" and not given else ():
            is_of_lightning = option == "--devices"  # elsewhere, devices can be anything
            several = 1 if is_of_lightning else subject.num_nodes or 1
            is_known = not is_of_lightning or re.search(
                r"(?i)lightning|--(?:accelerator|strategy|trainer|num[-_]nodes)", text
            )
            if (num := whole_number(start.given(option))) and num > gpus * several and is_known:
                what = f"the program uses {num} GPUs, and the job has {gpus} on a node"
                remedy = f"let it use {counted(gpus * several, 'GPU')}, or request {num}"
                yield Problem(start.command.line, what, remedy, "warning")
        if start.is_torchrun:
            ranks = whole_number(start.given("--nproc-per-node"))
        elif (
            start.options_of("accelerate").get("--num-machines", "1") == "1" and start.program == "accelerate"
        ) and start.options_of("accelerate").keys().isdisjoint(("--config-file", "--cpu", "--use-cpu")):
            ranks = whole_number(start.given("--num-processes"))
        elif (
            start.is_launched
            and start.program == "python"
            and (trains_with_torch(subject) or (of_site and runs_training(start)))
        ):
            ranks = 1 if is_alone(start) else start.ranks_per_node
        else:
            continue
        of_step = _GPUS_OF_STEP.match(given or "")
        own = (whole_number(of_step[1]) if of_step else None) or gpus
        if ranks and ranks > own:
            what = f"{ranks} ranks per node share {counted(own, 'GPU')}, but NCCL rejects two on one device"
            yield Problem(
                start.command.line,
                what,
                f"start {counted(own, 'rank')} per node, or request {ranks} GPUs",
                None if start.is_torchrun else "note" if of_site or "cuda-mps" in text else "warning",
            )


@check("RANK004", "warning", "the number of ranks is not nodes x ranks per node")
def _literal_ranks(subject: Subject) -> Iterator[Problem]:
    nodes, tasks = subject.num_nodes or 0, whole_number(subject.script.value("--ntasks"))
    may_oversubscribe = _OTHER_SLOTS.search(subject.script.text)
    for command in subject.script.launches("mpiexec", "mpirun"):
        total = whole_number(subject.value_of(command.option("-n", "-np", "--np", "--n") or ""))
        own = whole_number(command.option("--ppn", "-ppn", "--npernode", "-npernode", "-N"))
        if ppr := re.search(r"\sppr:(\d{1,4}):node", command.text):
            own = int(ppr[1])
        per_node = own or subject.ranks_per_node
        # One rank is a serial program. With both options, a smaller total may use only some of the nodes, and
        # fewer ranks on all nodes may have more memory or threads each.
        is_part = may_oversubscribe or re.search("oversubscribe|map-by(?!.ppr:)", command.text) or total == 1
        if total and per_node and total < nodes * per_node:
            is_part = is_part or total > (nodes - 1) * per_node or (own is not None and total % own == 0)
        cpus = subject.scheduler.reader.cpus_per_rank(subject.script)
        slots = nodes or 1  # without --ntasks, each node has a task
        mpi, has_cpus = mpi_of(subject), total is not None and slots < total <= slots * (cpus or 1)
        # Hydra starts a rank for each CPU of a task, too.
        is_part = is_part or (mpi not in ("Open MPI", "") and total == nodes * (per_node or 0) * (cpus or 0))
        has_few_slots = has_cpus and not (per_node or may_oversubscribe)
        has_few_slots = has_few_slots and _has_one_task_per_node(subject, command)
        if has_few_slots and mpi not in ("Open MPI", ""):
            continue  # other MPIs start as many ranks as they are told
        if has_few_slots:
            what = f"{total} ranks are started, but Open MPI has {counted(slots, 'slot')}: one for each task"
            remedy = (
                f"request --ntasks={total} and --cpus-per-task={(cpus or 1) // -(-(total or 1) // slots)}"
            )
            yield Problem(command.line, what, remedy, None if mpi == "Open MPI" else "note")
        elif total and tasks and total > tasks and not (own or is_part):
            what = f"{total} ranks are started, but the job has {counted(tasks, 'task')}"
            remedy = "use mpirun -np $SLURM_NTASKS, or request as many"
            yield Problem(command.line, what, remedy, None if nodes and per_node else "note")
        is_for_nodes = own or not tasks
        if is_for_nodes and total and nodes and per_node and total != nodes * per_node and not is_part:
            what = f"{total} ranks are started, but {counted(nodes, 'node')} x {counted(per_node, 'rank')}"
            what += f" per node = {nodes * per_node}"
            remedy = f"start {nodes * per_node} ranks, or request nodes and ranks per node for {total}"
            # The program may need no more, or a file of hosts give more ranks to a node.
            has_own_hosts = re.search(
                r"\s--?(?:f|machinefile|hostfile)[ =](?!\S*PBS_NODEFILE)", " ".join(command.own_words)
            )
            is_unsure = total < nodes * per_node or has_own_hosts
            yield Problem(command.line, what, remedy, "note" if is_unsure else None)


def _has_one_task_per_node(subject: Subject, command: Command) -> bool:
    if re.search(r"oversubscribe|-map-by|hwthread|--?host\b|-H\b|hostfile|-f\b", command.text):
        return False
    return subject.script.scheduler != "" and subject.script.value("--ntasks") in (None, "1")


@check("RANK005", "warning", "more threads than cores")
def _more_threads_than_cores(subject: Subject) -> Iterator[Problem]:
    cpus = subject.scheduler.reader.cpus_per_rank(subject.script)
    tasks = subject.ranks_per_node or whole_number(subject.script.value("--ntasks"))
    launched = {command.name for command in subject.script.launches() if command.launched}
    if not launched and (subject.script.value("--exclusive") == "" or subject.script.value("--mincpus")):
        return  # a program in the batch shell can use all CPUs of the node
    if cpus and tasks and not launched:
        cpus *= tasks  # a program in the batch shell can use the CPUs of all tasks
    per_node = subject.ranks_per_node or 1
    of_rank = max(1, (cpus or 0) // max(map(_local_ranks, starts(subject)), default=1))
    for line, name, value in subject.script.assignments:
        threads = whole_number(value)
        is_sure = name in subject.script.set_once  # not one of several cases
        if (
            name == "OMP_NUM_THREADS"
            and _CORES_OF_NODE.fullmatch(value)
            and per_node > 1
            and "srun" in launched
        ):
            what = f"OMP_NUM_THREADS={plain(value)} is all CPUs of the job on the node, for each of"
            what += f" {per_node} ranks"
            remedy = f"use export OMP_NUM_THREADS={'$SLURM_CPUS_PER_TASK' if cpus else '1'}"
            yield Problem(line, what, remedy, None if is_sure else "note")
        if name == "OMP_NUM_THREADS" and threads and cpus and threads > cpus and is_sure:
            what = f"OMP_NUM_THREADS={threads}, but a process has {counted(of_rank, 'CPU')}"
            # The jobs or processes that a scheduler in Python starts have CPUs of their own.
            is_of_jobs = re.search("dask|parsl|submitit", subject.script.text)
            has_more = any(_may_use_more(subject, c, threads, cpus) for c in subject.script.launches())
            yield Problem(
                line,
                what,
                f"request as many CPUs, or use export OMP_NUM_THREADS={of_rank}",
                # A core may have two or four hardware threads.
                "note" if is_of_jobs or has_more or threads < 4 * cpus else None,
            )
    for start in starts(subject):
        # The jobs of a workflow have CPUs of their own.
        is_local = "snakemake" in start.words and not _OF_JOBS.search(start.command.text)
        is_known = is_local or start.program in ("python", "torchrun")
        workers = _WORKERS.search(start.command.text) if is_known else None
        num_workers = int(workers[1]) * _local_ranks(start) if workers else 0
        what = "workers"
        if not workers and (numbers := [number for _, number in threads_of(start)]):
            num_workers, what = max(numbers), "threads"
        requested = " ".join(d.text for d in subject.script.read())
        has_tasks = subject.script.value("--ntasks") not in (None, "1") or (subject.ranks_per_node or 1) > 1
        # Without srun, a program can use the CPUs of all tasks.
        of_chunks = subject.scheduler.reader.requests_by_resources
        of_step = start.command.option("-c", "--cpus-per-task") if start.is_launched else None
        has_one_cpu = not (of_chunks or of_step) and (start.is_launched or not has_tasks)
        if num_workers > 1 and has_one_cpu and not _MORE_CPUS.search(requested):
            what = f"{num_workers} {what} share one CPU, unless the site gives more to a task"
            yield Problem(start.command.line, what, f"request --cpus-per-task={num_workers}", "note")
        given = whole_number(subject.value_of(of_step)) if of_step else cpus
        if given and workers and num_workers >= 2 * given:
            what = f"{num_workers} workers or threads share {counted(given, 'CPU')}"
            own = f"{workers[0].removesuffix(workers[1])}{max(1, given // _local_ranks(start))}"
            remedy = f"request {num_workers} CPUs, or use {own}"
            yield Problem(start.command.line, what, remedy, "note")


def _may_use_more(subject: Subject, command: Command, threads: int, cpus: int) -> bool:
    """Returns whether a launcher gives each rank the CPUs of several tasks, or starts so few that it may."""
    of_rank = re.search(r":pe=(\d{1,4})", command.text, re.IGNORECASE)
    if of_rank and int(of_rank[1]) >= threads:
        return True
    if command.name == "srun":
        return (whole_number(subject.value_of(command.option("-c", "--cpus-per-task") or "")) or 0) >= threads
    ranks = whole_number(subject.value_of(command.option("-n", "-np", "--np") or ""))
    tasks = whole_number(subject.value_of("$SLURM_NTASKS")) or 0
    return bool(ranks and ranks * threads <= tasks * cpus)


def _local_ranks(start: Start) -> int:
    given = start.given("--nproc-per-node")
    return (start.subject.gpus_per_node if given in ("gpu", "auto") else whole_number(given)) or 1


@check("RANK014", "note", "one rank on a node with several GPUs")
def _one_rank(subject: Subject) -> Iterator[Problem]:
    gpus = subject.gpus_per_node or 1
    processes = whole_number(subject.value_of(subject.script.last_assigned("WORLD_SIZE") or ""))
    if processes and processes == gpus * (subject.num_nodes or 1):
        return  # the program starts a process for each GPU
    if gpus < 2 or any(c.ends == "&" or c.words[0] in ("for", "while") for c in subject.script.commands):
        return  # processes in the background or in a loop may share the GPUs
    for start in (one for one in starts(subject) if not one.launcher_hides_options):
        if start.is_torchrun and takes_rank_of_slurm(start):
            what = "the program takes its rank from SLURM_PROCID, which is the same for all ranks of torchrun"
            yield Problem(start.command.line, what, "start it with srun, without torchrun", "note")
        elif start.is_torchrun:
            ranks = whole_number(start.given("--nproc-per-node") or "1") or gpus
            if ranks < gpus and start.ranks_per_node == 1 and not start.hides_options:
                what = f"torchrun starts {counted(ranks, 'rank')} on a node with {gpus} GPUs"
                remedy = (
                    f"use torchrun --nproc-per-node={gpus}, or request {ranks}, unless a rank uses several"
                )
                # Ranks that the script asks for may be a test, and a program may start the others itself.
                yield Problem(start.command.line, what, remedy)
        elif _is_single_task(start) and not ONE_PROCESS.search(" ".join(start.command.words)):
            what = f"srun starts one task on a node with {gpus} GPUs"
            remedy = f"request {gpus} tasks per node, or one GPU, unless one task uses all {gpus} GPUs"
            yield Problem(start.command.line, what, remedy)


def _is_single_task(start: Start) -> bool:
    """Returns whether srun starts Python in a single task."""
    if start.command.name != "srun" or start.program != "python":
        return False
    script = start.subject.script
    if start.command.option("-n", "--ntasks", "--ntasks-per-node", "--gpus", "--gres", "-G") is not None:
        return False
    requested = {script.value("--ntasks"), script.value("--ntasks-per-node")}
    is_one = requested <= {None, "1"} and script.value("--ntasks-per-gpu") is None
    return is_one and not start.subject.asked_nodes
