"""Stand-in for `jsrun`: runs ranks in resource sets, with the variables of the job step manager (jsrun.1)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.launchers.options import RefusedError, Table, read_line, spellings
from ddp_hpc.rehearse.launchers.start_ranks import Step, places, run_step, spool_directory

_TABLE = Table(
    values=spellings(
        "nrs:n rs_per_host:r tasks_per_rs:a cpu_per_rs:c gpu_per_rs:g memory_per_rs:m bind:b np:p "
        "launch_distribution:d latency_priority:l smpiargs:M env:E stdio_mode:k"
    ),
    bare=spellings("immediate:i"),
    long_only=False,
    bad_option="jsrun: {what}",
    bad_number="jsrun: {text} is not a number for --{name}",
)


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Runs the ranks; returns the largest exit code.

    Raises:
        RefusedError: nothing was started.
    """
    line = read_line(argv, _TABLE)
    if "LSB_JOBID" not in environ or "CSM_ALLOCATION_ID" not in environ:
        raise RefusedError("jsrun: not in a job with whole nodes; request them with bsub -nnodes")
    if not line.command:
        raise RefusedError("jsrun: no program to run")
    num_hosts = len(set(Path(environ["LSB_DJOB_HOSTFILE"]).read_text().split())) - 1
    limits = Limits.read(root)
    believed = max(num_hosts, limits.requested_nodes)
    num_sets = line.number("nrs", 1)
    per_host = line.number("rs_per_host", -(-num_sets // believed))
    if num_sets > per_host * believed:
        raise RefusedError(f"jsrun: {num_sets} resource sets do not fit on {believed} hosts")
    tasks = line.number("tasks_per_rs", 1)
    base = limits.environment(environ)
    ranks = places(limits.counts(num_sets * tasks, per_host * tasks))
    environments = [
        {
            **base,
            "JSM_NAMESPACE_RANK": str(place.rank),
            "JSM_NAMESPACE_SIZE": str(len(ranks)),
            "JSM_NAMESPACE_LOCAL_RANK": str(place.local_rank),
            "JSM_NAMESPACE_LOCAL_SIZE": str(place.local_size),
        }
        for place in ranks
    ]
    step = Step(
        command=limits.command(line.command),
        environments=environments,
        report=_report,
        stop_on_failure=True,
        keep_pmi=False,  # jsrun supports only PMIx
        keeper_pid=limits.keeper_pid,
    )
    return run_step(spool_directory(root, "jsrun."), step)


def _report(rank: int, code: int) -> None:
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    sys.stderr.write(f"jsrun: rank {rank} ended with {how}\n")  # the wording is an assumption
