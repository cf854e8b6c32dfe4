"""Whether a job needs little memory, as far as its script shows it."""

from __future__ import annotations

import re

from ddp_hpc.lint.check_registry import Subject
from ddp_hpc.schedulers.script_options import whole_number

_LITTLE_MEMORY = re.compile(
    r"(?:/bin/)?(?:echo|hostname|sleep|date|printf|pwd|cd|ls|module|export|env|uname|sbatch|exit|set|wait|done|fi)"
)
_INTERPRETER = re.compile(
    r"\b(?:python[\d.]*|Rscript|R|julia|matlab|java|conda|nextflow|snakemake)\b|\.(?:py|R)\b"
)


def needs_little_memory(subject: Subject, name: str, megabytes: int) -> bool:
    """Returns whether so few megabytes may be meant, as in a short job without an interpreter."""
    programs = [words for c in subject.script.commands if (words := c.launched or c.argv)]
    if all(_LITTLE_MEMORY.fullmatch(words[0]) for words in programs):
        return True
    tasks = subject.ranks_per_node or whole_number(subject.script.value("--ntasks")) or 1
    cpus = tasks * (subject.scheduler.reader.cpus_per_rank(subject.script) or 1)
    of_node = megabytes * (cpus if name == "--mem-per-cpu" else 1)
    is_interpreted = any(_INTERPRETER.search(" ".join(words[:9])) for words in programs)
    return of_node >= 64 and not is_interpreted and (subject.walltime_s or 0) < 12 * 3600
