"""Runs the checks of `ddp-hpc doctor` on this node, and prints lines or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, LaunchError
from ddp_hpc.discovery.world import discover, short_hostname
from ddp_hpc.doctor.check_result import STATUSES, Check, Here
from ddp_hpc.doctor.run_checks import run_checks


def run(checks: Sequence[Check], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Runs the checks and prints results to stdout and a summary to stderr; returns 1 if a check failed.

    In a job of several nodes, one rank per node runs the checks, and prints only problems.
    """
    here, local_rank = Here(environ), 0
    # A process for which the launcher's variables contradict each other checks its node like a single one.
    try:
        world = discover(environ, load_mpi=lambda _family, _title: None)
    except LaunchError:
        is_multi_node = False
    else:
        is_multi_node, local_rank = world.is_multi_node, world.local_rank
        num_nodes = world.num_nodes or (2 if is_multi_node else 1)
        here = Here(environ, num_nodes, is_rank=world.launcher != "single")
    if local_rank:
        return EXIT_DONE
    prefix = f"[{short_hostname()}] " if is_multi_node else ""
    results = []
    for result in run_checks(checks, here):
        results.append(result)
        if not as_json and (result.status != "ok" or not is_multi_node):
            click.echo(prefix + result.line)
    if as_json:
        rows = [asdict(result) for result in results]
        click.echo(json.dumps({"host": short_hostname(), "num_nodes": here.num_nodes, "results": rows}))
    statuses = [result.status for result in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES)
    click.echo(prefix + counts, err=True)
    return EXIT_FAILED if "fail" in statuses else EXIT_DONE
