"""Checks of commands that do something else than they seem to do in a batch job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile

from ddp_hpc.lint.bash_syntax import is_reached
from ddp_hpc.lint.blocks import CLOSES, asks_where, may_run_elsewhere, reads_pipe
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain, shown
from ddp_hpc.lint.launch_commands import expanded_in_shell, requests_gpus, starts
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.lint.placeholders import is_template
from ddp_hpc.request.program import program_of
from ddp_hpc.schedulers.slurm.parse_directives import read_command

_GLUED = re.compile(r"\s(--[a-z][a-z_-]*[a-z])(\"\$\{?\w+\}?\")(?=\s|$)")
_BLANK_AFTER_BACKSLASH = re.compile(r"[^\\#]+\\[ \t]+")
_NO_ARGUMENT = re.compile(
    r"\s*(?:wait|exit|date|deactivate|echo|done|fi|export|module|source|cd)(?=[\s;)]|$)"
)
_OPTION = re.compile(r"--?[A-Za-z][\w-]*(?:=.*)?")
# Commands that do not keep the script running until a program in the background has ended.
_SHORT = re.compile(r"echo|printf|date|done|fi|[}]|esac|exit|true|:|unset|cd|popd|module|wait")
_SUBSHELL_IN_BACKGROUND = re.compile(r"^[^#]*\)\s*&\s*(?:#.*)?$")
_ASSIGNED = re.compile(r"\s*(?:export\s+)?(?!test\b|expr\b|let\b)[A-Za-z_]\w*\s+=\s")
_MONITORS = re.compile(
    r"nvidia-smi|tail|top|sleep|monitor|watch|ssh|sacct|free|vmstat|dstat|mps-control|Xvfb|^rm\b"
)
# Programs that wait for the others of the same run.
_OF_ONE_RUN = re.compile(r"--(?:(?:(?:node|machine)[-_])?rank|role|job_name|process[-_]id|task[-_]index)\b")
_CONTAINER = re.compile(r"singularity|apptainer|docker|podman")
# Programs and images that use GPUs. Containers for AMD GPUs can have their own libraries.
_GPU_PROGRAM = re.compile(
    r"\b(?:python[0-9.]*|torchrun|accelerate|deepspeed|nvidia-smi)(?![\w./-])|\.py\b|"
    r"(?<![a-z])(?:py)?torch|tensorflow|(?<![a-z])(?:cuda|nvidia|ngc|jax)(?![a-z])",
    re.IGNORECASE,
)
_NO_OPTION = re.compile(r"(?i:rocm|\bamd|miopen|rccl|\blumi\b|(?<![a-z])hip(?![a-z])|\bmi\d\d|[= ]alvis\b)")
_OF_AMD = re.compile(r"ROCR_VISIBLE|MIOPEN_|\b(?:module|ml)\s.*\brocm|\brocm-smi")
_USES_GPUS = re.compile(
    r"--nv\b|--nvccli\b|--rocm\b|_NV(?:CCLI)?\b|_ROCM\b|(?:docker|podman)\b[^#]{,500}?--gpus|--runtime|"
    # Not --device cuda, which is an option of programs.
    r"--device[= ][\"']?(?:\S{,99}?nvidia\.com|/dev/|\$)|"
    r"nvidia-docker"
)
# Programs in containers that need no GPU, even if the image or the job has some.
_BINDS = re.compile("-[BHW]|--(?:bind|mount|home|workdir|pwd)")
_HIDDEN_OPTIONS = re.compile(r"\$\S* (?:\$|\S*(?:[.]sif|[.]s?img|[:/]))")  # before the name of the image
_NEEDS_NO_GPU = re.compile(r"\s(?:python\S* -c|ldd|ls|cat|pip)\s|process\w*\.py\b|\bxvfb-run\b")

_INTERACTIVE = re.compile(
    r"\b(?:docker|podman)\s+(?:run|exec)(?=\s)(?!.*\s(?:-[it]*d[it]*|--detach)\b)\s(?:[^|;]*\s)?"
    r"(?:-(?:it|ti)|(?:-i|--interactive)\s+(?:-t|--tty)|(?:-t|--tty)\s+(?:-i|--interactive))\b(?!\s+\d)|"
    r"\bsrun\s(?:[^|;]{,300}\s)?--pty\s+(?:/bin/)?(?:ba|z)?sh(?:\s+-[il]+)?\s*$|^\s*(?:salloc|sudo)\b|"
    # Words after the image are arguments of its shell.
    r"^\s*(?:singularity|apptainer)\s+shell[\s\\]+(?:(?:-[BHSWos]|--(?:bind|home|overlay|scratch|pwd|shell|workdir|env))"
    r"[\s\\=]+[^\s\\]+[\s\\]+|-[^\s\\]+[\s\\]+){,20}(?!-)[^\s\\<]+\s*$"
)
_REMOVE_SALLOC = "remove salloc and its options, and request the same resources with directives"
_LINE_OF_TASK = re.compile(
    r"sed\s+-n\s+[\"']*\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)\}?[\"']*(?:p|\{)|head\s+-(?:n\s*)?\"?\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)\b|"
    r"NR\s*==\s*[\"']*\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)\b(?!\}?[\"']*\s*\+)"
)
# The script may add 1 to the index itself, or do something else in task 0.
_KNOWS_0 = re.compile(
    r"(?:ARRAY_TASK_ID|ARRAY_INDEX)(?:\+\+|\+=|=\"?\$\(\(|\}?\"?\s*(?:-eq|-gt|-ne|==|\s=|!=|>)\s*\"?0\b)"
)
_MODULE = re.compile(r"(?:--standalone|--\S+[= ][^\s=]+)\s+([a-z_]\w*(?:[.][a-z_]\w*)+)(?:\s|$)")
_PYTHON = re.compile(
    r"\S*(?:torchrun|deepspeed|accelerate launch) (?:(?!\.py|-m |no.py).)*?(?<= )(python\S*) "
)
_OF_SRUN = re.compile(r"--(?:gres|gpus-per-(?:node|task)|ntasks(?:-per-node)?|cpus-per-task|cpu-bind)\b")
_OF_ACCELERATE = re.compile(r"--(?:num[-_](?:processes|machines)|multi[-_]gpu|machine[-_]rank)")
_OF_MPIRUN = re.compile(r"--mca|--map-by|--bind-to|--hostfile|-npernode|--npernode|--oversubscribe")
_OF_SCRIPT = re.compile(r"\$0\b|\$\{0\}|BASH_SOURCE")
_VARIABLE = re.compile(r"\$\{?(\w+)")
_OF_SHELL = frozenset(
    ("[", "[[", "test", "if", "else", "fi", "echo", "printf", "date", "export", "set", "module")
)
_COPIES = frozenset(("cp", "rsync", "tar", "unzip", "mv", "unsquashfs"))
_LOCAL_FOLDER = re.compile(
    r"\$\{?(?:SLURM_|PBS_)?(?:TMPDIR|JOBFS|LOCAL_?SCRATCH)\b|\s/(?:tmp|dev/shm|local)/[\w-]+"
)
_IN_LOCAL_FOLDER = re.compile(
    r"/(?:tmp(?!/work/)|dev/shm|local|lscratch)/|\$\{?(?:SLURM_|PBS_)?(?:TMPDIR|JOBFS)\b"
)
_ON_ALL_NODES = re.compile(
    r"\bsbcast\b|\b(?:srun|mpirun|mpiexec|pdsh|pbsdsh|clush|ssh)\b.*\b(?:cp|mkdir|rsync|tar|unzip|mv)\b"
)


@check("JOB024", "error", "a command that ends before its options")
def _command_ends_early(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if is_template(script):
        return
    for number, line in enumerate(script.lines, start=1):
        following = script.lines[number] if number < len(script.lines) else ""
        is_command = not script.is_quoted(number) and following.strip() and "'" not in line
        if is_command and _BLANK_AFTER_BACKSLASH.fullmatch(line) and is_reached(script, number):
            what = "the blank after the backslash ends the command here"
            remedy = "remove the blank, and the backslash too if the next line is not part of the command"
            # The next line may be a command of its own.
            is_own = _NO_ARGUMENT.match(following) or re.search(r";\s*\\\s*$", line)
            yield Problem(number, what, remedy, "note" if is_own else None)
    for previous, command in pairwise(script.commands):
        if previous.ends != "\n" or "[[" in previous.words:
            continue
        is_option = _OPTION.fullmatch(command.words[0]) and "]" not in command.words
        before = script.lines[command.line - 2]
        is_reported = _BLANK_AFTER_BACKSLASH.fullmatch(before)
        last = previous.line + previous.text.count("\n")
        has_options = not (_OPTION.fullmatch(previous.words[0]) or _SHORT.fullmatch(previous.name))
        is_next = last == command.line - 1 or re.fullmatch(r"\s*(?:#.*)?", script.lines[last - 1])
        # A pattern of `case`, such as -h|--help, has one word.
        is_whole = command.ends in ("\n", "&", ";") or (command.ends == "|" and len(command.words) > 1)
        is_run = is_option and is_next and is_whole and not is_reported
        if is_run and has_options and is_reached(script, command.line):
            option = shown(command.words[0])
            what = f"the command above ends in line {last}, so bash runs {option} as a command"
            is_apart = last < command.line - 1
            remedy = f"end line {last} with a backslash, like all lines of the command but the last"
            remedy += ", and remove the lines between" * is_apart
            if re.search(r"\\\s+#", script.lines[last - 1]):
                remedy = f"remove the comments after backslashes, which must end lines, from line {last} on"
            elif script.lines[last - 1].lstrip().startswith("#"):
                remedy = f"move the comment in line {last}, and any below it, above the command"
            elif re.search(r"\s#.*\\$", script.lines[last - 1]):
                remedy = f"move the comment of line {last} out of the command"
                remedy += ", or quote the # if it is part of a value"
            elif command.words[-1] == "wait" and len(command.words) > 1:
                remedy += ", and write wait in a line of its own"
            yield Problem(command.line, what, remedy)


@check("JOB025", "error", "programs in the background when the script ends")
def _ends_too_early(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    subshells = [n for n, line in enumerate(script.lines, start=1) if _SUBSHELL_IN_BACKGROUND.search(line)]
    background = [
        c
        for before, c in zip((None, *script.commands), script.commands, strict=False)
        if (c.ends == "&" and not _is_short_alone(before, c)) or (c.ends == ")" and c.line in subshells)
    ]
    if not script.scheduler or not background or script.supervised:
        return
    last = background[-1]
    after = script.commands[script.commands.index(last) + 1 :]
    started = _program_before(script.commands, last)
    # The command may be in a variable such as $WAIT, or in a trap.
    waits = any(word.strip("${}").lower() == "wait" for c in script.commands for word in c.words)
    waits |= any(re.match(r"trap\s.*\bwait\b.*\s(?:EXIT|0)\b", c.text) for c in script.commands)
    # The last of several equal programs may run in the foreground, and end first.
    rest = [c for c in after if c.name and not _SHORT.fullmatch(c.name)]
    equal = {program_of(c.launched or c.argv) for c in (started, *rest)}
    is_last_of_several = len(background) > 1 and len(rest) == 1 and len(equal) == 1
    is_last_of_several = is_last_of_several and not _OF_ONE_RUN.search(rest[0].text)
    if not waits and (not rest or is_last_of_several) and not _MONITORS.search(started.text):
        is_elsewhere = may_run_elsewhere(script, started.line)
        severity: Severity | None = "note" if is_elsewhere else "warning" if rest else None
        what = (
            f"the script ends while {shown(started.name)} runs in the background, and "
            f"{subject.scheduler.title} then ends the job"
        )
        yield Problem(started.line, what, "add wait before the script ends", severity)


def _is_short_alone(before: Command | None, command: Command) -> bool:
    """Returns whether only a short command such as `echo` runs in the background."""
    is_alone = before is None or before.ends in ("\n", ";", "&")
    return (
        is_alone and command.words[0] not in CLOSES and bool(command.name and _SHORT.fullmatch(command.name))
    )


def _program_before(commands: tuple[Command, ...], last: Command) -> Command:
    """Returns the program that `last` runs in the background: itself, or one in the loop that it ends."""
    index = commands.index(last)
    while index and (not commands[index].name or _SHORT.fullmatch(commands[index].name)):
        index -= 1
    return commands[index]


@check("JOB026", "note", "a container without the GPUs of the job")
def _container_without_gpus(subject: Subject) -> Iterator[Problem]:
    script, device = subject.script, subject.site.node.device if subject.site else ""
    body = "\n".join(line for line in script.lines if not line.startswith("#"))
    for command in script.commands if _NO_OPTION.search(device) or _OF_AMD.search(body) else ():
        if "--nv" in command.words and _CONTAINER.search(command.text) and "--rocm" not in body:
            yield Problem(command.line, "--nv is for GPUs of NVIDIA, and these are of AMD", "write --rocm")
            return
    if not requests_gpus(subject) or _USES_GPUS.search(body) or _NO_OPTION.search(f"{device}\n{script.text}"):
        return
    for command in script.commands:
        words = command.launched or command.argv
        name = words[0].rpartition("/")[2] if words else ""
        verb = next((word for word in words[1:] if not word.startswith("-")), "")
        if not _CONTAINER.fullmatch(name) or verb not in ("exec", "run", "shell"):
            continue
        pairs = pairwise(words[1:8])
        given = " ".join(word for before, word in pairs if word[:1] != "-" and not _BINDS.fullmatch(before))
        has_no_input = words[-1] in ("bash", "sh") and "<" not in command.text
        needs_none = has_no_input or _NEEDS_NO_GPU.search(command.text) or _HIDDEN_OPTIONS.match(given)
        if needs_none or not _GPU_PROGRAM.search(command.text):
            continue
        option = "--gpus all" if name in ("docker", "podman") else "--nv"
        what = f"{plain(name)} {plain(verb)} gives the container no GPUs, unless the site configures it"
        yield Problem(command.line, what, f"add {option} after {plain(verb)}")
        return


@check("SLURM030", "warning", "the script looks for its own directory")
@check("PBS016", "warning", "the script looks for its own directory")
def _own_directory(subject: Subject) -> Iterator[Problem]:
    script, variable = subject.script, subject.scheduler.reader.submit_directory
    submits = any(command.name in ("sbatch", "qsub") for command in script.commands)
    if submits or re.search(rf"{variable}:-|-[nz] \S*{variable}|scontrol .*show.* job", script.text):
        return  # the script uses its own directory only outside of jobs, or submits itself
    may_be_elsewhere = asks_where(script)
    body = ["" if re.match(r"\s*(?:#|echo|printf)", line) else line for line in script.lines]
    alone = {command.line for command in script.commands if not command.argv}
    num_uses = Counter(name for line in body for name in _VARIABLE.findall(line))
    for number, name, _ in reversed(script.assignments):
        own = _VARIABLE.findall(body[number - 1]).count(name)  # as in NAME=${NAME:-DEFAULT}
        if number in alone and num_uses[name] <= own:
            num_uses.subtract(_VARIABLE.findall(body[number - 1]))
            body[number - 1] = ""  # nothing uses the variable, nor those in its value
    for number, line in enumerate(body, start=1):
        if (
            re.search(r"dirname(?!.*\bbasename\b)", line)  # with basename, the path of the copy itself
            and not script.is_quoted(number)
            and (match := _OF_SCRIPT.search(expanded_in_shell(line)))
        ):
            what = (
                f"{subject.scheduler.title} runs a copy of the script from its spool directory, so "
                f"{match[0]} does not point to your files"
            )
            # The script may know its directory in jobs, or Python may look in the current one, too.
            is_unsure = variable in script.text or "PYTHONPATH" in line or may_be_elsewhere
            default_of = re.search(r"\$\{(\w+):?[-=].{,200}?dirname", line)
            is_unsure |= default_of is not None and _is_passed_on(script, default_of[1])
            # It may fall back to another directory.
            names = {name for n, name, _ in script.assignments if n == number}
            later = [(name, value) for n, name, value in script.assignments if n > number and name in names]
            falls_back = any(name not in _VARIABLE.findall(value) for name, value in later)
            is_unsure = is_unsure or falls_back or "slurm_script" in script.text
            is_unsure |= any(_only_passes_through(script, name) for name in names)
            remedy = f"write the path of the directory, or ${variable} if you submit the script from there"
            yield Problem(number, what, remedy, "note" if is_unsure else None)


def _only_passes_through(script: Script, name: str) -> bool:
    """Returns whether the script changes to this directory, and to another one before it starts a program."""
    uses = [c for c in script.commands if name in _VARIABLE.findall(c.text) and c.argv]
    if len(uses) != 1 or uses[0].name != "cd":
        return False
    later = (c for c in script.commands if c.line > uses[0].line and c.argv)
    after = [c for c in later if c.name not in _OF_SHELL or "$(" in c.text]
    return bool(after) and re.match(r"cd\s+[\"']?[/~$]", after[0].text) is not None


def _is_passed_on(script: Script, name: str) -> bool:
    """Returns whether qsub or sbatch passes on this variable, also if only a comment says so."""
    named = re.search(rf"(?m)^#.*\s(?:-v|--export)[ =]\S*\b{name}\b", script.text)
    return bool(named) or script.value("-V") is not None


@check("JOB028", "error", "a command that needs a terminal")
def _interactive(subject: Subject) -> Iterator[Problem]:
    # A script may ask whether it has a terminal.
    asks = re.search(r"(?:\[|test) +-t +[012]\b|\btty -s\b", subject.script.text)
    num_sudo = sum(command.name == "sudo" for command in subject.script.commands)
    # Without a shebang and directives at its beginning, the file may be a list of commands for a terminal.
    is_script = bool(subject.script.scheduler and (subject.script.read() or subject.script.shebang))
    for command in subject.script.commands if is_script and not asks else ():
        # An alias runs nothing, and the others give their command a terminal.
        is_other = command.name in ("echo", "printf", "alias", "script", "unbuffer", "expect")
        if is_other or "--no-shell" in command.words or not (match := _INTERACTIVE.search(command.text)):
            continue
        has_input = " shell" in match[0] and reads_pipe(subject.script, command)
        is_sudo = match[0].strip() == "sudo"
        # For a program of the site, and on machines where the author is root, it needs no password.
        of_site = any(
            re.match(r"/(?!s?bin/|usr/s?bin/)|(?:apt|apt-get|yum|dnf)$", word) for word in command.argv[1:2]
        )
        if has_input or (is_sudo and (num_sudo > 1 or of_site)):
            continue
        yield Problem(command.line, *_without_terminal(command, match[0]))


def _has_program(salloc: Command) -> bool:
    """Returns whether salloc starts a program that needs no terminal."""
    _, words = read_command(salloc.argv[1:], of_srun=True)  # which has nearly the same options
    if not words or "--pty" in words:
        return False
    is_shell = re.fullmatch(r"(?:/\S*/)?(?:ba|z|k|c|tc)?sh|\$\{?SHELL\}?", words[0])
    return not is_shell or any(not word.startswith("-") for word in words[1:])


def _without_terminal(command: Command, text: str) -> tuple[str, str, Severity]:
    """Returns what is wrong with `text`, which needs a terminal, what to do, and the severity."""
    name = text.split()[0]
    if name == "salloc" and _has_program(command):
        what = "salloc requests a second allocation, for which its program has to wait"
        return what, _REMOVE_SALLOC, "warning"
    if name == "salloc":
        what = "salloc requests a second allocation, and its shell ends at once"
        return what, _REMOVE_SALLOC, "error"
    if name == "sudo":
        what = "sudo asks for a password, unless it is configured without one, and a job has no terminal"
        return what, "make sure that it needs no password on the nodes of jobs", "note"
    what = f"{shown(text)} needs a terminal, and a batch job has none"
    if name in ("docker", "podman"):
        # podman only prints a warning, and most scripts with docker -it are run by hand on another machine.
        return what, "omit -t (--tty)", "note"
    if name in ("singularity", "apptainer"):
        what = f"without input, {name} shell ends at once, and the next commands run outside the container"
        return what, f"write {name} exec IMAGE COMMAND for each of them", "warning"
    # Without a terminal, srun ignores --pty.
    return what, "remove the command, since the script already runs in a job", "warning"


@check("RANK021", "error", "an option of a launcher that it does not get")
def _option_of_launcher(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        words = start.words
        after = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words)) + 1
        for word, following in pairwise((*words[after:], "")):
            is_of_torchrun = start.is_torchrun and start.given("--nproc-per-node") is None
            if (
                (is_of_torchrun and re.match(r"--nproc[-_]per[-_]node|--standalone\b", word))
                or (start.program == "python" and re.match(r"torch\.distributed\.(?:launch|run)$", word))
                or (start.command.name == "srun" and _OF_SRUN.match(word))
                or (start.program == "accelerate" and _OF_ACCELERATE.match(word))
                or (start.command.name in ("mpirun", "mpiexec") and _OF_MPIRUN.fullmatch(word))
            ):
                what = f"{shown(word)} is an argument of {shown(words[after - 1])}, because it comes after it"
                remedy = "put it before the program, or remove it"
                flag, _, value = word.partition("=")
                # If a directive requests the same, nothing is lost, except for --cpus-per-task of srun.
                is_requested = flag != "--cpus-per-task" and any(
                    d.flag == flag and (value or following or d.value) == d.value
                    for d in subject.script.read()
                )
                # The program may have an option of this name, too, or submit jobs.
                before = takewhile(lambda one: not one.endswith(".py"), start.command.argv)
                is_own = any(one.partition("=")[0] == flag for one in before) or re.search(
                    r"submit|slurm|sweep|launcher", words[after - 1]
                )
                yield Problem(start.command.line, what, remedy, "note" if is_requested or is_own else None)
        is_clear = start.program == "torchrun" and after > len(words) and not start.hides_options
        module = _MODULE.search(" ".join(words)) if is_clear else None
        if module and {"-m", "--module", "--no-python"}.isdisjoint(words):
            what = f"torchrun opens {shown(module[1])} as a file"
            yield Problem(start.command.line, what, "write -m before the name of a module")
        if python := _PYTHON.match(" ".join(start.inner.words[:80])):
            what = f"{start.inner.program} starts Python itself, and opens {shown(python[1])} as its program"
            yield Problem(start.command.line, what, "remove this word")


@check("RANK022", "note", "files on the first node only")
def _first_node_has_files(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if (subject.num_nodes or 1) < 2 or _ON_ALL_NODES.search(script.text):
        return
    launches, tried = script.launches(), set[str]()
    for command in script.commands:
        folder = _LOCAL_FOLDER.search(command.text) if command.name in _COPIES else None
        name = folder[0].strip() if folder else ""
        uses = re.compile(re.escape(name))
        if not folder and command.name in (*_COPIES, "mkdir"):
            named = re.findall(r"\$\{?(\w+)", command.text)
            name = next((n for n in named if _IN_LOCAL_FOLDER.match(script.set_once.get(n, ""))), "")
            uses = re.compile(rf"\$\{{?{name}\b")
        is_new = name != "" and name not in tried
        tried.add(name)
        users = [c for c in launches if c.line > command.line and uses.search(c.text)] if is_new else []
        if users:
            yield Problem(
                command.line,
                f"{command.name} runs on the first of {subject.num_nodes} nodes, and each node has its own "
                f"{plain(name)}; line {users[0].line} uses it on all",
                f"put srun --ntasks-per-node=1 --ntasks={subject.num_nodes} in front of it"
                if "srun" in subject.scheduler.reader.own_commands
                else "start it on each node, with mpirun and one rank per node",
            )
            return


@check("JOB029", "warning", "a blank too many, or a missing one")
def _wrong_blanks(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if not re.search(r"\b(?:ba)?sh\b", script.shebang):
        return
    for command in script.commands:
        words = command.words[1:] if command.words[0] == "export" else command.words
        is_whole = words[1:2] == ("=",) and (len(words) == 3 or words[0].isupper()) and command.ends != "("
        is_assigned = is_whole and _ASSIGNED.match(script.lines[command.line - 1])
        if is_assigned and is_reached(script, command.line):
            what = f"bash does not set {plain(words[0])} here, because there are blanks around ="
            # Other programs read only exported variables, whose names are mostly in upper case.
            is_exported = command.words[0] == "export" and words[0].isupper()
            is_read = re.search(rf"(?m)^[^#\n]*\$\{{?{re.escape(words[0])}\b", script.text) or is_exported
            export = "export " * (command.words[0] == "export" or not is_read)
            # A variable that nobody sets is empty, too, but set -e ends the script here.
            is_empty = words[2:3] == ("",) and not re.search(r"(?m)^[ \t]*set -\w*e", script.text)
            severity: Severity | None = None if is_read and not is_empty else "note"
            if re.search(r"=\s+#", script.lines[command.line - 1]):
                severity = "note"  # the value is to be filled in
            yield Problem(command.line, what, f"write {export}{plain(words[0])}=VALUE", severity)
        if glued := _GLUED.search(command.text):
            what = f"the value of {glued[1]} is part of the option's name, as no blank or = is between them"
            yield Problem(command.line, what, f"write {glued[1]}={plain(glued[2])}", "note")
        if command.name == "[" and "]" not in command.words and command.words[-1].endswith("]"):
            what = f"] is a part of {shown(command.words[-1])}, so the test fails"
            yield Problem(command.line, what, "write a blank before ]", "note")


@check("JOB031", "warning", "line 0 of a file for the first task of an array")
def _line_0(subject: Subject) -> Iterator[Problem]:
    if not (subject.script.value("--array", "-J") or "").startswith("0"):
        return
    severity: Severity | None = "note" if _KNOWS_0.search(subject.script.text) else None
    for command in subject.script.commands:
        if _LINE_OF_TASK.search(command.text):
            what = "the array begins with task 0, but files begin with line 1"
            remedy = "add 1 to the index, or to both ends of the range, such as 1-10 for 0-9"
            yield Problem(command.line, what, remedy, severity)
            return
