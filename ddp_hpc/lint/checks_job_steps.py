"""Checks of Slurm scripts: job steps that do not fit the job or each other, job arrays and files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from ddp_hpc.lint.blocks import with_depth
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain, shown
from ddp_hpc.lint.checks_program_limits import IS_LIGHT
from ddp_hpc.lint.launch_commands import (
    hides_launcher_options,
    ranks_per_node,
    single_quoted,
    starts,
    with_values,
)
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.schedulers.script_options import whole_number

# With one of these options, a job step takes only a part of the CPUs of the job, or shares them.
_SHARES = re.compile(
    r"\s(?:--exact|--exclusive|--overlap|--cpus-per-task|-c|--nodelist|-w|--relative|-r|--jobid|--het-group|--mem\S*)\b"
)
_SIZED = re.compile(r"\s(?:-[nN]\d*|--ntasks\S*|--nodes|--nodelist|-w|--jobid|--het-group|--multi-prog)\b")
_NAME = re.compile(r"\$\{?(\w+)")
_OF_EACH_TASK = re.compile(r"%\d*[ajJs]|\$|%\(")
_SETS_VARIABLES = re.compile(r"module|ml|export|source|\.|conda|mamba")
_OF_PARALLEL = re.compile(
    r"parallel\s(?![^#'\"]{,300}\s(?:-j|--jobs)[ =]?1\s)"
    r"(?:-\S+\s+(?:[^-\s'\"]\S*\s+|\"\$\w+\"\s+)?){,20}?[\"']?srun\s.*"
)
# R CMD BATCH without the name of its output.
_WRITES_ROUT = re.compile(r"\bR CMD BATCH\s(?:[\"']?-[^\s\"']+[\"']?\s+){,9}([^\s$\"']{1,200}\.[Rr])\s*$")
# Commands that write the settings of a task, not its results.
_WRITE_SETTINGS = ("sed", "echo", "printf", "cat", "date", "envsubst")
_SIZE = re.compile(r"SLURM_(?:NNODES|JOB_NUM_NODES|NTASKS)\b")
# A registry, whose name has a dot, before an image that is no file.
_REGISTRY = re.compile(r"[a-z][\w-]*(?:\.[\w-]+)+(?::\d+)?/[^#]+(?<!\.sq[fs][hs])(?<!\.sif)(?<!\.squashfs)")
_WRITES = re.compile(r"[^-=2&|<>]>\s*([\w./-]+)(?=[\s;'\"]|$)(?<!/dev/null)")
_KEPT = re.compile(
    r"--(?=\w*?(?:out|save|ckpt|checkpoint))\w+[= ]\"?((?:\$\{?(?:SLURM_)?TMPDIR|/tmp|/dev/shm)\b[^\s\"]*)"
)
# Files of a fixed name that a command writes, and commands that write none of their results.
_FIXED = re.compile(
    r"(?:\s(?:--out(?:put|file)?|-o)[= ]|[^-=2&|<>]>\s?)[\"']?([\w./-]+\.[A-Za-z]\w*)(?=[\s;\"']|$)"
)
_KEPT_IN_VARIABLE = re.compile(r"\s--(?=\w*?(?:out|save))[\w-]+[= ]\"?(\$\{?(\w+)\}?(?![\w$])[^\s\"]*)")
_NODE_LOCAL = re.compile(
    r"\$\(mktemp -d(?:\s.{,99}(?:\{?(?:SLURM_)?TMPDIR\b|/tmp\b).*|\))|"
    r"(?:\$\{?(?:SLURM_)?TMPDIR\b|/tmp\b)[^.]*"
)
_JOBLOG = re.compile(r"--joblog[= ]\"?([\w./-]+)(?=[\s\"]|$)")
_SAVED = re.compile(
    r"\s--(?:out(?:put)?|save|results?)(?:[-_]?(?:file|path|model|name|csv|json))?[= ]"
    r"\"?([\w./-]+\.[A-Za-z]\w{,7})(?=[\s\"]|$)"
)
_EDITED = re.compile(r"(?s)\s(?:-\w{,3}i|--in-place)\S*\s.*\s[\"']?([\w./-]+)[\"']?\s*$")
_NO_RESULTS = re.compile(r"echo|printf|unzip|grep|sbatch|qsub|for|ssh|set|curl|ls")
# A directory of a node, results with relative names, and arguments in other directories.
_TO_NODE = re.compile(
    r"(?:cd|pushd)\s+[\"']?(?:\$\{?(?:(?:SLURM_)?TMPDIR|(?:PBS_)?JOBFS|(?:LOCAL_?)SCRATCH(?:_?DIR)?)\b|/(?:tmp|dev/shm)\b)"
)
_RESULTS = re.compile(r"[^-=2&|<>]>\s*[\w.-]+(?=\s|$)|\s(?:-o|--out\w*)[= ][\w.-]+(?=\s|$)")
_ELSEWHERE = re.compile(r"[\s=\"']\"?(?:[/~]|\.\./|\$)")
_COPIES = re.compile(r"\b(?:cp|rsync|mv|tar|zip|scp|rclone|aws|gsutil|srun|sgather)\b")
_AGAIN = re.compile(r"scontrol\s+requeue\s|(?:sbatch|qsub)\s[^#]*\"?\$\{?0\b")
_AS_NUMBER = re.compile(
    r"(?:nproc\S*|THREADS|-np?|\(\([^)]{,99})[= (*]\"?\$?\{?(SLURM_(?:TASKS_PER|JOB_CPUS_PER)_NODE)\b(?![%/])"
)
_READ_LOOP = re.compile(
    r"(?ms)(?:\|\s*|^[ \t]*)while\s+(?:IFS=\S*\s+)?read\s(?!-u)(?:[^\n]*;|[^\n;]*\n)\s*do\s"
    r"(.*?)(?:^[ \t]*|;\s*)done\b(?!\s*\d<)"
)
_READS_INPUT = re.compile(r"(?m)^[ \t]*(srun|ssh|mpirun|mpiexec)\s(?:.*\\\n){,20}.*$")
_HAS_OTHER_INPUT = re.compile(
    r"/dev/null|--input|-i none|<|&\s*$"
    r"|ssh\s+(?:-(?:[bceFiJlopW]\s+[^-\s]|[^\s-])\S*\s+){,20}?-[A-Za-z]{,9}?[nf][A-Za-z]*\s"
)
_IMAGE = re.compile(r"[^/$\s]+\.(?:sqsh|squashfs)")
_READS_TASK = re.compile(r"(?:\$\{?|\$\(\([^()]{,200}\b)SLURM_ARRAY_TASK_ID\b(?!:)")
_TIMEOUT = re.compile(r"timeout\s+(?:-\S+\s+|--\S+=\S+\s+)*(\d{1,9})([smhd]?)\s")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# Programs of which one for each node is enough, or one for all of its GPUs.
_ONCE = re.compile(r"srun (?:-\S+\s+(?:\d+ )?)*(?:bash -c ['\"])?(tar|unzip|cp|rsync|pip3?|git|vllm serve)\s")


@check("SLURM025", "note", "job steps that wait for each other")
def _steps_one_after_another(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if re.search(r"\bSLURM_(?:OVERLAP|EXACT)\b", script.text):
        return
    steps = [c for c in script.launches("srun") if c.ends == "&" and not _SIZED.search(c.text)]
    copies = whole_number(subject.value_of("$SLURM_NTASKS")) or 1
    if len(steps) > 1 < copies and all("python" in c.text and not hides_launcher_options(c) for c in steps):
        what = f"each srun starts its program {copies} times, once for each task of the job"
        yield Problem(steps[0].line, what, "write srun --exact -n 1")
    for command in script.commands:
        step = _OF_PARALLEL.search(command.text) if command.name == "parallel" else None
        if step and copies > 1 and not (_SIZED.search(step[0]) or re.search(r"\s\$|mpi", step[0])):
            what = (
                f"each srun under parallel starts its program {copies} times, once for each task of the job"
            )
            yield Problem(command.line, what, "write srun --exact -N 1 -n 1")
    in_background = [
        command
        for command in subject.script.launches("srun")
        if command.ends == "&" and not _SHARES.search(command.text) and not hides_launcher_options(command)
    ]
    if subject.num_nodes != 1:
        # Steps with fewer nodes than the job can run on different nodes.
        in_background = [c for c in in_background if c.option("-N", "--nodes") is None]
    is_repeated = any(is_in_loop(subject, command) for command in in_background)
    use_one_node = all(command.option("-n", "--ntasks") == "1" for command in in_background)
    if len(in_background) > ((use_one_node and subject.num_nodes) or 1) or is_repeated:
        what = "each job step takes all CPUs of its nodes, so the next srun waits until it has ended"
        remedy = "add --exact, with the CPUs and the memory of each step: srun --exact -n 1 -c 1 --mem=4G"
        yield Problem(in_background[0].line, what, remedy)
    yield from _share_memory(subject)
    yield from _beside_a_server(subject)


def _beside_a_server(subject: Subject) -> Iterator[Problem]:
    """Yields a job step on the node of a server of Ray, which runs in the background with all CPUs."""
    servers: dict[str, int] = {}  # the nodes that they have, and their lines
    for command, depth in with_depth(subject.script.commands):
        own = " ".join(command.own_words)
        node = command.option("-w", "--nodelist") if command.name == "srun" else None
        has_part = re.search(r"--(?:overlap|exact|exclusive|mem|cpus|jobid)|(?:^|\s)-c", own)
        if command.name in ("wait", "kill") or depth:
            servers.clear()
        elif (
            node
            and not has_part
            and command.ends == "&"
            and re.search(r"(?s)ray start .*--block", command.text)
        ):
            servers[node] = command.line
        elif node in servers and not has_part and command.ends == "\n":
            names = _NAME.findall(node)
            if any(servers[node] < line and name in names for line, name, _ in subject.script.assignments):
                continue  # the variable may have another value now
            what = "this waits until the step in the background, which has all CPUs of the node, ends"
            yield Problem(command.line, what, "write srun --overlap")
            return


def _share_memory(subject: Subject) -> Iterator[Problem]:
    """Yields job steps on one node that wait for the memory of others: one without --mem takes all of it."""
    given, steps = subject.script.value("--mem"), []
    for command in subject.script.launches("srun"):
        if command.ends == "&" and not re.search(r"--overlap|--mem-per|--jobid|--het-group", command.text):
            steps += [command] * (1 + is_in_loop(subject, command))
    if not given or subject.num_nodes != 1 or len(steps) < 2:
        return
    takes_all = [c for c in steps if re.search(r"--ex(?:act|clusive)\b", c.text) and not c.option("--mem")]
    if takes_all:
        what = "each job step takes all memory of the job, so the next srun waits until it has ended"
        yield Problem(takes_all[0].line, what, "give each its part: srun --exact --mem=...")
    elif 0 < _size(given) < sum(_size(c.option("--mem")) for c in steps):
        what = f"the job steps need more than --mem={plain(given)} together, so some wait for the others"
        yield Problem(steps[0].line, what, "request more, or give each step less")


def is_in_loop(subject: Subject, command: Command) -> bool:
    """Returns whether a loop starts a command several times without waiting for it."""
    before = [c.words[0] for c in subject.script.commands if c.line < command.line]
    after = (c.words[0] for c in subject.script.commands if c.line > command.line)
    rest = set(takewhile(lambda word: word != "done", after))
    is_repeated = sum(word in ("for", "while", "until") for word in before) > before.count("done")
    return is_repeated and rest.isdisjoint(("wait", "while", "until"))


@check("JOB040", "note", "lost results, a loop or a job that does not end as meant, or a list as a number")
def _repeated_work(subject: Subject) -> Iterator[Problem]:
    script, tasks = subject.script, subject.script.value("--array", "-J") or ""
    of_array = bool(re.search("[-,]", tasks)) and not re.search(
        r"(?m)(?:^|[;&|(])[ \t]*(?:cd|pushd)\s[^#\n]*\$(?!\{?(?:PBS_O_WORKDIR|SLURM_SUBMIT_DIR|HOME)\b)",
        script.text,
    )
    has_trap = any(command.name == "trap" for command in script.commands)
    for start in starts(subject) if script.scheduler else ():
        command, is_code = start.command, start.command.launched[1:2] == ("-c",) and start.num_ranks != 1
        text = single_quoted(command.text) if is_code else script.lines[command.line - 1] if of_array else ""
        if start.program in ("python", "torchrun", "bash", "accelerate") and (file := _WRITES.search(text)):
            what = f"all {'ranks' if is_code else 'tasks of the array'} write to {shown(file[1])}"
            yield Problem(command.line, what, "put the rank or the task into its name")
        rest = "\n".join(script.lines[command.line :])
        kept, is_lost = _KEPT.search(command.text), not has_trap
        if kept is None and start.words[0][:1] != "-" and (kept := _KEPT_IN_VARIABLE.search(command.text)):
            is_lost = _is_lost(subject, command, kept[2])
        if kept and is_lost and not _COPIES.search(rest):
            what = f"{shown(kept[1])} is on the node, and nothing copies it before the job ends"
            yield Problem(command.line, what, "write to a shared file system, or copy it at the end")
    yield from _left_on_node(subject) if not has_trap else ()
    yield from _same_file(subject) if of_array else ()
    yield from _at_last_index(subject)
    for loop in _READ_LOOP.finditer(script.text):
        step = _READS_INPUT.search(loop[1])
        if step and not _HAS_OTHER_INPUT.search(step[0]):
            line = script.text.count("\n", 0, loop.start(1) + step.start(1)) + 1
            what = f"{step[1]} reads the rest of the input of the loop, so the loop ends early"
            yield Problem(line, what, "write < /dev/null after the command")
    may_end = re.search(r"(?m)^[ \t]*exit\b|&&|\|\|", script.text)
    for command, depth in with_depth(script.commands):
        if _AGAIN.match(command.text) and depth == 0 and command.ends == "\n" and not may_end:
            yield Problem(command.line, "the job begins again each time, without an end", "add a condition")
        yield from _in_order(subject, command)
        if (name := _AS_NUMBER.search(command.text)) and (subject.num_nodes or 1) > 1:
            what = f"{name[1]} is a list such as 4(x2), and not a number"
            instead = "SLURM_CPUS_ON_NODE" if "CPUS" in name[1] else "SLURM_NTASKS or SLURM_GPUS_ON_NODE"
            yield Problem(command.line, what, f"use {instead}")


def _of_array(script: Script) -> set[str]:
    """Returns the names of the variables that contain the index of a task of an array, or depend on it."""
    names = {"SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID"}
    for _, name, value in script.assignments:
        names |= {name} if names & {*_NAME.findall(value)} else set()
    return names


def _at_last_index(subject: Subject) -> Iterator[Problem]:
    """Yields a command of the task with the last index of an array that reads the results of all tasks."""
    script = subject.script
    last = re.fullmatch(r"\d+-(\d{1,9})", script.value("--array", "-J") or "")
    compares = r"\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)\}?[\"']?\s*(?:-eq|==?)\s*[\"']?"
    # The tasks may have a branch each, or wait for each other.
    has_branches = len({*re.findall(rf"{compares}(\d+)", script.text)}) > 1
    if last is None or has_branches or re.search(r"\b(?:while|until)\b", script.text):
        return
    asks = re.compile(rf"{compares}(?:{last[1]}|\$\{{?SLURM_ARRAY_TASK_MAX\}}?)\b")
    for command in script.commands:
        is_read = re.match(r"(?:cat|paste|python\S*|Rscript|tar|zip)\s[^#]*?[\w./]\*", command.text)
        if is_read and asks.search(script.conditions.get(command.line, "")):
            what = "the task with the last index may get here before the others end, and miss their results"
            yield Problem(command.line, what, "do this in a separate job that depends on the array")
            return


def _same_file(subject: Subject) -> Iterator[Problem]:
    """Yields a command that reads the index of an array, and writes to the same file for all of its tasks."""
    names = _of_array(subject.script)
    for command in subject.script.commands:
        text = with_values(subject.script, command.text)
        if (log := _JOBLOG.search(text)) and re.search(r"\s--resume\b", text):
            what = (
                f"all tasks of the array resume from the job log {shown(log[1])}, and skip each other's jobs"
            )
            yield Problem(command.line, what, "put the index of the task into its name")
            return
        if names.isdisjoint(_NAME.findall(command.text)):
            continue
        if command.name == "sed" and (edited := _EDITED.search(command.text)):
            what = f"all tasks of the array change {shown(edited[1])}, while others read it"
            yield Problem(command.line, what, "let each task write a copy: sed ... FILE > FILE_OF_TASK")
            return
        file = _FIXED.search(command.text) or _SAVED.search(text)
        file = None if _NO_RESULTS.fullmatch(command.name) else file
        if file:
            what = f"all tasks of the array write to {shown(file[1])}, and only one result remains"
            yield Problem(command.line, what, "put the index of the task into its name")
            return


def _is_lost(subject: Subject, command: Command, name: str) -> bool:
    """Returns whether the variable names a directory of the node from which no later command copies."""
    script = subject.script
    later = [c for c in script.commands if c.line > command.line and name in _NAME.findall(c.text)]
    is_in_container = re.search(rf":[\"']?\$\{{?{name}\b", script.text) is not None
    traps = " ".join(c.text for c in script.commands if c.name == "trap")
    # Another program may read what this one writes there.
    is_read = any(
        c.name not in ("rm", "echo", "ls", "du", "trap") and _writes_elsewhere(c, name) for c in later
    )
    is_removed = not traps or re.fullmatch(r"(?:trap\s+['\"]rm -\w+ [^;&]*['\"][\w\s]*)+", traps) is not None
    is_elsewhere = is_in_container or script.sets("TMPDIR")
    return _is_on_node(script, name) and is_removed and not (is_elsewhere or is_read)


def _writes_elsewhere(command: Command, name: str) -> bool:
    """Returns whether a command may write outside this directory."""
    if re.search("upload|push|sync|send|copy|store|>", command.text):
        return True
    paths = (word for word in command.argv[2:] if "/" in word or "$" in word)
    return any(name not in _NAME.findall(path) for path in paths)


def _left_on_node(subject: Subject) -> Iterator[Problem]:
    """Yields a program that runs in a directory of the node, from which nothing copies its results."""
    script = subject.script
    moves = next((c for c in script.commands if _TO_NODE.match(c.text) or _goes_to_node(script, c)), None)
    if moves is None or _COPIES.search("\n".join(script.lines[moves.line :])):
        return
    has_input = any(c.name in ("cp", "rsync") and c.line < moves.line for c in script.commands)
    for start in starts(subject):
        command, arguments = start.command, start.command.text.partition(start.words[0])[2]
        if command.line > moves.line and (
            command.name in ("cd", "pushd", "popd") or _ELSEWHERE.search(arguments)
        ):
            return
        is_program = command.line > moves.line and not IS_LIGHT.fullmatch(start.program)
        if is_program and (has_input or _RESULTS.search(command.text)):
            what = f"{plain(start.program)} runs in a directory of the node, and nothing copies its results"
            yield Problem(command.line, what, "copy them to a shared file system before the job ends")
            return


def _goes_to_node(script: Script, command: Command) -> bool:
    """Returns whether a command goes to a directory of the node whose name is in a variable."""
    into = re.fullmatch(r"cd\s+[\"']?\$\{?(\w+)\}?[\"']?\s*", command.text)
    return into is not None and _is_on_node(script, into[1])


def _is_on_node(script: Script, name: str) -> bool:
    """Returns whether a variable is the name of a directory of the node."""
    return _NODE_LOCAL.fullmatch(script.set_once.get(name, "")) is not None


def _in_order(subject: Subject, command: Command) -> Iterator[Problem]:
    """Yields a timeout that the job does not reach, a loop over GPUs that waits, and needless copies."""
    once, per_node = _ONCE.match(command.text), ranks_per_node(subject, command) or 1
    of_task = re.match("[^;&|]*(?:PROCID|LOCALID|NODEID)", single_quoted(command.text))
    if once and per_node > 1 and not of_task:
        what = f"{per_node} tasks of each node start {once[1]}, and all of them do the same"
        yield Problem(command.line, what, "use srun -n $SLURM_NNODES")
    limit, walltime_s = _TIMEOUT.match(command.text), subject.walltime_s
    if limit and walltime_s and int(limit[1]) * _SECONDS[limit[2]] >= walltime_s:
        what = f"the job ends before the timeout of {limit[1]}{limit[2]}, or with it"
        yield Problem(command.line, what, "use less than the walltime")
    device = re.match(r"CUDA_VISIBLE_DEVICES=[\"']?\$\{?(\w+)\}?[\"']?\s", command.text)
    if device and command.ends == "\n" and re.search(rf"\bfor\s+{device[1]}\s", subject.script.text):
        what = "the loop starts its programs one after the other, so only one GPU works at a time"
        yield Problem(command.line, what, "write & at the end of this command, and wait after the loop")


@check("SLURM026", "warning", "one log for all tasks of an array")
def _one_log(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    array = script.value("--array") or ""
    for d in script.read():
        is_log = d.flag in ("--output", "--error") and d.value not in ("", "none", "/dev/null")
        has_tasks = bool(re.search("[-,]", array)) and not re.fullmatch(r"(\d+)-\1(?:%\d+)?", array)
        if not array:  # it may be given to sbatch
            has_tasks = "%A" in d.value and "SLURM_ARRAY_TASK_ID" in script.text
        is_misread = re.match(r"-\w[\w-]*=", d.written) or d.line in subject.placeholder_lines
        if is_log and has_tasks and not (is_misread or _OF_EACH_TASK.search(d.value)):
            appends = script.value("--open-mode") == "append" or not array
            # Then little is written to the log.
            own = rf"\s*[\"']?[^\s;|&>]{{,300}}\$[{{(]*(?:{'|'.join(_of_array(script))})\b"
            own_errors = rf"(?:2>|&>|>&){own}|>{own}[^\n]*2>&1"
            own_output = own_errors if d.flag == "--error" else rf"(?:>|\btee(?: -a)?\s){own}"
            works = {c.name for c in script.commands if c.argv and not IS_LIGHT.fullmatch(c.name)}
            if d.flag == "--output" and works == {"r"}:
                own_output += r"|\bR CMD BATCH\s"  # it prints nothing
            own_output += rf"|\bsrun\s(?s:.{{,500}}?)\s(?:{d.flag}[= ]|{d.flag[1:3]}){own}"
            is_redirected = any(
                re.search(own_output, c.text) for c in script.commands if c.name not in _WRITE_SETTINGS
            )
            tasks = "all tasks of the array" if array else "submitted with --array, all tasks"
            what = f"{tasks} write to {shown(d.value)}"
            what += "" if appends else ", and each overwrites the output of the others"
            severity: Severity | None = "note" if appends or is_redirected else None
            yield Problem(d.line, what, "put %a, or %A_%a, into the name", severity)
            yield from _one_rout(script) if d.flag == "--output" and not appends else ()


def _one_rout(script: Script) -> Iterator[Problem]:
    """Yields R CMD BATCH without the name of its output, which then is the same for all tasks."""
    if re.search(r"(?m)\b(?:cd|pushd)\s[^#\n]*\$", script.text):
        return
    for command in script.commands:
        if of_r := _WRITES_ROUT.search(command.text):
            name = plain(of_r[1]).rpartition("/")[2]
            what = f"all tasks write to {name}out, and each overwrites the others' output"
            remedy = f"write R CMD BATCH {plain(of_r[1])} NAME_$SLURM_ARRAY_TASK_ID.Rout"
            yield Problem(command.line, what, remedy)


@check("SLURM027", "warning", "--export without ALL")
def _export_without_all(subject: Subject) -> Iterator[Problem]:
    # With a list, the batch shell gets the environment of a login, but its job steps get only the list.
    script = subject.script
    steps = script.launches("srun")
    is_bare = (script.value("--export") or "").upper() == "NIL"
    if is_bare and not script.sets("PATH") and "profile" not in script.text:
        what = "with --export=NIL, the job has no PATH"
        yield Problem(subject.line_of("--export"), what, "set PATH, or use --export=NONE")
    of_job = [(subject.line_of("--export"), step) for step in steps if step.option("--export") is None]
    for line, step in of_job[:1] + [(step.line, step) for step in steps if step.option("--export")]:
        given = step.option("--export") or script.value("--export") or ""
        has_path = re.search(r"\b(?:ALL|NONE|NIL|PATH)\b|^\$", given, re.IGNORECASE)
        # The module slurm_setup of LRZ unsets it.
        if re.search("S(?:LURM|RUN)_EXPORT_ENV|slurm_setup", script.text):
            continue
        if "=" in given and not has_path:
            what = f"srun of line {step.line} passes on only {plain(given)}, and no variables such as PATH"
            # The image of a container has a PATH of its own.
            has_image = re.search(
                "container|shifter|singularity|apptainer|podman|docker|ch-run|sarus|enroot", script.text
            )
            yield Problem(line, what, f"use --export=ALL,{plain(given)}", "note" if has_image else None)
        sets = [c for c in script.commands if c.line < step.line and _SETS_VARIABLES.fullmatch(c.name)]
        if given.upper() in ("NONE", "NIL") and step.option("--export") is None and sets:
            what = f"srun inherits --export={given}, so its tasks do not get what line {sets[0].line} sets"
            # srun itself finds the program of a module.
            is_exported = any(c.name == "export" for c in sets)
            yield Problem(step.line, what, "use srun --export=ALL", None if is_exported else "note")
        others = [one for one in given.split(",")[1:] if one and not re.fullmatch(r"[A-Za-z_$\[{].*", one)]
        if others and not given.startswith("$"):
            what = f"{shown(others[0])} is not a variable, as a comma ends the value before it"
            yield Problem(line, what, "export the variable in the script, and use --export=ALL")


@check("SLURM028", "warning", "a job step that is larger than the job")
def _step_larger_than_job(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    tasks, cpus = whole_number(script.value("--ntasks")), whole_number(script.value("--cpus-per-task")) or 1
    is_whole = script.value("--exclusive") is not None or script.value("--nodes") not in (None, "1")
    for command in subject.script.launches("srun"):
        nodes = whole_number(command.option("-N", "--nodes"))
        step = whole_number(subject.value_of(command.option("-n", "--ntasks") or ""))
        step = step or (tasks if command.option("--ntasks-per-node", "-n", "--ntasks") is None else None)
        of_each = whole_number(command.option("-c", "--cpus-per-task")) or 1
        place = command.option("--partition", "-p") if command.launched else None
        own_place = script.value("--partition")
        others = {*place.split(",")} - {*own_place.split(",")} if place and own_place else set()
        if place and others and "$" not in place and not re.search("--jobid|--het-group", command.text):
            what = f"a job step has nodes of the job, so srun ignores --partition={plain(place)}"
            yield Problem(command.line, what, "request the partition for the job")
        if re.search(r"--jobid|--het-group|--overcommit|\s-O\b|\s-p\b|--partition", command.text):
            continue
        if nodes and subject.num_nodes and nodes > subject.num_nodes and not subject.asked_nodes:
            what = f"the job step has {nodes} nodes, and the job has {subject.num_nodes}"
            is_other_case = _SIZE.search(script.conditions.get(command.line, ""))
            yield Problem(
                command.line,
                what,
                f"request --nodes={nodes}, or use srun --nodes={subject.num_nodes}",
                "note" if is_other_case else "error",
            )
        elif tasks and step and step * of_each > tasks * cpus and not is_whole:
            what = f"the job step needs {step * of_each} CPUs, and the job requests {tasks * cpus}"
            remedy = f"request --ntasks={step}" if step > tasks else "request more CPUs per task"
            yield Problem(command.line, what, f"{remedy}, unless the job gets whole nodes", "note")
        for option in ("--gres", "--gpus-per-node", "--mem", "--mem-per-cpu"):
            # Fewer tasks may have more memory for each CPU.
            is_part = option == "--mem-per-cpu" and _SIZED.search(command.text)
            if not is_part and 0 < _size(script.value(option)) < _size(command.option(option)):
                what = f"the {option} of the job step is more than that of the job"
                yield Problem(
                    command.line, what, "request as much for the job, or less for the step", "error"
                )
        threads = whole_number(command.option("--threads-per-core")) or 0
        of_job = whole_number(script.value("--threads-per-core"))
        if of_job and threads > of_job:
            what = f"the job step needs {threads} threads per core, and the job has {of_job}"
            yield Problem(command.line, what, f"request --threads-per-core={threads}", "error")


def _size(text: str | None) -> int:
    """Returns the number of GPUs in the value of an option, or its memory; 0 if there is none."""
    size = re.fullmatch(r"(?:gpu:(?:[a-z]\w*:)?)?(\d{1,9})([KMGT]?)B?", text or "")
    return int(size[1]) * 1024 ** "KMGT".index(size[2] or "M") if size else 0


@check("SLURM029", "error", "an image file that is read as the name of an image")
def _image_without_slash(subject: Subject) -> Iterator[Problem]:
    given = [(d.line, d.value) for d in subject.script.read() if d.flag == "--container-image"]
    given += [(c.line, c.option("--container-image") or "") for c in subject.script.launches("srun")]
    for line, value in given:
        if _IMAGE.fullmatch(value):
            what = f"Pyxis looks for {shown(value)} in a registry, because it contains no slash"
            yield Problem(line, what, f"write ./{plain(value)}")
        elif _REGISTRY.fullmatch(value):
            # Enroot also takes the registry from the file with its credentials.
            what = f"Pyxis looks for {shown(value)} at Docker Hub, as # separates a registry from the image"
            yield Problem(line, what, f"write {plain(value.replace('/', '#', 1))}", "note")
    for d in subject.script.read():
        if d.flag == "--container-image" and (cut := re.search(r"[= ]([^\s\"'#]*[^\s\"'#\\]#\S+)", d.text)):
            what = f"sbatch takes the # of {shown(cut[1])} for the beginning of a comment"
            yield Problem(d.line, what, f'write --container-image="{plain(cut[1])}"')


@check("SLURM032", "warning", "an array of bash with fewer elements than the job array has tasks")
def _array_beyond_list(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    given = script.value("--array")
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(%\d+)?", given or "")
    last = int(found[2]) if found else -1
    # The script may count from 0 itself, and zsh counts from 1.
    other_index = r"SLURM_ARRAY_TASK_ID\s*(?:--|-=)|--SLURM_ARRAY_TASK_ID"
    if (
        "zsh" in script.shebang
        or script.sets("SLURM_ARRAY_TASK_ID")
        or re.search(other_index, "\n".join(command.text for command in script.commands))
    ):
        found = None
    for command in script.commands if found else ():
        for name in re.findall(r"\$\{(\w+)\[\$?\{?SLURM_ARRAY_TASK_ID\}?\]\}", command.text):
            # Elements with explicit numbers, such as [1]=a, are not counted.
            values = re.findall(rf"(?m)^[ \t]*(?:declare -a )?{name}=\(([^()$`*?{{[]*)\)", script.text)
            other_values = (
                rf"(?<![\w$]){name}(?:\+=|\[\d+\]=)",
                rf"\b(?:mapfile|readarray|read)\b.*\b{name}\b",
            )
            grows = rf"(?m)^[^#\n]*(?:{'|'.join(other_values)})"
            is_only = len(re.findall(rf"(?<![\w$]){name}=\(", script.text)) == 1
            is_whole = len(values) == 1 and is_only and not re.search(grows, script.text)
            size = len(_elements(values[0])) if is_whole else 0
            if 0 < size <= last:
                what = f"the last index of {plain(name)} is {size - 1}, and the job array goes up to {last}"
                asks = re.search(r"SLURM_ARRAY_TASK_ID\}?\"?\s*(?:-g[te]|>)", script.text)
                # Whoever counts from 1 means all elements, and whoever begins later only the last ones.
                first = int(found[1] or 0) if found else 0
                ends = dict.fromkeys((first if 1 < first < size else 0, size - 1))  # one number if equal
                indices = "-".join(map(str, ends)) + ((found and found[3]) or "")
                yield Problem(command.line, what, f"use --array={indices}", "note" if asks else None)
                return
    commented = re.search(r"(?m)^[ \t]*#+\s*#SBATCH\s+(?:--array|-a)\b", script.text)
    reads = [
        command
        for command in script.commands
        if command.name not in ("echo", "printf", "[", "[[", "test")
        and any(_READS_TASK.search(word) for word in command.words)
    ]
    if given is None and reads and commented:
        line = script.text.count("\n", 0, commented.start()) + 1
        what = f"--array of line {line} is in a comment, so SLURM_ARRAY_TASK_ID is empty"
        yield Problem(reads[0].line, what, "remove the first #, or give --array to sbatch", "note")


def _elements(text: str) -> list[str]:
    """Returns the elements of an array that the script lists without expansions."""
    return re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+", re.sub(r"(?m)(?:^|\s)#.*", "", text))
