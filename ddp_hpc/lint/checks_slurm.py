"""Checks of Slurm scripts: options, signals, GPUs and options that srun does not inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.checks_program_limits import threads_of_steps
from ddp_hpc.lint.launch_commands import (
    hides_launcher_options,
    programs,
    ranks_per_node,
    trains_with_torch,
)
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.script_options import whole_number
from ddp_hpc.schedulers.slurm.contradictions import GPUS_IN_GRES, GPUS_TWICE_SINCE
from ddp_hpc.schedulers.versions import is_between

_HIDES_PEERS = re.compile(r"(?:verbose,)?(?:closest|single|per_task|map_gpu|mask_gpu|map|mask)\b.*")
# Files of conda, of virtual environments and of the system.
_SETS_NO_TRAP = re.compile(r"\bactivate\b|/conda[.]sh|rc(?![\w/])|profile\b|/etc/|/module")
_HARMLESS = re.compile(
    r"\bsrun\b.*(?:\s|/bin/|[\"'](?=[^;&|]*$))(?:hostname|mkdir|echo|ls|df|rm|free|lscpu|uptime|"
    r"numactl -[Hs]|dcgmi|killall|pkill|printenv|(?:\S*/)?(?:nvidia|rocm)-smi)\b"
)
# The step is this script, or a function of it, so that its traps are in the step.
_STARTS_ITSELF = re.compile(r"\bexport -f\b|\bsrun\s[^\n]{0,200}\$\{?(?:0|BASH_SOURCE)\b")
_SIGNALS = {"1": "HUP", "10": "USR1", "12": "USR2", "15": "TERM"}  # of Linux
# Output that does not go to the log of the job, or that is appended.
_APPENDS = re.compile(
    r"(?m)^\s*exec\s[^\n#]{0,200}>|\btee\s+(?:-a|--append)\b|srun\s[^\n]{0,300}--open-mode[= ]a|"
    r"SLURM_RESTART_COUNT|(?:python[\d.]*|run|launch)\s[^\n]{0,500}>>"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_OF_TASK = re.compile(r"\$\{?SLURM_CPUS_PER_TASK\b.*")
# Job steps that start no ranks.
_NO_RANKS = re.compile(r"\bsrun\b.*\b(?:hostname|pip|nvidia-smi|mkdir|echo)\b")


@check("SLURM005", "note", "--gpus-per-task hides the other GPUs")
def _gpus_per_task(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    # An explicit --gpu-bind replaces the implied one; SLURM006 checks it.
    has_binding = re.search(r"allow-task-sharing|--gpu-bind|gres/gpu:none", script.text)
    if has_binding or not trains_with_torch(subject):
        return
    # Only srun binds GPUs; processes of the batch shell, such as those of horovodrun, see all of them.
    steps = _steps_with_ranks(subject)
    lines = [d.line for d in script.read() if d.flag == "--gpus-per-task" and d.value != "0"]
    lines = lines if steps and _shares_nodes(subject) else []
    lines += [c.line for c in steps if c.option("--gpus-per-task") is not None]
    for line in lines:
        what = (
            "--gpus-per-task binds each task to its own GPU: NCCL cannot access the other GPUs' memory, and "
            "cuda:LOCAL_RANK does not exist"
        )
        yield Problem(line, what, "use --gpus-per-node, or add --gpu-bind=none to srun")


@check("SLURM006", "note", "--gpu-bind hides the other GPUs")
def _gpu_bind(subject: Subject) -> Iterator[Problem]:
    if not trains_with_torch(subject):
        return
    if subject.script.value("--gpus-per-task") is not None:
        return  # it binds the GPUs, too
    steps = [step for step in _steps_with_ranks(subject) if step.option("--gpus-per-task") is None]
    options = [(d.line, d.value) for d in subject.script.read() if d.flag == "--gpu-bind" and steps]
    options += [(c.line, c.option("--gpu-bind") or "") for c in steps]
    for line, value in options:
        if _HIDES_PEERS.fullmatch(value):
            what = (
                f"--gpu-bind={plain(value)} shows each task only its own GPU, so NCCL cannot access the "
                "others directly"
            )
            yield Problem(line, what, "omit it, or use --gpu-bind=none")


def _shares_nodes(subject: Subject) -> bool:
    """Returns whether several tasks run on the same node."""
    if subject.ranks_per_node is not None:
        return subject.ranks_per_node > 1
    tasks, nodes = whole_number(subject.script.value("--ntasks")), subject.num_nodes
    return tasks is not None and nodes is not None and tasks > nodes


def _steps_with_ranks(subject: Subject) -> list[Command]:
    """Returns the job steps that may start several ranks on a node."""
    steps = subject.script.launches("srun")
    return [c for c in steps if ranks_per_node(subject, c) != 1 and not _NO_RANKS.search(c.text)]


@check("SLURM007", "warning", "srun does not inherit --cpus-per-task from sbatch")
def _cpus_not_inherited(subject: Subject) -> Iterator[Problem]:
    version, script = subject.scheduler_version, subject.script
    if version and not is_between(version, "22.05", "23.02"):
        return
    of_job, is_whole = whole_number(script.value("--cpus-per-task")) or 0, script.value("--exclusive") == ""
    if not version and not script.sets("SRUN_CPUS_PER_TASK"):
        for command, option, threads, own in threads_of_steps(subject):
            is_sure = threads == of_job or (option.startswith("--") and threads > of_job > 1)
            if own is None and of_job != 1 and (is_sure or (is_whole and not of_job)):
                of = " of Slurm 22.05 and 23.02" if of_job else ""
                what = f"{plain(option)} is {threads}, but srun{of} may give the program one CPU"
                yield Problem(command.line, what, f"use srun --cpus-per-task={threads}", "note")
                return
    # Without a version, only scripts are judged with several tasks that use threads. Many sites bind each of
    # them to its CPUs, but a single task has those of the whole step.
    has_threads = any(name in _THREADS and _OF_TASK.fullmatch(value) for _, name, value in script.assignments)
    if not version and not (has_threads and subject.has_many_tasks):
        return
    requested = script.value("--cpus-per-task")
    if requested is None or requested == "1" or script.sets("SRUN_CPUS_PER_TASK"):
        return
    for command in subject.script.launches("srun"):
        is_bound = command.option("--cpu-bind") in (None, "cores", "threads", "verbose,cores")
        if command.after_options and is_bound and command.option("-c", "--cpus-per-task") is None:
            what = (
                f"--cpus-per-task={plain(requested)} is given to sbatch, but srun of Slurm 22.05 and 23.02 "
                f"does not inherit it, so each rank {'gets' if version else 'may get'} one core"
            )
            remedy = "use srun --cpus-per-task=$SLURM_CPUS_PER_TASK, or export SRUN_CPUS_PER_TASK"
            yield Problem(command.line, what, remedy, None if version else "note")
            if not version:
                return


@check("SLURM008", "warning", "--signal goes to the job steps, but the trap is in the batch shell")
def _signal_for_steps(subject: Subject) -> Iterator[Problem]:
    signal = subject.script.value("--signal")
    if signal is None or "B:" in signal:
        return
    commands = subject.script.commands
    pythons = [c for c in commands if re.fullmatch(r"python[0-9.]*|torchrun|accelerate", c.name)]
    others = re.compile(r"srun|mpi|\b(?:ibrun|prun|jsrun|aprun|flux)\b|\.sh\b|\btrap\b|kill|\$\{?\w+\}? ")
    if pythons and not any(others.search(c.text) for c in commands):
        line = pythons[-1].line
        what = (
            f"--signal={plain(signal)} goes to job steps only, and line {line} does not start one with srun"
        )
        # Other programs often ignore the signal.
        text = re.sub(r"--signal\S*|--requeue", "", subject.script.text)
        handles = re.search(r"(?i)checkpoint|ckpt|requeue|signal|lightning|preempt", text)
        remedy = "request one task, and put srun in front of the program"
        is_handled = handles and not any(source.ignores_signals for _, _, source in programs(subject))
        yield Problem(subject.line_of("--signal"), what, remedy, None if is_handled else "note")
    name = signal.partition("@")[0].removeprefix("R:").removeprefix("SIG")
    for command in subject.script.commands:
        trapped = [word.upper().removeprefix("SIG") for word in command.words[2:]]
        is_ignored = command.words[1:2] in [("",), (":",), ("true",), ("-",)]
        if command.name == "trap" and name.upper() in trapped and not is_ignored:
            what = f"--signal={plain(signal)} goes to the job steps, not to the trap of line {command.line}"
            remedy = f"use --signal=B:{plain(signal)}, start the launcher in the background and wait for it"
            # The message may be for the log of a job whose steps handle the signal, and what is also run at
            # the exit for the time limit, when Slurm sends TERM to the batch shell, too.
            only_prints = re.match(r"(?:echo|printf|date)\b[^;&|]*$", command.words[1])
            is_unsure = bool(only_prints or {"EXIT", "0"} & {*trapped})
            is_unsure |= _STARTS_ITSELF.search(subject.script.text) is not None
            yield Problem(subject.line_of("--signal"), what, remedy, "note" if is_unsure else None)
            return


@check("SLURM009", "warning", "--signal=B: without a trap")
def _signal_without_trap(subject: Subject) -> Iterator[Problem]:
    signal, commands = subject.script.value("--signal") or "", subject.script.commands
    traps = {word.upper().removeprefix("SIG") for c in commands if c.name == "trap" for word in c.words[2:]}
    traps = {_SIGNALS.get(word, word) for word in traps}
    name = re.sub(r"^R?B:|@.*", "", signal).upper().removeprefix("SIG")
    # While bash waits for a program, SIGINT and SIGQUIT do not end it.
    is_trapped = name in traps | {"INT", "2", "QUIT", "3"} or (traps and not name[:1].isalpha())
    shell = subject.script.shebang
    is_other = any("exec" in c.words[: len(c.words) - len(c.argv)] for c in commands)
    is_other |= bool(shell) and not re.search(r"sh\b", shell)  # a program, which may handle the signal
    # Bash also runs what is for its exit if a signal ends it.
    is_unsure = any("$" in word for word in traps) or ("bash" in shell and bool({"EXIT", "0"} & traps))
    # A file that the script reads may set the trap.
    reads_file = any(c.name in ("source", ".") and not _SETS_NO_TRAP.search(c.text) for c in commands)
    if "B:" in signal and not is_other and not is_trapped:
        what = f"--signal={plain(signal)} goes only to the batch shell, which has no trap for it and dies"
        remedy = "remove B: to send the signal to what srun starts, or set a trap"
        yield Problem(subject.line_of("--signal"), what, remedy, "note" if reads_file or is_unsure else None)


@check("SLURM010", "warning", "a requeued job overwrites its log")
def _requeue_truncates(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    is_short = (subject.walltime_s or 3600) < 1800  # what is overwritten is soon there again
    lines = [d.line for d in script.read() if d.flag == "--requeue"]
    lines += [c.line for c in script.commands if c.argv[:2] == ("scontrol", "requeue")]
    output = script.value("--output") or ""  # also for errors
    logs = {output, script.value("--error") or output} - {"/dev/null", "none"}
    # Without --signal, a trap that requeues the job waits for a signal that only the user sends.
    is_trap = not any(d.flag in ("--requeue", "--signal") for d in script.read()) and "trap" in script.text
    if lines and logs and not is_short and (script.value("--open-mode") or "")[:1].lower() != "a":
        what, remedy = "if the job is requeued, it overwrites its log", "add #SBATCH --open-mode=append"
        # On another node, the log has another name, and that of a server is of no use later.
        is_unsure = is_trap or not trains_with_torch(subject) or re.search(r"%\d*N", "".join(logs))
        is_appended = any(_APPENDS.search(command.text) for command in script.commands)
        yield Problem(lines[0], what, remedy, "note" if is_unsure or is_appended else None)


@check("SLURM011", "warning", "srun --ntasks-per-node without --ntasks")
def _per_node_is_ignored(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    for command in script.launches("srun"):
        per_node = whole_number(command.option("--ntasks-per-node"))
        job = subject.ranks_per_node
        if not (per_node and job and per_node < job):
            continue
        if command.option("--jobid") is not None or _HARMLESS.search(command.text):
            continue  # a step of another job, or one that may be repeated
        # Without SLURM_NTASKS, or in a variable, the number of tasks may be given.
        if hides_launcher_options(command) or re.search(r"\bSLURM_NTASKS=|unset\s.*SLURM_N", script.text):
            continue
        if command.option("-n", "--ntasks", "-N", "--nodes") is None:
            what = (
                f"without --ntasks, srun ignores --ntasks-per-node={per_node} in a job with {job} tasks "
                "per node"
            )
            number = "$SLURM_NNODES" if per_node == 1 else f"$((SLURM_NNODES * {per_node}))"
            yield Problem(command.line, what, f"add --ntasks={number} to srun")


@check("SLURM013", "note", "--ntasks does not match nodes x tasks per node")
def _tasks_disagree(subject: Subject) -> Iterator[Problem]:
    tasks = whole_number(subject.script.value("--ntasks"))
    nodes, per_node = subject.num_nodes, whole_number(subject.script.value("--ntasks-per-node"))
    is_maximum = tasks and tasks > 1 and per_node and -(-tasks // per_node) == nodes
    requested = whole_number(subject.script.value("--nodes"))
    omit = f"omit --ntasks for a total of {{}}, or --ntasks-per-node for a total of {tasks}"
    if tasks and requested and tasks < requested:
        what = f"--ntasks={tasks} reduces --nodes={requested} to {tasks}, as each node needs a task"
        remedy = f"request {counted(tasks, 'node')}, or at least {requested} tasks"
        yield Problem(subject.line_of("--ntasks"), what, remedy, "warning")
    elif tasks and requested and per_node and tasks > requested * per_node:
        what = f"with --ntasks-per-node={per_node}, Slurm cannot place {tasks} tasks on"
        what = f"{what} {counted(requested, 'node')}, and rejects the job"
        yield Problem(subject.line_of("--ntasks"), what, omit.format(requested * per_node), "warning")
    elif tasks and nodes and per_node and tasks != nodes * per_node and not is_maximum:
        what = f"--ntasks={tasks} is not --nodes x --ntasks-per-node ({nodes} x {per_node}), so Slurm treats "
        what += "--ntasks-per-node as a maximum"
        yield Problem(subject.line_of("--ntasks"), what, omit.format(nodes * per_node))
    elif tasks and per_node and tasks < per_node and subject.script.value("--nodes") is None:
        what = f"with --ntasks={tasks}, the job has {counted(tasks, 'task')}, and not {per_node} per node"
        remedy = f"write --nodes={tasks} if it is the number of nodes, or omit --ntasks-per-node"
        yield Problem(subject.line_of("--ntasks"), what, remedy, "note")
    total = tasks or (nodes or 1) * (subject.ranks_per_node or 1)
    gpus = subject.gpus_per_node if "gpu" in (subject.script.value("--gres") or "") else 0
    # A task may use several GPUs, but few nodes have more than 8.
    if nodes and total > nodes > 1 and gpus == total and (tasks or gpus > 8):
        what = f"--gres is for each node, so the job has {nodes * gpus} GPUs for its {total} tasks"
        remedy = f"use --gres=gpu:{-(-total // nodes)} for one GPU per task"
        yield Problem(subject.line_of("--gres"), what, remedy)


@check("SLURM014", "note", "ranks keep waiting after one of them dies")
def _no_kill_on_bad_exit(subject: Subject) -> Iterator[Problem]:
    steps = subject.script.launches("srun")
    if not (subject.has_many_tasks and trains_with_torch(subject)) or any(map(_sets_kill_on_bad_exit, steps)):
        return
    if "SLURM_KILL_BAD_EXIT" in subject.script.text or (subject.walltime_s or 3600) < 1800:
        return  # little can be lost
    for command in steps:
        starts = command.launched[0].rpartition("/")[2] if command.launched else ""
        if starts.startswith("python") and command.option("-n", "--ntasks") != "1":
            what = "srun does not terminate the other ranks if one dies, unless the site sets KillOnBadExit, "
            what += "so they wait until a timeout or the time limit"
            yield Problem(command.line, what, "use srun --kill-on-bad-exit=1")


def _sets_kill_on_bad_exit(step: Command) -> bool:
    return any(
        re.fullmatch(r"-[a-zA-Z]*K[01]?|--kill-on-bad-exit(?:=[01])?", word) for word in step.own_words
    )


@check("SLURM024", "error", "GPUs of a job step with --gres and --gpus-per-node")
def _two_ways_to_gpus_of_a_step(subject: Subject) -> Iterator[Problem]:
    version = subject.scheduler_version
    if version and not is_between(version, GPUS_TWICE_SINCE, ""):
        return
    of_job = subject.script.value("--gpus-per-node")
    for command in subject.script.launches("srun"):
        of_step = command.option("--gpus-per-node")
        if GPUS_IN_GRES.search(command.option("--gres") or "") and (of_job or of_step) is not None:
            whose = "srun's --gpus-per-node" if of_step is not None else "the --gpus-per-node of the job"
            what = f"srun rejects --gres=gpu with {whose}, since Slurm {GPUS_TWICE_SINCE}"
            remedy = "remove gpu from --gres of srun, or use --gpus-per-node instead"
            yield Problem(command.line, what, remedy, None if version else "note")
