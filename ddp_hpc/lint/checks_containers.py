"""Check of containers that hide the ranks or the GPUs of the job, or show those of other jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, takewhile

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import Start, starts

_RUNTIMES = ("singularity", "apptainer")
_CLEAN = ("-e", "--cleanenv", "-C", "--containall", "-eC", "-Ce")
_WITH_VALUE = re.compile("-[BHWoS]|--(?:bind|home|workdir|pwd|overlay|scratch)")
_MPI = re.compile(r"(?:.*/)?(?:mpirun|mpiexec|srun)")
_WITHOUT_QUOTES = re.compile(r"--gpus[= ]+\"?device=[\w-]+(?:,[\w-]+)+\"?(?:\s|$)")


@check("JOB039", "note", "a container that does not fit the ranks or the GPUs of the job")
def _container_and_job(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        if start.program in _RUNTIMES:
            yield from _ranks_of_container(subject, start)
        if start.program != "docker" or not subject.script.scheduler:
            continue
        text, line = start.command.text, start.command.line
        if match := _WITHOUT_QUOTES.search(text):
            what = f"docker takes the comma in {plain(match[0].strip())} for the end of the list"
            yield Problem(line, what, "write --gpus '\"device=0,1\"', with both quotes", "error")
        elif re.search(r"--gpus[= ]+[\"']?all\b", text) and (subject.gpus_per_node or 4) < 4:
            what = "the container is not in the job's cgroup, so --gpus all gives it all GPUs of the node"
            yield Problem(line, what, 'write --gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""', "note")


def _ranks_of_container(subject: Subject, start: Start) -> Iterator[Problem]:
    line = start.command.line
    inside = [word for word in start.words[1:] if _MPI.fullmatch(word)]
    is_local = re.search(r"fork|localhost|-launcher|-hosts?\b|-H\b|hostfile|machinefile", start.command.text)
    num_starts = (start.num_ranks or 1) if start.is_launched else 1
    if (
        inside
        and num_starts > 1
        and not is_local
        and not re.search(r"\s--?np?[ =]1\b", " ".join(start.words))
    ):
        what = (
            f"{start.command.name} starts {num_starts} containers, and {inside[0]} starts all ranks in each"
        )
        yield Problem(line, what, f"omit {inside[0]} and its options")
    elif inside and not start.is_launched and (subject.num_nodes or 1) > 1 and not is_local:
        what = f"{inside[0]} in the container cannot start ranks on the other nodes"
        yield Problem(line, what, f"start {inside[0]} outside, and the container once for each rank")
    verb = next((i for i, word in enumerate(start.words) if word in ("exec", "run")), 0)
    options = takewhile(
        lambda pair: pair[1][:1] == "-" or _WITH_VALUE.fullmatch(pair[0]), pairwise(start.words[verb:])
    )
    given = [word for _, word in options if word in _CLEAN]
    if given and verb and start.is_launched and (start.num_ranks or 1) > 1 and "--env" not in start.words:
        what = f"{given[0]} removes the variables with which a rank knows its number, such as PMI_RANK"
        yield Problem(line, what, f"remove {given[0]}, or pass on the variables", "note")
