"""Check of the threads, GPUs and memory that a program would use, and that the job does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import Start, starts
from ddp_hpc.lint.parse_script import LAUNCH_COMMANDS
from ddp_hpc.schedulers.script_options import whole_number

_THREADS = re.compile(
    r"--?(?:num[-_]?threads?|n?threads?|cpus?|num[-_]cpus|ncpus|cores|n[-_]?cores|runThreadN)"
)
# Short options of programs for the number of threads.
_SHORT = {
    "samtools": ("-@",),
    "bwa": ("-t",),
    "bwa-mem2": ("-t",),
    "minimap2": ("-t",),
    "bowtie2": ("-p",),
    "hisat2": ("-p",),
    "fasterq-dump": ("-e",),
    "spades.py": ("-t",),
    "fastp": ("-w",),
    "flye": ("-t",),
    "trinity": ("--CPU",),
    "pigz": ("-p",),
}
# Programs whose numbers are those of other jobs or other machines.
_ELSEWHERE = ("snakemake", "nextflow", "sbatch", "qsub", "ray", "dask", "ssh", "docker", "podman")
_HEAP = re.compile(r"-Xmx(\d{1,6})([gGmM])")
_HOST = re.compile(r"[\w.-]+:\d+")
_UNITS = {"": 1, "m": 1, "g": 1024, "t": 1024 * 1024}


@check("JOB037", "warning", "a program that would use more than the job has")
def _more_than_the_job(subject: Subject) -> Iterator[Problem]:
    if subject.placeholder_lines:
        return
    cpus, memory = _num_cpus(subject), _memory_mib(subject)
    for start in starts(subject):
        line = start.command.line
        threads, option = _num_threads(start) if cpus else (0, "")
        if cpus and threads > cpus:
            what = f"{plain(option)} tells {plain(start.program)} to use {threads} threads, and "
            what += f"the job has {cpus} CPU{'s' * (cpus > 1)}"
            is_double = threads == 2 * cpus  # both hardware threads of each core
            yield Problem(line, what, f"request {threads} CPUs", "note" if is_double else None)
        heap = _HEAP.search(start.command.text) if memory else None
        if heap and memory and int(heap[1]) * _UNITS[heap[2].lower()] > memory:
            what = f"{heap[0]} is more memory than the {memory} MiB of the job"
            yield Problem(line, what, "request more, or make the heap of Java smaller than the request")
        if "vllm" in start.command.text or "deepspeed" in start.command.text:
            yield from _gpus_of_program(subject, start)
        yield from _hosts_of_horovod(start)


def _num_cpus(subject: Subject) -> int | None:
    """Returns the CPUs on which a program in the batch shell can run; None if they are unknown."""
    script = subject.script
    is_open = script.value("--exclusive", "--cpus-per-gpu", "--mincpus", "--ntasks-per-core") is not None
    if subject.scheduler.reader.requests_by_resources:
        chunk = [value for _, name, value in script.resources() if name == "select"]
        found = re.fullmatch(r"1:(?:.*:)?ncpus=(\d{1,4})\b[^+]*", chunk[0]) if len(chunk) == 1 else None
        return int(found[1]) if found else None
    if is_open or subject.site:
        return None
    per_task = whole_number(script.value("--cpus-per-task") or "")
    tasks = [whole_number(script.value(flag) or "1") for flag in ("--ntasks", "--ntasks-per-node")]
    if per_task is None or None in tasks:
        return None
    return per_task * max(number for number in tasks if number is not None)


def _memory_mib(subject: Subject) -> int | None:
    """Returns the memory of a job of Slurm on each of its nodes; None if it is unknown."""
    script = subject.script
    given = re.fullmatch(r"(\d{1,7})([MGT]?)B?", script.value("--mem") or "", re.IGNORECASE)
    if given is None or script.value("--mem-per-cpu", "--mem-per-gpu"):
        return None
    return int(given[1]) * _UNITS[given[2].lower()] or None


def _num_threads(start: Start) -> tuple[int, str]:
    """Returns the number of threads of a program, and their option; 0 if there is none."""
    name = start.program.lower()
    if (
        name.startswith("-")
        or name in (*_ELSEWHERE, *LAUNCH_COMMANDS)
        or start.command.name in ("echo", "printf", "ssh", *_ELSEWHERE)
    ):
        return 0, ""
    words = start.words[1:]
    for word, following in zip(words, (*words[1:], ""), strict=False):
        flag, equals, value = word.partition("=")
        short = next((s for s in _SHORT.get(name, ()) if re.fullmatch(rf"{s}\d+", word)), "")
        if short:
            return int(word[len(short) :]), word
        if _THREADS.fullmatch(flag) or flag in _SHORT.get(name, ()):
            number = whole_number(start.subject.value_of(value if equals else following))
            return number or 0, flag
    return 0, ""


def _gpus_of_program(subject: Subject, start: Start) -> Iterator[Problem]:
    gpus, line = subject.gpus_per_node, start.command.line
    total = gpus * (subject.num_nodes or 1) if gpus else None
    total = total or whole_number((subject.script.value("--gpus") or "").rpartition(":")[2])
    if "vllm" in start.command.text:
        wanted = math.prod(_value_after(start, f"{one}-parallel-size") or 1 for one in ("tensor", "pipeline"))
        if total and wanted > total:
            what = f"vLLM needs {wanted} GPUs, and the job has {total}"
            remedy = f"request {wanted} GPUs, or use --tensor-parallel-size {total}"
            yield Problem(line, what, remedy, "error")
    given = whole_number(start.options_of("deepspeed").get("num-gpus"))
    if given and gpus and given > gpus:
        what = f"deepspeed --num_gpus={given} is the number for each node, and a node has {gpus}"
        yield Problem(line, what, f"use --num_gpus={gpus}", "error")


def _value_after(start: Start, option: str) -> int | None:
    for word, following in zip(start.words, (*start.words[1:], ""), strict=False):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag == f"--{option}":
            return whole_number(start.subject.value_of(value if equals else following))
    return None


def _hosts_of_horovod(start: Start) -> Iterator[Problem]:
    if start.command.name != "horovodrun":
        return
    words = start.words
    index = next((i for i, word in enumerate(words) if word in ("-H", "--hosts")), len(words))
    hosts, after = words[index + 1 : index + 2], words[index + 2 : index + 3]
    if hosts and after and _HOST.fullmatch(after[0]):
        what = f"horovodrun takes {plain(after[0])} for the program, because hosts are separated by commas"
        yield Problem(start.command.line, what, f"write {plain(hosts[0])},{plain(after[0])}", "error")
    elif hosts and re.fullmatch(r"[\w.,:-]+", hosts[0]):
        slots = sum(int(host.partition(":")[2] or 1) for host in hosts[0].split(","))
        ranks = whole_number(next((b for a, b in pairwise(words) if a == "-np"), ""))
        if ranks and ranks > slots:
            what = f"horovodrun starts {ranks} ranks, and {plain(hosts[0])} has {slots}"
            yield Problem(start.command.line, f"{what} slot{'s' * (slots > 1)}", "write HOST:SLOTS", "error")
