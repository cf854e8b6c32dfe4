"""Runs the checks of `ddp-hpc doctor` on this machine or on the nodes of a job, and prints lines or JSON."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.doctor.check_result import STATUSES, Check, Here, Result
from ddp_hpc.doctor.compare_nodes import differences, exchange_result
from ddp_hpc.doctor.node_exchange import LINGER_S, Place, answer, ask, exchange_directory, gather, place_of
from ddp_hpc.doctor.run_checks import run_checks
from ddp_hpc.doctor.run_in_child import NoAnswer, collect, start

_SPARE_S = 15.0  # additional time for a slow file system
_OPEN_LIMIT_S = 30.0


@dataclass(frozen=True)
class Options:
    """The options of `ddp-hpc doctor`."""

    checks: Sequence[Check]
    as_json: bool
    shared: str | None
    wait_s: float


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Runs the checks and prints results to stdout and a summary to stderr; returns 1 if a check failed.

    In a job of several nodes, one rank per node runs the checks, and the first node prints the results.
    """
    place = place_of(environ)
    if place is None or place.num_nodes == 1 or place.node_rank is None:
        local_rank = place.local_rank if place else 0
        return EXIT_DONE if local_rank else _one_node(options, environ, place)
    if place.local_rank:
        return EXIT_DONE
    shared = options.shared or environ.get("DDP_HPC_RUN_DIR") or "."
    directory = exchange_directory(Path(os.path.abspath(shared)), place)  # noqa: PTH100 - no file access
    here = _here(environ, place)
    if place.node_rank == 0:
        return _first_node(options, here, place, directory)
    return _other_node(options, here, place, place.node_rank, directory)


def _here(environ: Mapping[str, str], place: Place | None) -> Here:
    if place is None:
        return Here(environ)
    return Here(environ, Path(), place.num_nodes, place.local_size, is_rank=True)


def _one_node(options: Options, environ: Mapping[str, str], place: Place | None) -> int:
    several = place is not None and place.num_nodes > 1
    prefix = f"[{short_hostname()}] " if several else ""
    if several:
        click.echo(f"{prefix}the node rank is unknown, so each node prints its own results", err=True)
    results: list[Result] = []
    for result in run_checks(options.checks, _here(environ, place)):
        results.append(result)
        if not options.as_json:
            click.echo(prefix + result.line)
    if options.as_json:
        click.echo(json.dumps({"host": short_hostname(), "num_nodes": 1, "results": _plain(results)}))
    return _sum_up(results, prefix)


def _first_node(options: Options, here: Here, place: Place, directory: Path) -> int:
    run_id = secrets.token_hex(8)
    others: dict[int, list[Result]] | NoAnswer = collect(
        start(partial(ask, directory, run_id), _OPEN_LIMIT_S)
    )
    own = list(run_checks(options.checks, here))
    if not isinstance(others, NoAnswer):
        work = partial(gather, directory, run_id, place, options.wait_s)
        others = collect(start(work, options.wait_s + _SPARE_S))
    if isinstance(others, NoAnswer):
        what = f"{place.label(0)} cannot exchange files in {directory.parent}: {others.reason}"
        remedy = "use a directory that all nodes share: --shared DIR"
        exchange, others = Result("shared-folder", "fail", what, remedy), {}
    else:
        exchange = exchange_result(others, place, str(directory.parent), options.wait_s)
    by_node = {place.label(0): own}
    by_node |= {place.label(node): others[node] for node in sorted(others)}
    shown = [exchange, *differences(by_node)]
    if options.as_json:
        nodes = {node: _plain(results) for node, results in by_node.items()}
        document = {"host": short_hostname(), "num_nodes": place.num_nodes, "results": _plain(shown)}
        click.echo(json.dumps(document | {"nodes": nodes}))
    else:
        for result in shown:
            click.echo(result.line)
    nodes_text = f"{len(by_node)} of {place.num_nodes} nodes"
    return _sum_up(shown, f"{nodes_text}, {len(own)} checks per node; differences: ")


def _other_node(options: Options, here: Here, place: Place, node_rank: int, directory: Path) -> int:
    results = list(run_checks(options.checks, here))
    work = partial(answer, directory, node_rank, results, options.wait_s)
    answered = collect(start(work, 2 * options.wait_s + LINGER_S + _SPARE_S))
    if answered is True:
        return EXIT_DONE
    reason = answered.reason if isinstance(answered, NoAnswer) else f"waited {options.wait_s:g} s"
    first = place.label(0)
    click.echo(
        f"[{place.label(node_rank)}] error: found no file of {first} in {directory.parent} ({reason}). "
        f"Use a directory that all nodes share (--shared DIR), and start doctor on {first} too.",
        err=True,
    )
    return EXIT_FAILED


def _sum_up(results: Iterable[Result], prefix: str) -> int:
    statuses = [result.status for result in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES)
    click.echo(prefix + counts, err=True)
    return EXIT_FAILED if "fail" in statuses else EXIT_DONE


def _plain(results: Iterable[Result]) -> list[dict[str, str]]:
    return [{"name": r.name, "status": r.status, "what": r.what, "remedy": r.remedy} for r in results]
