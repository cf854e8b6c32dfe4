"""Checks of the environment variables that a script reads, and of those that its programs need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddp_hpc.lint.blocks import with_depth
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, is_one_edit, nearest_known, plain
from ddp_hpc.lint.launch_commands import expanded_in_shell, single_quoted, starts
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.read_variables import OF_RANKS, OF_SCHEDULERS, expanded, read_variables
from ddp_hpc.schedulers.registry import MONITORED

_MOST_PAIRS = 250_000  # of names; to compare two of them takes 5 microseconds
# Variables of Grid Engine, LSF, Cobalt and Kubernetes.
_OF_OTHERS = re.compile(
    r"NSLOTS|NHOSTS|PE_HOSTFILE|SGE_(?:TASK_ID|O_WORKDIR)|LSB_\w+|COBALT_\w+|JOB_NAME|JOB_COMPLETION_INDEX"
)
# Variables of several schedulers for the same thing.
_SAME = (
    ("SLURM_JOB_ID", "PBS_JOBID"),
    ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID"),
    ("SLURM_JOB_NUM_NODES", "NHOSTS"),
    ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "SGE_O_WORKDIR"),
)
# Variables of the shell, of the login and of sites that scripts also set in other letters.
_OF_LOGIN = re.compile(
    "(?:PYTHON|LD_LIBRARY_)?PATH|HOME|USER(?:NAME)?|LOGNAME|HOST(?:NAME|S)?|PWD|TMPDIR|SHELL|LANG|RANDOM|SECONDS|"
    "SCRATCH(?:DIR)?|LOCALSCRATCH|WORK(?:DIR)?|PROJECT|AMBERHOME|(?:JAVA|CUDA)_HOME|BLASTDB|GMXLIB|(?:SLURM|PBS)_.*"
)
# Commands that may set variables: a file that is read, unless it belongs to conda or the modules.
_OF_ENVIRONMENTS = r"(?!.*(?:activate|conda|mamba|hook|profile|bashrc|modul|spack))"
_READS_VARIABLES = re.compile(rf"(?m)(?:^|[\s'\";])(?:source|\.|eval)\s{_OF_ENVIRONMENTS}|\bexport \$\(")
# What starts several ranks, or numbers them.
_STARTS_RANKS = re.compile(
    r"(?i)\b(?:srun|mpirun|mpiexec|ibrun|accelerate|deepspeed)\b|torchrun|distributed|master_?addr|"
    r"(?:node|local)_?rank|rdzv|world_?size|ssh|rank\}?\"?\s+(?:-[a-z]{2}|[!=]=?)\s"
)
_FOR_THREADS = r"(?:OMP|MKL|OPENBLAS|JULIA|RAYON)_NUM_THREADS=[\"']?\$\{?"
_FOR_ALL_RANKS = ("--rdzv-endpoint", "--master-addr", "--nnodes", "--nproc-per-node", "--main-process-ip")
# A hook of enroot, a file that is read, or a task that calls an exported function may set them.
_MAY_SET_RANKS = re.compile(
    rf"container|export (?:-f|\$\()|(?:^|[\s'\";])(?:(?:source|\.)\s|eval\s{_OF_ENVIRONMENTS})"
)
_OF_BASH = ("RANDOM", "SECONDS", "UID", "EUID", "BASHPID", "OPTARG")
# Variables without $ in $(( )).
_FACTOR = re.compile(r"(?<![\w${#])[A-Za-z_]\w*")
_ARRAY_READ = re.compile(r"\$\{#?(\w+)\[")
# Commands that may set arrays elsewhere.
_MAY_SET = re.compile(
    r"(?m)^[ \t]*(?:source|\.|eval)\s|\b(?:readarray|mapfile|read\b[^\n]*\s-\w*a|declare|local|typeset)\b"
    r"|^[ \t]*set (?:-A\b|\w+ *= *\()"  # of ksh and csh
)
_SOURCES = re.compile(r"(?m)^[ \t]*(?:source|\.)\s(?!.*(?:activate|profile|bashrc))")
_OF_METACENTRUM = re.compile("SCRATCHDIR|scratch_(?:local|ssd|shm|shared)|/storage/[a-z]+|metacentrum")
_NEXT_TO_EACH_OTHER = re.compile(r"(?:\$\{?(?:PBS|SLURM|SGE|LSB|COBALT)_\w+\}?){2,}")
_AS_COMMAND = re.compile(r"[^#]*\$\(\s*((?:SLURM|PBS)_[A-Z_]+)\s*(?:[*/+-]\s*\w+\s*)?\)")
# Variables that programs read from their environment, and that a script usually has to export.
_READ_BY_PROGRAMS = re.compile(
    r"MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|TORCH_NCCL_\w+|(?:NCCL|GLOO)_SOCKET_\w+|"
    r"(?:HF|TRANSFORMERS)_(?:\w+_)?(?:OFFLINE|CACHE|HOME)|TORCH_HOME|WANDB_MODE|PYTORCH_(?:CUDA_)?ALLOC_CONF|"
    r"CUDA_LAUNCH_BLOCKING|"
    r"NCCL_(?:DEBUG|IB|NET|P2P|SHM|NVLS|COLLNET|MIN|MAX)(?:_\w+)?|"
    r"NCCL_(?:ALGO|PROTO|CROSS_NIC|BUFFSIZE|BLOCKING_WAIT|ASYNC_ERROR_HANDLING)"
)
_OFF_BY_DEFAULT = re.compile(r"CUDA_LAUNCH_BLOCKING|\w+_OFFLINE")
_RELATIVE_PATH = re.compile(r"\.{1,2}(?:/|$)|[\w-]{1,99}/|[\w-]{0,99}\.[A-Za-z]\w{0,5}$|.{0,99}\*|<")
# What exports all variables, reads one by its name, or reads another file.
_IS_READ_ELSEWHERE = re.compile(
    r"(?m)\bset\s[^\n]*-\w*a|allexport|\$\{!"
    r"|(?:^(?![ \t]*(?:source|\.) \S+/activate\b[^;&|\n]*$)|[;&|]|\bthen\b)[ \t]*(?:source|\.)\s"
)
_KEEPS_MESSAGES = re.compile(r"(?m)^[ \t]*(?:\}|done|fi)\s*[|>]")
# A file of the user, which may export what the script has set before.
_MAY_EXPORT = re.compile(
    r"(?m)^[ \t]*(?:source|\.)\s+(?!.*(?:/(?:etc|init|opt)/|onda|activate|bashrc|profile|module|lmod|vars))"
)
_OFTEN_EXPORTED = re.compile("(?:LD_LIBRARY_|PYTHON)?PATH|HOME|USER|TMPDIR|TMP|LANG|SCRATCH|SHELL")
_SET_FOR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# An assignment that is a command of its own.
_SET_BY_TASK = re.compile(r"(?:^|[;&\n])[ \t]*([A-Z_]+)=(?:\$\([^)]{,200}\)|[^\s;&]*)\s*(?=[;\n]|&&)")
_MAY_START_TORCHRUN = re.compile(r"bash|sh|.*\.sh|singularity|apptainer|docker|podman|shifter|env|accelerate")
_REQUESTS = re.compile(r"--(?:nodes|ntasks|cpus|gres|gpus|mem|exclusive|constraint)|-l")
_NODE_LIST = re.compile(
    r"\"?\$\{?SLURM_(?:JOB_|STEP_)?NODELIST(?:%+,\*|\[0\])?\}?\"?|\$\(\s*echo\s+\"?\$\{?SLURM_(?:JOB_)?NODELIST\}?\"?\s*\|\s*cut\s.*"
    r"|\$\(\s*scontrol show hostnames?(?: [^|)]*)?\)|`scontrol show hostnames?[^|`]*`"
    r"|\$\(\s*(?:cat|uniq|sort(?: -u)?)\s[^|)]*NODEFILE\}?\"?\s*\)"
)
_LOGIN_NODE = re.compile(r"\"?\$\{?(?:SLURM_SUBMIT_HOST|PBS_O_HOST|SLURM_LAUNCH_NODE_IPADDR)\}?\"?")
_LIST_AS_HOST = re.compile(
    r"(\s(?:-H|--?hosts?|--?(?:host|machine)file)|--(?:rdzv[-_]endpoint|master[-_]addr|main[-_]process[-_]ip))"
    r"[ =]+\"?(\$\{?(?:SLURM_(?:JOB_)?NODELIST|SLURM_SUBMIT_HOST|PBS_O_HOST)\b\}?)"
)
# A whole list in quotes as the only element of an array.
_ONE_ELEMENT = re.compile(r"\s*(?:declare -a )?(\w+)=\(\s*\"(\$\{?(\w+)\}?|\$\(.*\))\"\s*\)\s*(?:#.*)?")
_ELEMENT = re.compile(r"\$\{(?:#(\w+)\[|(\w+)\[[^@*])")


@check("JOB022", "warning", "a variable that is not set in the job")
def _unset_variable(subject: Subject) -> Iterator[Problem]:
    script, scheduler, reader = subject.script, subject.scheduler, subject.scheduler.reader
    is_of_shell = not script.shebang or re.search(r"sh\b", script.shebang)
    if not (reader.variables and script.read() and is_of_shell) or _is_for_several(subject):
        return
    severity: Severity | None
    for number, text in enumerate(script.lines, start=1):
        if match := _AS_COMMAND.match(text):
            what = f"$({match[1]}) runs a command of this name, which does not exist"
            yield Problem(number, what, f"write ${match[1]}, or $(( )) to compute", "error")
    read = read_variables(subject)
    of_scheduler = {name: line for name, line in read.items() if OF_SCHEDULERS.fullmatch(name)}
    unknown = {name: line for name, line in of_scheduler.items() if name not in reader.variables}
    nearest = nearest_known(unknown, sorted(reader.variables), cutoff=0.85)
    assigned = _assigned(script)
    del assigned[_MOST_PAIRS // (len(read) or 1) :]
    for name, line in ((name, line) for name, line in read.items() if name not in reader.variables):
        near = nearest.get(name, "")
        if not near or not (is_one_edit(name, near) or _is_misspelled(name, near)):
            near = next((other for other in assigned if _is_misspelled(name, other)), "")
            of_login = _OF_LOGIN.fullmatch(name) and not OF_SCHEDULERS.match(name)
            if near and name != f"{near}_" and (of_login or _comes_from_outside(script, name, near)):
                continue
        if OF_RANKS.fullmatch(name) and not _MAY_SET_RANKS.search(script.text):
            what = f"nothing sets {name} before this command"
            remedy = "let each task read SLURM_PROCID, SLURM_NODEID or SLURM_NTASKS: srun bash -c '...'"
            if "srun" not in reader.own_commands:
                remedy = "let each task read what its MPI sets, such as PMI_RANK: mpiexec bash -c '...'"
            # For one process, it may be a parameter that another script passes on with --export.
            yield Problem(line, what, remedy, None if _STARTS_RANKS.search(script.text) else "note")
        elif near:
            meant = f"${{{near}}}_" if name == f"{near}_" else near
            severity = "note" if _is_only_shown(script, line) else None
            yield Problem(line, f"{plain(name)} is not set in the job", f"did you mean {meant}?", severity)
        elif _OF_OTHERS.fullmatch(name) or (
            name in unknown and any(name in other.reader.variables for other in MONITORED.values())
        ):
            together = _NEXT_TO_EACH_OTHER.search(script.lines[line - 1])
            if together and not reader.variables.isdisjoint(expanded(together[0])):
                continue  # one of them is empty
            what = f"{scheduler.title} does not set {plain(name)}, a variable of another scheduler"
            severity = "note" if _may_be_harmless(subject, name, line) else None
            own = [one for same in _SAME if name in same for one in same if one in reader.variables]
            instead = " or ".join(own) or f"a variable of {scheduler.title}, or write the value"
            yield Problem(line, what, f"use {instead}", severity)
            if not severity:
                break
        elif name in unknown and name.startswith("SLURM_"):
            what = f"Slurm does not set {plain(name)}"
            yield Problem(line, what, "use a variable of sbatch(1), or set it", "note")
    yield from _in_other_letters(script, read)
    yield from _unset_arrays(script)
    yield from _with_type(subject)
    for name, (option, instead) in reader.variables_elsewhere.items():
        if name in read and (script.value(option) or option in {of[1] for of in script.resources()}):
            sets_all = _OF_METACENTRUM.search(script.text)
            what, severity = f"schedulers with {option} do not set {name}", "note" if sets_all else None
            yield Problem(read[name], what, f"use {instead}", severity)
    yield from _unset_numbers_of_ranks(subject, read)
    yield from _without_option(subject, read)


def _assigned(script: Script) -> list[str]:
    """Returns the names of the variables that the script sets, also those of its loops."""
    in_loops = re.findall(r"(?m)^[ \t]*for[ \t]+(\w{1,40})[ \t]+in\b", script.text)
    return list(dict.fromkeys((*(name for _, name, _ in script.assignments), *in_loops)))


def _may_be_harmless(subject: Subject, name: str, line: int) -> bool:
    """Returns whether a variable of another scheduler may be set, or may be empty without a consequence."""
    script, text = subject.script, subject.script.lines[line - 1]
    # A script that submits this one may set the name of the job. Another branch may be for this scheduler.
    may_be_set = name == "JOB_NAME" or line in script.conditions
    # A shell of login reads the profile of the site, which may set it (Michigan State University).
    is_login = re.search(r"\s-(?:-login|\w*l)\b", script.lines[0]) is not None
    may_be_set |= is_login and name.endswith("O_WORKDIR")
    may_be_set |= bool(re.search(r"(?m)^#\$ +-[a-z]", script.text))
    may_be_set |= bool(_OF_OTHERS.fullmatch(name) and _READS_VARIABLES.search(script.text))
    # cd "" stays in the first directory of a job of Slurm. Libraries ignore an empty number of threads.
    is_ignored = bool(re.fullmatch(r"cd \"\$\{?(?:PBS|SGE)_O_WORKDIR\}?\"\s*(?:#.*)?", text))
    is_ignored &= subject.scheduler.name == "slurm" and script.value("--chdir") is None
    for_threads = len(re.findall(rf"{_FOR_THREADS}{name}\b", script.text))
    is_ignored = is_ignored or 0 < for_threads == len(re.findall(rf"\$\{{?{name}\b", script.text))
    changes_only = script.lines[line - 1].split()[:1] == ["cd"] and _has_only_absolute_paths(script)
    return bool(may_be_set or is_ignored or changes_only or _is_only_shown(script, line))


def _has_only_absolute_paths(script: Script) -> bool:
    """Returns whether the commands have paths, and none of them begins at the current directory."""
    light = ("module", "ml", "cd", "echo", "export", "source", "date")
    commands = [[w.strip("\"'") for w in c.argv] for c in script.commands if c.argv and c.name not in light]
    have_paths = bool(commands) and all(any(w[:1] == "/" for w in words[1:]) for words in commands)
    return have_paths and not any(_RELATIVE_PATH.match(word) for words in commands for word in words)


def _without_option(subject: Subject, read: Mapping[str, int]) -> Iterator[Problem]:
    """Yields the variables that the scheduler sets only with an option, which the script does not have."""
    script, scheduler = subject.script, subject.scheduler
    of_launchers = " ".join(command.text for command in script.launches())
    # On one node, the loop that starts Ray on the other nodes starts nothing.
    starts_workers = subject.num_nodes == 1 and "ray start --address" in script.text
    depths = list(with_depth(script.commands)) if starts_workers else []
    idle = {c.line for c, depth in depths if depth and "ray start --address" in c.text}
    for name, options in scheduler.reader.variables_of_options.items():
        is_given = any(script.value(option) is not None or option in of_launchers for option in options)
        if name not in read or is_given or re.search(rf"\$\{{{name}:?[=-]", script.text):
            continue
        if not subject.given_on_submission.isdisjoint(options):
            continue
        uses = [c for c in script.commands if name in expanded(expanded_in_shell(c.text))]
        if uses:
            what = f"{name} is empty, because it is set only with {' or '.join(options[:2])}"
            remedy = f"add {scheduler.prefix} {options[0]}=NUMBER"
            for_threads = re.search(rf"{_FOR_THREADS}{name}\b", script.text)
            if for_threads and script.value("--cpus-per-task"):
                remedy = "use SLURM_CPUS_PER_TASK"
            # OpenMP and others ignore an empty number of threads, and use the CPUs of the job.
            is_run = any(c.line not in idle for c in uses)
            is_needed = is_run and not for_threads and _needs_value(script, name)
            yield Problem(uses[0].line, what, remedy, None if is_needed else "note")


def _in_other_letters(script: Script, read: Mapping[str, int]) -> Iterator[Problem]:
    """Yields variables whose names the script sets in other letters, such as $api_key for API_KEY."""
    if _SOURCES.search(script.text) or re.search(r"\bprintf -v\b", script.text):
        return  # they may set others
    assigned = {name.lower(): name for _, name, _ in script.assignments if not name.lower().endswith("proxy")}
    for name, line in read.items():
        other = "" if _OF_LOGIN.fullmatch(name) else assigned.get(name.lower(), "")
        if other and not _comes_from_outside(script, name, other):
            what = f"nothing sets {plain(name)}, and bash distinguishes it from {plain(other)}"
            yield Problem(line, what, f"write ${plain(other)}", "note")


def _needs_value(script: Script, name: str) -> bool:
    """Returns whether an empty value has a consequence, unlike in the name of a file.

    A script that requests nothing may get its options on the command line.
    """
    is_value = rf"(?m)^(?![ \t]*(?:#|echo|printf)).*[=\s(\"]\$\{{?{name}\}}?(?:[\s\")]|$)"
    is_number_of_tasks = name in ("SLURM_NTASKS", "SLURM_NPROCS")
    requests = (
        script.value("--nodes") if is_number_of_tasks else any(_REQUESTS.match(d.flag) for d in script.read())
    )
    return bool(requests and re.search(is_value, script.text))


def _unset_numbers_of_ranks(subject: Subject, read: Mapping[str, int]) -> Iterator[Problem]:
    """Yields variables in the numbers of ranks of launchers that a complete script never sets."""
    script, reader = subject.script, subject.scheduler.reader
    # qsub -V passes on the variables of the shell that submits.
    is_complete = not re.search(r"(?m)^[ \t]*(?:source|\.)\s", script.text) and script.value("-V") is None
    for start in starts(subject) if is_complete else ():
        if start.command.name not in ("srun", "mpirun", "mpiexec", "torchrun", "accelerate"):
            continue
        given = [start.command.option("-n", "-np", "--ntasks"), *map(start.options.get, _FOR_ALL_RANKS)]
        names = expanded(" ".join(value for value in given if value))
        # In $(( )), names need no $.
        values = (script.set_once.get(name, "") for name in names)
        sums = (value for value in values if value[:3] == "$((" and "`" not in value)
        factors = [name for value in sums for name in _FACTOR.findall(value)]
        for name in (*names, *factors):
            is_argument = name.isdecimal()  # sbatch passes them on to the script
            is_read = re.search(rf"\bread\b.*\b{name}\b", script.text)
            is_unset = read.get(name) or (name not in names and not script.sets(name) and not is_read)
            is_known = is_argument or name in reader.variables or name in _OF_BASH
            if is_unset and not (is_known or OF_RANKS.fullmatch(name)):
                what = f"neither {subject.scheduler.title} nor the script sets {plain(name)}"
                submit = reader.submit_with_variable.replace("NAME", plain(name))
                remedy = f"set it before it is used, or submit with {submit}"
                yield Problem(start.command.line, what, remedy, "note")


def _with_type(subject: Subject) -> Iterator[Problem]:
    """Yields the use of SLURM_GPUS_PER_NODE as a number, if it also contains the type of the GPUs."""
    script, value = subject.script, subject.script.value("--gpus-per-node") or ""
    for command in script.commands if ":" in value and not script.sets("SLURM_GPUS_PER_NODE") else ():
        if re.search(r"(?:nproc\S*[= ]|\(\([^)]*)\"?\$?\{?SLURM_GPUS_PER_NODE\b(?![#%:])", command.text):
            what = f"SLURM_GPUS_PER_NODE is {plain(value)}, which is not a number"
            yield Problem(command.line, what, "use SLURM_GPUS_ON_NODE")


def _unset_arrays(script: Script) -> Iterator[Problem]:
    """Yields the first use of each array that the script never sets. No array comes from the environment."""
    if _MAY_SET.search(script.text) or "csh" in script.shebang:
        return
    reported = {"PIPESTATUS", "FUNCNAME", "DIRSTACK"}
    for command in script.commands:
        for name in _ARRAY_READ.findall(expanded_in_shell(command.text)):
            if (
                name not in reported
                and not name.startswith("BASH_")
                and not re.search(
                    rf"(?<![\w$])(?:{name}(?:\[[^]]*\])?\+?=|(?:for|read)\b[^\n]*\b{name}\b)", script.text
                )
            ):
                reported.add(name)
                what = f"the script never sets the array {plain(name)}"
                is_text = command.name in ("echo", "printf") or _is_only_shown(script, command.line)
                # For a variable from outside, these are its value.
                is_text |= not re.search(rf"\$\{{#?{name}\[(?![*@0]\])", command.text)
                remedy = f"set {name}=(...), or name another array"
                yield Problem(command.line, what, remedy, "note" if is_text else None)


def _is_only_shown(script: Script, line: int) -> bool:
    """Returns whether a line only sets variables of this script, which nothing reads but messages."""
    own = {name for number, name, _ in script.assignments if number == line}
    known = any(_OF_LOGIN.fullmatch(name) or _READ_BY_PROGRAMS.fullmatch(name) for name in own)
    known |= any(name.endswith("PATH") or "VISIBLE_DEVICES" in name for name in own)
    if not own or known or _IS_READ_ELSEWHERE.search(script.text):
        return False
    if any(command.argv for command in script.commands if command.line == line):
        return False
    uses = re.compile(rf"\b(?:{'|'.join(own)})\b")
    others = [n for n, text in enumerate(script.lines, start=1) if n != line and uses.search(text)]
    are_shown = not _KEEPS_MESSAGES.search(script.text)
    return all(are_shown and _is_message(script.lines[n - 1]) and not script.is_quoted(n) for n in others)


def _is_message(line: str) -> bool:
    """Returns whether a line is a comment, or only prints a text."""
    outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", line)
    is_printed = re.match(r"\s*(?:echo|printf(?!\s+-v))\b", line) and not re.search(r"[|>&;\\]", outside)
    return line.lstrip().startswith("#") or bool(is_printed and not re.search(r"\$\(|`", line))


def _comes_from_outside(script: Script, name: str, near: str) -> bool:
    """Returns whether a variable is read often, or gives its value to the one with the similar name."""
    num_uses = sum(name in expanded(command.text) for command in script.commands)
    values = (value for _, other, value in script.assignments if other == near and ":" not in value)
    return num_uses > 2 or any(name in expanded(value) for value in values)


def _is_misspelled(name: str, other: str) -> bool:
    """Returns whether names differ in underscores, or in a letter that is left out or exchanged."""
    if re.sub("_(?:O_)?", "", name) == re.sub("_(?:O_)?", "", other):
        return name.lstrip("_") != other.lstrip("_")
    shorter, longer = sorted((name, other), key=len)
    is_plural = longer.lower() == f"{shorter.lower()}s" or re.search(r"\d", name + other)
    is_exchanged = len(name) != len(other) or sorted(name) == sorted(other)
    return len(shorter) > 7 and is_exchanged and not is_plural and is_one_edit(name, other)


def _is_for_several(subject: Subject) -> bool:
    """Returns whether the script has directives of several schedulers, or asks which one runs it."""
    script = subject.script
    return len({d.scheduler for d in script.directives if d.scheduler in MONITORED}) > 1 or bool(
        re.search(r"(?i:=\s*[\"']?(?:pbs|slurm|torque)\b)|\b(?:qsub|sbatch) ", script.text)
    )


@check("RANK018", "error", "the address of the first node is something else")
def _not_first_node(subject: Subject) -> Iterator[Problem]:
    if (subject.num_nodes or 1) < 2:
        return
    found = [
        (line, value, "head -n 1")
        for line, name, value in subject.script.assignments
        if name == "MASTER_ADDR" and (_NODE_LIST.fullmatch(value) or _LOGIN_NODE.fullmatch(value))
    ]
    for command in subject.script.commands:
        if match := _LIST_AS_HOST.search(command.text):
            takes_list = command.launched and match[1].lstrip(" \t-").lower().startswith("h")
            as_names = "paste -sd," if takes_list else "head -n 1"
            found.append((command.line, match[2], "" if "file" in match[1] else as_names))
    # The script may take the first name later.
    is_cut = re.search(r"\$\{MASTER_ADDR(?:%|\[)|set -- \"?\$\{?MASTER_ADDR\b", subject.script.text) or any(
        name == "MASTER_ADDR" and name in expanded(value) and value.strip('"{}$') != name
        for _, name, value in subject.script.assignments
    )
    for line, value, as_names in found if not is_cut else ():
        what = "the login node" if _LOGIN_NODE.fullmatch(value) else "a list of nodes, such as node[01-02]"
        what = "empty in a batch script" if "IPADDR" in value else what
        what = f"{plain(value)} is {what}, not a file or the name of a node of the job"
        is_of_pbs = re.search("PBS|NODEFILE", value)
        names = "cat $PBS_NODEFILE" if is_of_pbs else 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
        remedy = f"run {names} > hosts before it, and give it this file"
        remedy = f"use $({names} | {as_names})" if as_names else remedy
        yield Problem(line, what, remedy)
    lines = subject.script.lines
    reads = [(number, pair) for number, text in enumerate(lines, start=1) for pair in _ELEMENT.findall(text)]
    last_read = {name: number for number, pair in reads for name in pair}
    values = {name: value for _, name, value in subject.script.assignments}
    for number, text in enumerate(lines, start=1):
        match = _ONE_ELEMENT.fullmatch(text)
        nodes = values.get(match[3], "") if match and match[3] else match and match[2]
        if match and nodes and _NODE_LIST.fullmatch(nodes) and last_read.get(match[1], 0) > number:
            what = f"the quotes make one element of {match[1]}, which contains the names of all nodes"
            yield Problem(number, what, f"write {match[1]}=({plain(match[2])}), without quotes", "warning")


@check("RANK019", "warning", "a variable that is not exported")
def _not_exported(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    text = "\n".join(line for line in script.lines if not line.lstrip().startswith(("#", "echo", "printf")))
    alone = {command.line for command in script.commands if not command.argv}
    started = starts(subject)
    last = max((start.command.line for start in started), default=0)
    # Elsewhere, torchrun may set the address, or one process needs none.
    has_ranks = any(
        start.is_launched and not start.is_torchrun and not _MAY_START_TORCHRUN.fullmatch(start.program)
        for start in started
    )
    exported = {name for _, name, _ in script.exports}  # also with the values that they get later
    is_of_shell = not script.shebang or re.search(r"\b(?:ba|z|k|da)?sh\b", script.shebang)
    if not is_of_shell or (script.directives and not script.scheduler):
        return
    for name, (line, value) in {name: (line, value) for line, name, value in script.assignments}.items():
        if value == "0" and _OFF_BY_DEFAULT.fullmatch(name):
            continue
        is_needed = _READ_BY_PROGRAMS.fullmatch(name) and name not in subject.scheduler.reader.variables
        # OpenPBS exports OMP_NUM_THREADS to jobs (start_exec.c), so a new value of it is exported, too.
        is_needed = is_needed and (name, subject.scheduler.name) != ("OMP_NUM_THREADS", "pbs")
        if not is_needed or line not in alone or line > last or re.search(r"\bset -\w*a", text):
            continue
        # Programs may get the address in another way, or need none.
        if name in exported or (name.startswith("MASTER_") and not has_ranks):
            continue
        if len(re.findall(rf"\b{name}\b", text)) == sum(other == name for _, other, _ in script.assignments):
            what = f"{name} is set, but programs do not get it, as it is not exported"
            is_unsure = name.startswith("MASTER_") or _MAY_EXPORT.search("\n".join(script.lines[line:]))
            yield Problem(line, what, "begin this command with export", "note" if is_unsure else None)
    if not re.search(r"\bset -\w*a\b|\bset -o allexport", text):
        yield from _read_by_tasks(subject, alone)


def _read_by_tasks(subject: Subject, alone: set[int]) -> Iterator[Problem]:
    """Yields variables without export that tasks of a launcher read in the single quotes of `bash -c`."""
    script = subject.script
    values = {name: line for line, name, _ in script.assignments if line in alone}
    reads_itself = {name for _, name, value in script.assignments if name in expanded(value)}
    exports = [word for c in script.commands if c.name == "export" for word in c.words[1:]]
    if any(word.startswith("$") for word in exports):
        return  # the names are in a variable
    for start in starts(subject):
        if not start.is_launched or start.program not in ("bash", "sh") or "--export" in start.command.text:
            continue
        code = single_quoted(start.command.text)
        for name in dict.fromkeys(_SET_BY_TASK.findall(code)):
            is_needed = name in _SET_FOR_RANKS or _READ_BY_PROGRAMS.fullmatch(name)
            is_seen = re.search(rf"\b(?:export|declare -x)\b[^\n;]*\b{name}\b|\$\{{?{name}\b", script.text)
            if is_needed and not is_seen and name not in {other for _, other, _ in script.exports}:
                what = f"each task sets {name}, but its programs do not get it, as it is not exported"
                yield Problem(start.command.line, what, f"write export before {name}=", "note")
        for name in dict.fromkeys(expanded(code)):
            sets = rf"\b(?:export|declare -x|typeset -x)\b[^\n]*\b{name}\b|-x {name}\b"
            is_set = re.search(rf"(?<![\w$]){name}=|\b(?:for|read)\s[^;]*\b{name}\b", code)
            before = next((w for w in start.command.words if w.startswith(f"{name}=")), None)
            if (
                name in values
                and name not in exports
                and name not in subject.scheduler.reader.variables
                and values[name] < start.command.line
                and not (is_set or before or re.search(sets, script.text))
            ):
                what = f"{name} is empty in the tasks of {start.command.name}, as it is not exported"
                # It may be exported already: a new value keeps that.
                is_known = _OFTEN_EXPORTED.fullmatch(name) or name in reads_itself
                yield Problem(
                    values[name], what, "begin this command with export", "note" if is_known else None
                )
