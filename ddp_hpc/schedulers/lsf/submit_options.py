"""Translates the options of a job into options of bsub.

Source: IBM Spectrum LSF 10.1, Command Reference.
"""

from __future__ import annotations

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import (
    parse_array,
    parse_dependency,
    parse_mail_types,
    parse_memory,
    refuse_index_0,
    refuse_mail_types_of_slurm,
)

# Slurm's dependency types, and the corresponding conditions of bsub -w.
_CONDITIONS = {"after": "started", "afterok": "done", "afternotok": "exit", "afterany": "ended"}


def submit_options(job: Job) -> list[str]:
    """Returns the options of bsub."""
    found = []
    if job.mem:
        found.append(_memory(job.mem))
    if job.exclusive:
        found.append("-x")
    if job.constraint:
        found.append(f"-R select[{job.constraint}]")
    if job.reservation:
        found.append(f"-U {job.reservation}")
    if job.dependency:
        conditions = [
            f"{_CONDITIONS[kind]}({one})" for kind, jobs in parse_dependency(job.dependency) for one in jobs
        ]
        found.append(f"-w {'&&'.join(conditions)}")
    if job.mail_user:
        found.append(f"-u {job.mail_user}")
    return [*found, *_mail(job.mail_type)]


def array_of(job: Job) -> str:
    """Returns the indices that follow the name of the job, such as [1-4]; empty if it is not an array.

    Raises:
        RequestError: the array has the index 0.
    """
    if not job.array:
        return ""
    array = parse_array(job.array)
    refuse_index_0(array, "LSF")
    return f"[{array.text}]{f'%{array.limit}' if array.limit else ''}"


def _memory(text: str) -> str:
    if text == "0":
        raise RequestError(
            "--mem 0 was given, but LSF cannot request the whole memory of a host. Give a size, such as "
            "--mem 64G."
        )
    number, unit = parse_memory(text)
    # Without /host, the configuration of the cluster decides whether the memory is per job, host or slot.
    return f"-R rusage[mem={number}{unit}B/host]"


def _mail(text: str) -> list[str]:
    types = parse_mail_types(text) if text else ()
    refuse_mail_types_of_slurm(types, "LSF")
    begin = ["-B"] if {"BEGIN", "ALL"} & {*types} else []
    if {"END", "ALL"} & {*types}:
        return [*begin, "-N"]
    return [*begin, "-Ne"] if "FAIL" in types else begin
