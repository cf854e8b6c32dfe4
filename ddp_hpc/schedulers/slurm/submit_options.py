"""Translates the options of a job into options of sbatch.

Source: sbatch(1) of Slurm 22.05 and 24.05.
"""

from __future__ import annotations

from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import parse_mail_types, parse_memory


def submit_options(job: Job) -> list[str]:
    """Returns the options of sbatch, except the constraint, which the profile can set too."""
    options = []
    if job.mem:
        # 0 requests the whole memory of each node.
        options.append("--mem=0" if job.mem == "0" else "--mem={}{}".format(*parse_memory(job.mem)))
    if job.exclusive:
        options.append("--exclusive")
    if job.reservation:
        options.append(f"--reservation={job.reservation}")
    if job.dependency:
        options.append(f"--dependency={job.dependency}")
    if job.mail_user:
        options.append(f"--mail-user={job.mail_user}")
    if job.mail_type:
        options.append(f"--mail-type={','.join(parse_mail_types(job.mail_type))}")
    if job.array:
        options.append(f"--array={job.array}")
    return options
