"""Check of lines that together do something else: effects that are lost, or work that is done twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, is_one_edit, plain, shown
from ddp_hpc.lint.launch_commands import requests_gpus, starts
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.lint.placeholders import is_template
from ddp_hpc.request.program_files import text_of
from ddp_hpc.schedulers.script_options import whole_number
from ddp_hpc.schedulers.slurm.parse_directives import read_command

# Expressions for several lines, what is wrong where they end, and what to write. Six blanks continue them.
# Those that begin with SEVERAL are not for jobs with one node.
_TEXTS = r"""
BEGIN(?:(?:module|ml)\s+(?:load|add|use)|source|\.|export(?=\s+\w)|conda\s+activate)\s(?:2>&1|[^#\n|&;"'`()])*\|(?!\|)
    @ in a pipeline, this runs in a subshell, and does not change the shell of the script
       @ replace | COMMAND with > FILE or > >(COMMAND)
^(?:[^#\n'"|]|"[^"\n]*"|'[^'\n]*')*[^|\n]\|\s*(?:read|mapfile|readarray)\s+(?:-\w+\s+)*[A-Za-z]
    @ this sets variables in the shell of the pipe, not in the script @ write NAME=$(...), or < <(...)
BEGIN(?:echo|printf|date)\b(?:[^\n&|;>\\'"]|"[^"\n]*"|'[^'\n]*')*\n\s*(?:exit\s+|\w+=|(?:if\s+)?\[+\s+)"?\$\?
    @ $? is the status of the command before, which only prints @ write status=$? before it, and $status here
LINE\w=["']?\$\(\s*(?:srun|ssh|mpirun)\s[^|\n]*2>&1\s*\) @ it also gets their messages @ omit 2>&1
^[ \t]*cd\s+/tmp/?[ \t]*(?:;|&&|\n)\s*rm\s+-\w{,4}r\w{,4}\s+(?:\./)?\*(?=[\s;]|$)
    @ this deletes what your other jobs have on this node @ remove only a directory that this job has made
^set -\w*u(?:(?!^set \+)[^\0]){,999}?^source \S*(?:/etc/(?:profile|bash)[^\s"]*(?<!a\.sh)|bashrc|init/\w+)"?$
    @ with set -u, a variable that is not set in this file ends the job @ write set -u only after it
^set\s+(?:-\w+\s+){,3}-(?:\w*u|o\s+nounset\b)(?:(?!^[ \t]*set\s+\+|#!/)[^\0]){,3000}?
      ^[ \t]*(?:conda|mamba|micromamba|source)\s+activate\s
    @ with set -u, an unset variable in the activation of a package ends the job @ write set -u only after it
^(?:conda\s+activate|(?:source|\.)\s+\S*\bactivate)\b(?:(?!^(?:conda|source|\.|deactivate|else)\s)[\s\S]){,3000}?
      ^(?:module|ml)\s+(?:load|add)\s(?i:[^#\n]*[/\s])?(?i:python|anaconda|miniconda|miniforge)\d?(?:/\S*)?$
    @ this module puts its Python before that of the active environment in PATH
       @ load the module before activating the environment
BEGIN(\w+)=["']?\$\(\s*(?:printf\s+["']?%0\d|seq\s+-w)[^\n]*\n
      (?:(?!\bfor\s+\1\b|^[ \t]*\1=)[\s\S]){,3000}?\$\(\([^()\n#]*\b\1\b
    @ this number begins with 0, which makes it octal, and 08 and 09 none @ write 10#$NAME
^(?:export\s+)?(?:SLURM_(?:ARRAY_TASK_|PROC|LOCAL|NODE|JOB_?)ID|PBS_(?:ARRAY_INDEX|JOBID))=["']?[\w./-]+["']?$
    @ the variable no longer has the value of the scheduler @ remove this line if the scheduler sets it
LINECUDA_VISIBLE_DEVICES=["']?\$\{?(?:SLURM|PBS)_ARRAY_
    @ the GPUs of each task begin with 0 @ remove it, and request a GPU for each task
BEGINsrun\s[^&]{,400}?_rank[= ]0\b[^&]{,99}?\n\s*srun\s[^&]{,99}?_rank[= ]1\b
    @ the first node waits for this one, which starts only after it @ write & at the end of each, and wait
LINEtorchrun\s[^#]{,400}?\s--local[-_]rank[= ]\d @ all ranks get this @ omit it
^(?=[^#\n]*\s--?\w)[^#\n]*[^\s&|;({\\][ \t]+\\\n[ \t]*(?:wait|exit|date|deactivate|echo|done|fi)\b
    @ the backslash makes these words arguments of the command before @ remove the backslash
^[^#\n"']*\w\u00a0[\w-] @ bash does not know this kind of blank @ write an ordinary one
BEGIN(?:export\s+)?OMP_NUM_THREADS=["']?\$\{?SLURM_(?:NTASKS|NPROCS|NNODES)\b(?=[\s\S]{,3000}?^(?:srun|mpi)\w*\s)
    @ this is not the number of cores of a task @ use ${SLURM_CPUS_PER_TASK:-1}
BEGIN(?:export\s+)?\w*(?:ADDR|HOST|master\w*|node\w*)=["']?\$\(\s*srun\s+hostname[^|)]*\)
    @ each task prints its own name @ use srun -N 1 -n 1
LINE[^&>\n]&[ \t]*\n\s*[^#\n]*[^&>\n]&[ \t]*\n\s*wait\s+\$!
    @ this waits only for the last one @ write wait without $!
LINE\[{1,2}\s+[^\s\]]+[^\s\]=!<>]==?[^\s\]=]+\s+\] @ this is one word, and always true @ write blanks around =
\A(?![^\0]*--exclusive)[^\0]*?^(?![ \t]*(?:echo|printf|print|cat|message|grep)\b)[^#\n]*
      (?:\bdetectCores\(\)|(?<!, )\b(?:os|multiprocessing|mp)\.cpu_count\(\)
      |\w[= ]["']?(?:\$\(|`)[^\n`)]{,40}\bnproc\s+--all\b)
    @ this counts all cores of the node, also those of other jobs @ use what nproc prints without --all
SEVERAL^(?![^\n]*(?:MASTER_ADDR=|scontrol))[^#\n]*\$\{?SLURM_(?:JOB_)?NODELIST(?:\}?["']?[ \t]*\|[ \t]*
      (?:tr\s+(?:-s\s+)?["']?,|sed\s+(?:-\w+\s+)?["']?s.,|cut\s+-d\s?["']?,)|//,)
    @ the list has the form node[01-04], so no names come out @ use scontrol show hostnames
SEVERALLINEIFS=["']?,["']?\s+read\s[^\n]{,200}?SLURM_(?:JOB_)?NODELIST
    @ the list has the form node[01-04], so no names come out @ use scontrol show hostnames
\A(?![^\0]*&[ \t]*$)[^\0]*?^(?:killall|pkill)\s[^\n#|&;]*(?:\n[ \t]*(?:#[^\n]*)?)*\Z
    @ the job counts as failed if this finds nothing to end @ write || true after it
\bray\s+start\s(?:[^\n&]|\\\n){,300}?--head\b(?:[^\n&]|\\\n){,300}?&[ \t]*\n
      (?:(?!\b(?:sleep|until|while|wait)\b|ray\s+(?:status|health)|\.py\b)[^\0]){,1500}?\bray\s+start\s[^#\n]{,200}?--address
    @ this may connect before the head node is up, and fails then @ write sleep or until ray status before it
^(?:export\s+)?(\w+)=["']?[^\s"'#]*\$\{?SLURM_JOB_?ID\}?["']?$
      (?=[^\0]{,3000}?\bsbatch\s[^\n]{,200}?after\w*:["']?\$\{?SLURM_JOB_?ID)
      (?=[^\0]{,3000}?\b(?:resume|restart|ckpt|checkpoint)\S{,40}?[= ]["']?\$\{?\1\b)
    @ the next job has another ID, so it does not find what this one has saved @ omit the ID
^\#(?=[^\n]*(?i:at (?:a|the same|once|one)\b|simultan|concurren|throttl))(?![^\n]*(?i:\bper\b|\beach\b))
      [^\n]*\b(\d+)\b[^\n]*\n
      \#SBATCH\s+(?:--array[= ]|-a\s*)\d+-\d+:(?!1\s)\1\s(?![^\0]*(?:TASK_STEP|TASK_ID\}?\s*[+-]))
    @ the number after the colon is the step between indices, so those in between are left out
       @ write % instead of the colon
BEGIN(?:srun|mpirun|mpiexec)\s+(?:-\S+\s+(?:\d+\s+)?)*(["'])(?:python\d?|torchrun|\./\w+)\s[^"'\n]*\1[ \t]*$
    @ in quotes, the program and its arguments are one name @ omit the quotes, or write bash -c before them
"""
_ROWS = [
    (
        re.compile(text.replace("BEGIN", r"^[ \t]*").replace("LINE", r"^[^#\n]*"), re.MULTILINE),
        what,
        remedy,
        bool(several),
    )
    for several, text, what, remedy in re.findall(
        r"(SEVERAL)?(.+?)\s+@ (.+) @ (.+)", _TEXTS.replace("\n      ", "")
    )
]
# Programs with threads, and without MPI.
_WITHOUT_MPI = frozenset(
    (
        "cellranger", "spaceranger", "bowtie2", "bowtie", "hisat2", "bwa", "bwa-mem2", "samtools", "STAR",
        "fastp", "fastqc", "salmon", "kallisto", "minimap2", "blastn", "blastp", "blastx", "tblastn",
        "cutadapt", "kraken2", "trim_galore", "featureCounts", "trimmomatic", "pigz", "spades.py", "flye",
    )
)  # fmt: skip
# Commands before a program.
_BEFORE = frozenset(("singularity", "apptainer", "time", "env", "nice", "numactl"))
_OF_RANK = re.compile(r"PROCID|LOCALID|NODEID|_RANK|multi-prog|\s--overcommit|\s:\s|bash|\bsh\b")
_STARTS_POOL = re.compile(r"(?is)\bmatlab\b.*\bparpool\((?!\W*threads)")
# A script that submits itself, or submits a job with an incremented counter.
_SUBMITS_NEXT = re.compile(r"(?m)^[^#\n]*\b(?:sbatch|qsub)\s[^\n#]*(?:\$\(\(\s*\$?\w+\s*\+\s*1|\$\{?0\b)")
_INTERPRETERS = ("python", "Rscript", "julia", "perl")
_RANKS = re.compile(
    rb"(?i)mpi|rank|procid|localid|nodeid|dask|\bray\b|distributed|master_|multi-prog|cluster|parallel|lammps|cpu.bind|hint"
)
_COMMANDS = ("python", "torchrun", "mpirun", "mpiexec", "module", "source", "export", "conda", "singularity")
# Programs whose names differ from these by one letter.
_OTHERS = frozenset(("jython", "cython", "mpprun", "mpdrun", "mprun"))


@check("JOB042", "note", "lines that together do something else, or work that is done twice")
def _together(subject: Subject) -> Iterator[Problem]:
    script, started = subject.script, starts(subject)
    if is_template(script) or (script.shebang and not re.search(r"\b(?:ba|da)?sh\b", script.shebang)):
        return
    for pattern, what, remedy, is_for_several in _ROWS:
        if is_for_several and subject.num_nodes == 1:
            continue
        if match := pattern.search(script.text, 0, 65_536):  # some take time
            yield Problem(script.text.count("\n", 0, match.end() - 1) + 1, what, remedy)
    for command in script.commands:
        name = command.name
        meant = [one for one in _COMMANDS if name.isalpha() and is_one_edit(name, one)]
        # With another letter before or after it, it may be another program.
        is_longer = bool(meant) and meant[0] in name and name != meant[0] + meant[0][-1]
        if meant and not (is_longer or name in _OTHERS or _is_defined(script.text, name)):
            what = f"{shown(command.argv[0])} is not a command"
            yield Problem(command.line, what, f"write {meant[0]}", "warning")
    yield from _copies(subject)
    yield from _serial_solvers(subject)
    yield from _begins_again(subject)
    yield from _memory_of_each_cpu(subject)
    tasks = script.value("--array", "-J") or "" if script.scheduler else ""
    pools = [command for command in script.commands if _STARTS_POOL.search(command.text)]
    has_several = re.match(r"(\d+)[-,](?!\1\b)\d(?!.*%1$)", tasks)
    if pools and has_several and not re.search("JobStorageLocation|MATLAB_PREFDIR", script.text):
        what = "the pools of all tasks of the array write to the same files"
        yield Problem(pools[0].line, what, "give each task a JobStorageLocation of its own")
    words = [word for start in started for word in start.words]
    if has_several and any(word.startswith("--") for word in words):
        texts = [command.text.encode(errors="replace") for command in script.commands]
        files = [word for word in words if re.fullmatch(r"[\w./-]{1,200}\.\w+", word) and subject.directory]
        texts += [text_of((subject.directory or Path()) / name) or b"" for name in files]
        reads = re.compile(rb"ARRAY|(?:TASK|JOB)_?ID|RANDOM|\$\{?[1-9@*]|sweep|agent|worker")
        if not any(map(reads.search, texts)):
            what = "all tasks of the array do the same, unless a program reads the index of its task"
            indices = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX")
            index = next((one for one in indices if one in subject.scheduler.reader.variables), indices[0])
            yield Problem(subject.line_of("--array", "-J"), what, f"pass ${index} to the program")


@lru_cache(maxsize=8)
def _is_defined(text: str, name: str) -> bool:
    """Returns whether a script defines a function or a variable of this name; in (( )), it is a variable, and
    in =( ), it is an element of an array.
    """
    defined = rf"\b{name}\s*[(=]|\b(?:function|alias)\s+{name}\b|\(\(\s*{name}\b|=\([^()]*\b{name}\b"
    return re.search(defined, text, re.IGNORECASE) is not None


def _copies(subject: Subject) -> Iterator[Problem]:
    """Yields a program that knows no other copies of itself, and of which a launcher starts several."""
    for command in subject.script.launches("srun", "mpirun", "mpiexec"):
        index = _index_of_program(command)
        is_script = index == 0
        index = index or _index_of_script(subject, command)
        if index == 0 or _OF_RANK.search(command.text):
            continue
        own = replace(command, words=command.argv[:index])
        given = own.option("-n", "--ntasks", "-np", "--np")
        is_of_job = own.name == "srun" and own.option("-N", "--nodes", "--ntasks-per-node", "-c") is None
        number = subject.value_of(given or ("$SLURM_NTASKS" if is_of_job else ""))
        name = command.argv[index].rpartition("/")[2]
        if (whole_number(number) or 0) > 1 and not (is_script and given):
            what = f"{own.name} starts {number} copies of {name}, and all of them do the same"
            what += ", unless it uses MPI" * is_script
            yield Problem(
                command.line, what, f"start it without {own.name}, and give it the number of threads"
            )
            return


def _serial_solvers(subject: Subject) -> Iterator[Problem]:
    """Yields a solver of OpenFOAM of which a launcher starts several copies, as -parallel is missing."""
    for command in subject.script.launches("srun", "mpirun", "mpiexec"):
        words = command.after_options or ("",)
        is_open = any(word in ("-parallel", "-help") or word[:1] in ("$", "`", ":") for word in words)
        of_job = "$SLURM_NTASKS" if command.name == "srun" else ""
        given = command.option("-n", "-np", "--np", "--ntasks") or of_job
        number = subject.value_of(given)
        # mpirun with the value of a variable starts several.
        is_several = (whole_number(number) or 0) > 1 or (number.startswith("$") and number != of_job)
        solver = words[0].rpartition("/")[2]
        if re.fullmatch(r"[a-z]\w*Foam", solver) and not is_open and is_several:
            what = f"without -parallel, each rank of {plain(solver)} computes the whole case"
            yield Problem(command.line, what, "add -parallel after its name", "warning")
            return


def _begins_again(subject: Subject) -> Iterator[Problem]:
    """Yields mdrun of GROMACS in a chain of jobs that does not read the checkpoint of the job before."""
    script = subject.script
    body = "\n".join(command.text for command in script.commands if command.name != "echo")
    in_turn = re.search(r"-\d+%1$", script.value("--array", "-J") or "")
    reads_index = re.search("ARRAY_(?:TASK_ID|INDEX)|ARRAYID", body)
    is_chain = (in_turn and not reads_index) or _SUBMITS_NEXT.search(body)
    if not is_chain or re.search(r"\s-cpi\b|grompp|convert-tpr|tpbconv", body):
        return
    for command in script.commands:
        name = command.words[command.words.index("-deffnm") + 1 :][:1] if "-deffnm" in command.words else ()
        if "mdrun" in command.text and name and "$" not in name[0]:
            what = "without -cpi, mdrun restarts the simulation from the beginning in each job"
            yield Problem(command.line, what, f"add -cpi {plain(name[0])}.cpt")
            return


def _memory_of_each_cpu(subject: Subject) -> Iterator[Problem]:
    """Yields the memory of a job that is given as that of each CPU."""
    script = subject.script
    memory = re.fullmatch(r"(?i)(\d{1,6})([gt])b?", script.value("--mem-per-cpu") or "")
    cpus = whole_number(script.value("--cpus-per-task")) or 1
    if memory is None:
        return
    total = int(memory[1]) * (1024 if memory[2] in "tT" else 1) * cpus
    if total >= 1024:
        what = f"--mem-per-cpu applies to each CPU of a task ({cpus}), so each task needs {total} GiB"
        remedy = f"write --mem={plain(memory[0])} if this is the memory for each node"
        severity: Severity = "warning" if total > 4096 else "note"
        yield Problem(subject.line_of("--mem-per-cpu"), what, remedy, severity)


def _index_of_script(subject: Subject, command: Command) -> int:
    """Returns the index of an interpreter that srun starts, if the script knows no ranks; else 0."""
    names = [word.rpartition("/")[2] for word in command.launched[:30]]
    words = [re.sub(r"[\d.]+$", "", name) for name in names[:1]] + names[1:]
    files = [word for word in command.launched[1:4] if re.fullmatch(r"[\w./-]+\.\w+", word)]
    texts = [(text_of(subject.directory / name) or b"") for name in files] if subject.directory else []
    texts.append(subject.script.text.encode(errors="replace"))
    is_other = command.name != "srun" or not files or requests_gpus(subject) or any(map(_RANKS.search, texts))
    return 0 if is_other or words[0] not in _INTERPRETERS else len(command.argv) - len(command.launched)


def _index_of_program(command: Command) -> int:
    """Returns the index of a program without MPI, if the launcher starts one, also in a container; else 0."""
    words = command.argv
    names = [word.rpartition("/")[2] for word in words[:30]]
    if command.name == "srun":
        first = len(words) - len(read_command(words[1:], of_srun=True)[1])
    else:
        is_option = [word.startswith("-") for word in words[:30]]
        own = (
            i
            for i, name in enumerate(names)
            if i and (name in _WITHOUT_MPI or not any(is_option[i - 1 : i + 1]))
        )
        first = next(own, len(names))
    end = len(names) if names[first : first + 1] and names[first] in _BEFORE else first + 1
    return next((i for i in range(first, min(end, len(names))) if names[i] in _WITHOUT_MPI), 0)
