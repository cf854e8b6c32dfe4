"""Translates the options of a job into options of qsub.

Sources: qsub.1B and pbs_resources.7B, OpenPBS 23.06.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import mail_points, one_range, parse_mail_types, parse_memory

LACKS = {
    "constraint": "PBS has no constraints; it selects nodes by resources of a chunk, such as gpu_type=a100. "
    "Add them to `resources` in a profile of your own (ddp-hpc profiles show).",
    "reservation": "PBS provides a reservation as a queue. Use --queue, such as --queue R123.",
}


def submit_options(job: Job) -> list[str]:
    """Returns the options of qsub, except the memory, which is a resource of the chunks."""
    options = []
    if job.exclusive:
        # A host can consist of several vnodes; `excl` would reserve only those that the job uses.
        options.append("-l place=scatter:exclhost")
    if job.dependency:
        options.append(f"-W depend={job.dependency}")
    if job.mail_user:
        options.append(f"-M {job.mail_user}")
    if job.mail_type:
        options.append(f"-m {mail_points(parse_mail_types(job.mail_type), 'PBS')}")
    if job.array:
        array = one_range(job.array, "PBS")
        options.append(f"-J {array.text}{f'%{array.limit}' if array.limit else ''}")
    return options


def with_memory(resources: Sequence[str], job: Job) -> list[str]:
    """Returns the values of `-l`, to which the memory per node (--mem) is added.

    Raises:
        RequestError: PBS cannot reserve this memory per node.
    """
    if job.mem == "0":
        raise RequestError(
            "--mem 0 was given, but PBS cannot request the whole memory of a node. Give a size, such as "
            "--mem 64G."
        )
    number, unit = parse_memory(job.mem)
    requests = []
    for text in resources:
        chunk = re.fullmatch(r"select=([0-9]+)((?::[^:+]+)*)", text)
        if chunk and int(chunk[1]) == job.num_nodes:
            others = re.sub(r":mem=[^:]*", "", chunk[2])
            requests.append(f"select={chunk[1]}{others}:mem={number}{unit.lower()}b")
        elif text.startswith("mem="):  # without chunks, mem is the memory of the whole job
            requests.append(f"mem={number * job.num_nodes}{unit.lower()}b")
        else:
            requests.append(text)
    if requests == list(resources) and not any(f":mem={number}{unit.lower()}b" in text for text in requests):
        raise RequestError(
            f"--mem {job.mem} was given, but this profile does not request one chunk per node, so the memory "
            "per node cannot be set. Set mem in `resources` of a profile of your own."
        )
    return requests
