"""Checks of what a program would use, and that the job does not have, and of commands of other schedulers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.blocks import asks_where
from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, plain, table
from ddp_hpc.lint.launch_commands import Start, requests_gpus, starts
from ddp_hpc.lint.parse_script import LAUNCH_COMMANDS, Command, Script
from ddp_hpc.lint.placeholders import is_template
from ddp_hpc.schedulers.registry import MONITORED
from ddp_hpc.schedulers.script_options import ScriptOptions, whole_number
from ddp_hpc.schedulers.slurm.parse_directives import read_command

# Programs, and their options for the number of threads; the last ones have this meaning in any program.
_THREADS = re.compile(
    r"(?:samtools -@|(?:bwa|bwa-mem2|minimap2|spades\.py|flye) -t|(?:bowtie2|hisat2|pigz) -p|fastp -w|"
    r"trinity --CPU|\S+ --?(?:num-?threads?|n?threads?|cpus?|num-cpus|ncpus|n-?cores|runThreadN))(\d*)"
)
_MOST_THREADS = {"fastp": 16}  # it uses no more, and says so
# Programs whose numbers are those of other jobs or other machines.
_ELSEWHERE = re.compile("snakemake|nextflow|sbatch|qsub|ray|dask|ssh|docker|podman|echo|printf")
# Threads that wait for the network, and CPUs of other jobs.
_OF_OTHER_CPUS = re.compile(r"(?i:download|submit)\w*\.(?:py|sh|R|pl)\b|\s--(?:partition|walltime|queue)\b")
# Programs with one thread by default, what must follow them, and their options for the number of threads.
ONE_THREAD = {
    name: (verb, options)
    for names, verb, options in table(r"""
bowtie2 bowtie hisat2 @ @ -p|--threads
bwa bwa-mem2 @ mem|aln @ -t
samtools @ sort @ -@|--threads
STAR @ @ --runThreadN
blastn blastp blastx tblastn tblastx psiblast @ @ -num_threads
cutadapt trim_galore @ @ -j|--cores
kraken2 @ @ --threads
kallisto @ quant @ -t|--threads
featureCounts @ @ -T
mafft @ @ --thread
iqtree iqtree2 @ @ -nt|-T|--threads
flye hifiasm @ @ -t|--threads
""")
    for name in names.split()
}
_ONLY_IF = {
    "trim_galore": ", which Trim Galore has since 0.6.0",
    "cutadapt": ", which cutadapt has since 1.15",
    "samtools": " if the job has the memory of -m (768M by default) for each thread",
}
_USES_CPUS = re.compile(
    r"(?i)thread|cpu|core|proc|slots|parallel|xargs|\s-@|\s-[jptPw][ =]?[\d$\"]|"
    r"mpi|\bopt|_args|params?\b|parametersF|flag"
)
# The same options and those for jobs, in a job step. srun does not bind its task to CPUs with the others.
_OF_STEP = re.compile(
    r"\s(-[ptj@]|--(?:n?threads|num[-_](?:threads|cpus)|cores|jobs|cpus))[= ]?\"?"
    r"(\d{1,3}|\$\{?SLURM_CPUS_PER_TASK\}?)(?=[\s\"']|$)"
)
_OTHER_CPUS = re.compile(r"--(?:cpu-bind|cpus-per-gpu|jobid|het-group|overlap|exclusive)|unknown|ambiguous")
# Commands that use no more than one CPU, and containers, whose programs are judged.
IS_LIGHT = re.compile(
    r"|module|ml|source|\.|export|cd|mkdir|echo|printf|date|rm|cp|mv|ln|cat|gzip|gunzip|zcat|awk|gawk|sed|grep|sort|"
    r"uniq|cut|head|tail|wc|ls|set|unset|conda|mamba|hostname|pwd|sleep|time|for|done|fi|esac|case|while|\[+|test|exit|"
    r"samtools|bcftools|bedtools|bowtie2?-build|\S*-build|tar|unzip|mkfifo|basename|dirname|local|ulimit|shopt|read|"
    r"singularity|apptainer|touch|wget|curl|chmod|rsync|env|eval|function|\{|\}|true|false|continue|break"
)
# Options for memory: of STAR in bytes, of Java, and a variable of Gaussian.
_LIMITS = re.compile(
    r"(--limit(?:GenomeGenerate|BAMsort)RAM(?=\s)|-Xmx(?!=)|\bGAUSS_MDEF(?==))[\s=\"']*(\d+[kmgtKMGT]?[bB]?)\b"
)
# What may use the CPUs of a task without OpenMP, and what names them in options of srun.
_OTHER_THREADS = re.compile(
    r"(?i)python|\bR(?:script)?\b|julia|matlab|java|thread|cpu|core|worker|parallel|proc|\s-n?[tj]\b|\b(?:ba)?sh\b|singularity|apptainer"
)
_OF_SRUN = re.compile(r"--cpus-per-task\S*|--cpu[-_]bind\S*|\$\{?SLURM_\w+|=cores\b")
_OF_LSF = ("jsrun", "bsub")


@check("JOB037", "warning", "a program that would use more than the job has")
def _more_than_the_job(subject: Subject) -> Iterator[Problem]:
    cpus, gpus = _num_cpus(subject), subject.gpus_per_node
    total = subject.total_gpus or (gpus or 0) * (subject.num_nodes or 1)
    of_part = 0 if _has_node_of_pbs(subject.script) else cpus
    for start in starts(subject) if not subject.placeholder_lines else ():
        line = start.command.line
        parts = [start.given(f"--{one}-parallel-size") for one in ("tensor", "pipeline")]
        wanted = math.prod(whole_number(part) or 1 for part in parts) if "vllm" in start.command.text else 0
        if 0 < total < wanted:
            what = f"vLLM needs {wanted} GPUs, and the job has {total}"
            yield Problem(line, what, f"request {wanted}, or lower the parallel sizes", "error")
        of_node = whole_number(start.options_of("deepspeed").get("--num-gpus"))
        if of_node and gpus and of_node > gpus:
            what = f"deepspeed --num_gpus={of_node} is the number for each node, and a node has {gpus}"
            yield Problem(line, what, f"request {of_node} GPUs per node, or use --num_gpus={gpus}", "error")
        is_mdrun = start.words[:2] == ("gmx", "mdrun") and (gpus or 1) > 1 and not start.is_launched
        if is_mdrun and {"-ntomp", "-ntmpi", "-nt", "-gpu-id"} & {*start.options} == {"-ntomp"}:
            what = f"with {gpus} GPUs, mdrun rejects -ntomp without -ntmpi"
            yield Problem(line, what, f"add -ntmpi {gpus}, and -npme 1 with -pme gpu", "note")
        kokkos = re.search(r"\s-k(?:okkos)?\s+on\s+g(?:pus)?\s+(\d{1,2})\s", start.command.text)
        own_gpu = re.search("gpus-per-task|gpu-bind", subject.script.text)
        if kokkos and gpus and gpus != int(kokkos[1]) and (subject.ranks_per_node or 1) > 1 and not own_gpu:
            what = f"Kokkos uses {counted(int(kokkos[1]), 'GPU')} of each node for all ranks, and a node has"
            yield Problem(line, f"{what} {gpus}", f"write g {gpus}", "note")
        for option, threads in threads_of(start) if of_part else ():
            if threads > cpus:
                what = f"with {plain(option)}, the program uses {threads} threads, and the job has"
                # A core may have two hardware threads, and helper threads may be idle.
                severity: Severity | None = "note" if threads <= 2 * cpus else None
                yield Problem(
                    line, f"{what} {counted(cpus, 'CPU')}", f"request {threads} CPUs, or use {cpus}", severity
                )
    for command, option, threads, own in threads_of_steps(subject):
        if own and own < threads and option.startswith("--"):
            what = f"{plain(option)} tells the program to use {threads} CPUs, and srun gives it {own}"
            yield Problem(command.line, what, f"use srun --cpus-per-task={threads}", "note")
    if not subject.placeholder_lines and not is_template(subject.script):
        yield from _orca(subject)
        yield from _memory(subject)
        yield from _one_thread(subject, cpus) if cpus > 1 else ()
        yield from _one_thread_of_openmp(subject)


# What these start does not run in this job.
_RUN_ELSEWHERE = ("echo", "printf", "sbatch", "qsub", "ssh", "alias")


def _memory(subject: Subject) -> Iterator[Problem]:
    """Yields a program that is allowed all memory of the job, or more."""
    given = [(name, value) for _, name, value in subject.scheduler.reader.memory(subject.script)]
    name, value = given[-1] if len(given) == 1 else ("", "")
    has = _bytes(value) * {"--mem": 1, "mem": 1, "--mem-per-cpu": _num_cpus(subject)}.get(name, 0)
    if not has or re.search("#SBATCH (?:het|pack)job", subject.script.text):
        return
    unread = _unread_variables(subject.script)
    commands = (c for c in subject.script.commands if c.name not in _RUN_ELSEWHERE)
    for line, text in [(c.line, c.text) for c in commands if c.argv or c.line not in unread]:
        found = [(option, _bytes(size, 1)) for option, size in _LIMITS.findall(text)]
        if sort := re.search(r"\bsamtools\s+sort\s[^|;]*", text):
            of_each, threads = (re.search(rf"\s{o}\s?(\S+)", sort[0]) for o in ("-m", "(?:-@|--threads)"))
            number = whole_number(subject.value_of(threads[1])) if threads else 1
            found += [("samtools sort", _bytes(of_each[1], 1) * (number or 0))] if of_each else []
        for option, size in [one for one in found if one[1] >= has][:1]:
            what = f"{option} may use {size / 2**30:.3g} GiB, and the job has {has / 2**30:.3g} GiB"
            # Many programs never use all that they are allowed, and chunks on one node share their memory.
            is_shared = subject.uses_chunks and "scatter" not in subject.script.text
            may_fit = size == has or (is_shared and size <= has * (subject.num_nodes or 1))
            severity: Severity | None = "note" if may_fit else None
            yield Problem(line, what, "request more memory, or allow the program less", severity)
            return


def _unread_variables(script: Script) -> set[int]:
    """Returns the lines of variables that are not exported, and that no command of the script reads."""
    exported, text = {name for _, name, _ in script.exports}, script.text
    return {
        line
        for line, name, _ in script.assignments
        if name not in exported and f"${name}" not in text and f"${{{name}" not in text
    }


def _orca(subject: Subject) -> Iterator[Problem]:
    """Yields ORCA with more processes than the job has tasks, or without the full path if it is parallel."""
    tasks = whole_number(subject.value_of("$SLURM_NTASKS")) or subject.ranks_per_node or 1
    starts_orca = next((c for c in subject.script.commands if re.match(r"orca\s[^#|]*\.inp\b", c.text)), None)
    wanted = re.search(r"(?im)^[ \t]*(?:%pal\s+nprocs\s+|![^\n]*\bPAL)(\d{1,4})\b", subject.script.text)
    is_orca = "orca" in subject.script.text.lower() and not subject.scheduler.reader.requests_by_resources
    if wanted and int(wanted[1]) > tasks and subject.script.read() and is_orca:
        what = f"ORCA starts {wanted[1]} processes with mpirun, which has a slot for each task ({tasks})"
        line = subject.script.text.count("\n", 0, wanted.start(1)) + 1
        yield Problem(line, what, f"use --ntasks={wanted[1]} and --cpus-per-task=1", "note")
    is_own = re.search(r"(?m)^[ \t]*(?:alias orca=|(?:function\s+)?orca\s*\(\))", subject.script.text)
    is_parallel = int(wanted[1]) > 1 if wanted else subject.has_many_tasks
    if starts_orca and is_parallel and not is_own:
        what = "to run in parallel, ORCA must be started with its full path"
        yield Problem(starts_orca.line, what, 'write "$(command -v orca)" instead of orca', "note")


def _bytes(text: str, unit: int = 2**20) -> int:
    """Returns a size in bytes; 0 if it is unknown."""
    size = re.fullmatch(r"(\d{1,15})([kmgt]?)b?", text.lower())
    return int(size[1]) * (1024 ** ("kmgt".index(size[2]) + 1) if size[2] else unit) if size else 0


def _one_thread_of_openmp(subject: Subject) -> Iterator[Problem]:
    """Yields OMP_NUM_THREADS=1 for compiled programs with MPI whose tasks have several CPUs."""
    script, cpus = subject.script, whole_number(subject.script.value("--cpus-per-task")) or 1
    lines = [line for line, name, _ in script.exports if name == "OMP_NUM_THREADS"]
    is_one = script.set_once.get("OMP_NUM_THREADS") == "1" and len(lines) == 1 and not requests_gpus(subject)
    works = [c for c in script.commands if not IS_LIGHT.fullmatch(c.name)]
    body = "\n".join(_OF_SRUN.sub("", command.text) for command in works)
    is_mpi = bool(works) and {command.name for command in works} == {"srun"} and subject.has_many_tasks
    if cpus > 2 and is_one and is_mpi and not _OTHER_THREADS.search(body):
        what = f"each task has {cpus} CPUs, and OpenMP uses one of them"
        remedy = "use OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK, or request one CPU per task"
        yield Problem(lines[0], what, remedy, "note")


def threads_of(start: Start) -> Iterator[tuple[str, int]]:
    """Yields the options that tell a program how many threads to use, and these numbers."""
    name = start.program.lower()
    is_here = name[:1] != "-" and not any(map(_ELSEWHERE.fullmatch, (name, start.command.name)))
    # Pilon ignores --threads, and those of CUDA are not of CPUs.
    is_here &= not re.search("pilon|cuda", start.command.text) and not _OF_OTHER_CPUS.search(
        start.command.text
    )
    for option in start.options if is_here and name not in LAUNCH_COMMANDS else ():
        match = _THREADS.fullmatch(f"{name} {option}")
        if match and (threads := whole_number(match[1] or start.given(option) or "")):
            yield option, min(threads, _MOST_THREADS.get(name, threads))


def threads_of_steps(subject: Subject) -> Iterator[tuple[Command, str, int, int | None]]:
    """Yields each job step of one task whose program has an option for several threads.

    These are the option, the number of threads, and the CPUs that srun requests; None if it requests none.
    """
    for command in (c for c in subject.script.launches("srun") if _OF_STEP.search(c.text)):
        given, words = read_command(command.argv[1:], of_srun=True)
        flags = {d.fault or d.flag: d.value for d in given}
        found = None if any(map(_OTHER_CPUS.fullmatch, flags)) else _OF_STEP.search(" ".join(words))
        is_program = bool(words) and words[0] != "ssh" and words[0][:1] not in ("$", ":", "")
        number = whole_number(subject.value_of(found[2])) if found and is_program else None
        tasks, cpus = flags.get("--ntasks", "1"), flags.get("--cpus-per-task")
        is_one = tasks == "1" and ("--ntasks" in flags or not subject.has_many_tasks)
        if found and number and number > 1 and is_one:
            own = None if cpus is None else whole_number(subject.value_of(cpus)) or number
            yield command, found[1], number, own


def _one_thread(subject: Subject, cpus: int) -> Iterator[Problem]:
    """Yields a program with one thread in a job with one task of several CPUs, which nothing else uses."""
    script = subject.script
    tasks = {script.value("--ntasks"), script.value("--ntasks-per-node")}
    body = "\n".join(command.text for command in script.commands)
    if tasks - {None, "1"} or _USES_CPUS.search(body) or any(c.ends == "&" for c in script.commands):
        return
    others = {command.name for command in script.commands if not IS_LIGHT.fullmatch(command.name)}
    if not others <= {name.lower() for name in ONE_THREAD}:
        return
    for command in script.commands:
        names = [word.rpartition("/")[2] for word in command.argv[:12]]
        found = next((i for i, name in enumerate(names) if name in ONE_THREAD), -1)
        verb, options = ONE_THREAD.get(names[found], ("", "")) if found >= 0 else ("", "")
        own = command.argv[found + 1 :]
        if not options or not re.fullmatch(verb, own[0] if own and verb else "") or len(own) < 2:
            continue
        # The servers of NCBI search, or only one thread does.
        if not {"-remote", "-subject", "--version", "--help"}.isdisjoint(own):
            continue
        if not any(re.fullmatch(rf"(?:{options})(?:=.*|\d+)?", word) for word in own):
            name, option = f"{names[found]} {own[0]}" if verb else names[found], options.partition("|")[0]
            what = f"{plain(name)} uses one thread without {option}, and the job has {cpus} CPUs"
            number = min(cpus, 8) if name == "trim_galore" else cpus
            remedy = f"request one CPU, or add {option} {number}{_ONLY_IF.get(names[found], '')}"
            # With --mem-per-cpu, the CPUs may be requested for their memory.
            yield Problem(command.line, what, remedy, "note" if script.value("--mem-per-cpu") else None)
            return


def _cpus_of_chunk(script: ScriptOptions) -> int:
    """Returns the CPUs of the only chunk of a job of PBS or Torque; 0 if there are several."""
    given = {name: value for _, name, value in script.resources()}
    name, form = ("select", "ncpus") if "select" in given else ("nodes", "ppn")
    found = re.fullmatch(rf"1:(?:.*:)?{form}=(\d{{1,4}})\b[^+]*", given.get(name, ""))
    times = sum(one == name for _, one, _ in script.resources())
    return int(found[1]) if found and times == 1 else 0


def _has_node_of_pbs(script: ScriptOptions) -> bool:
    """Returns whether a job of PBS or Torque has its node for itself, whose CPUs are not in the request."""
    policies = [d.value.lower() for d in script.read() if "naccesspolicy" in d.value.lower()]
    places = [value for _, name, value in script.resources() if name == "place"]
    is_single = any("single" in value for value in policies) or any("excl" in value for value in places)
    return is_single or any(d.flag == "-n" and not d.value for d in script.read())


def _num_cpus(subject: Subject) -> int:
    """Returns the CPUs on which a program in the batch shell can run; 0 if they are unknown."""
    script = subject.script
    if subject.scheduler.reader.requests_by_resources:
        return _cpus_of_chunk(script)
    others = ("--exclusive", "--cpus-per-gpu", "--mincpus", "--ntasks-per-core")
    per_task = whole_number(script.value("--cpus-per-task") or "")
    tasks = [whole_number(script.value(flag) or "1") or 0 for flag in ("--ntasks", "--ntasks-per-node")]
    is_unknown = subject.known_site or not per_task or not all(tasks) or script.value(*others) is not None
    is_unknown = is_unknown or bool(re.search("(?m)^#SBATCH (?:het|pack)job", script.text))
    return 0 if is_unknown or not per_task else per_task * max(tasks)


@check("JOB038", "warning", "a command of another scheduler")
def _command_of_another(subject: Subject) -> Iterator[Problem]:
    script, title, own = subject.script, subject.scheduler.title, subject.scheduler.reader.own_commands
    others = {*_OF_LSF, *(name for one in MONITORED.values() for name in one.reader.own_commands)} - {*own}
    # The script may ask which scheduler runs it, or define the command.
    is_for_several = len({d.scheduler for d in script.directives}) > 1 or "LSB_JOBID" in script.text
    is_for_several |= asks_where(script)
    for command in script.commands if own and not is_for_several and not is_template(script) else ():
        name = command.name
        if name in others and command.argv[0][0] != "$" and not re.search(rf"\b{name} ?\(", script.text):
            remedy = f"use {'mpiexec' if name in LAUNCH_COMMANDS else f'a command of {title}'}"
            yield Problem(command.line, f"{name} does not belong to {title}", remedy)
            return
