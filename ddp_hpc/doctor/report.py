"""`ddp-hpc doctor`: the checks on this machine or on the nodes of a job, as lines or as JSON."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp_hpc.doctor.child import Gone, collect, start
from ddp_hpc.doctor.compare import differences, meeting_results
from ddp_hpc.doctor.nodes import LINGER_S, Answers, Place, answer, ask, gather, meeting_folder, place_of
from ddp_hpc.doctor.result import STATUSES, Check, Here, Result
from ddp_hpc.doctor.run import run_checks
from ddp_hpc.errors import EXIT_DONE, EXIT_FAILED
from ddp_hpc.world.topology import short_hostname

_SPARE_S = 15.0  # beyond the wait itself, for a slow file system
_OPEN_LIMIT_S = 30.0


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    checks: Sequence[Check]
    as_json: bool
    shared: str | None
    wait_s: float


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Runs the checks and prints them to stdout, the sum-up to stderr; the exit code is 1 where one failed.

    In a job of several nodes one rank a node works, and the first node prints.
    """
    place = place_of(environ)
    if place is None or place.num_nodes == 1 or place.node_rank is None:
        local_rank = place.local_rank if place else 0
        return EXIT_DONE if local_rank else _one_node(options, environ, place)
    if place.local_rank:
        return EXIT_DONE
    shared = options.shared or environ.get("DDP_HPC_RUN_DIR") or "."
    folder = meeting_folder(Path(os.path.abspath(shared)), place)  # noqa: PTH100 - asks no file system
    here = _here(environ, place)
    if place.node_rank == 0:
        return _first_node(options, here, place, folder)
    return _other_node(options, here, place, place.node_rank, folder)


def _here(environ: Mapping[str, str], place: Place | None) -> Here:
    if place is None:
        return Here(environ)
    return Here(environ, Path(), place.num_nodes, place.local_size, is_rank=True)


def _one_node(options: Options, environ: Mapping[str, str], place: Place | None) -> int:
    several = place is not None and place.num_nodes > 1
    prefix = f"[{short_hostname()}] " if several else ""
    if several:
        _say(f"{prefix}no variable tells which node this is: each node speaks for itself")
    results: list[Result] = []
    for result in run_checks(options.checks, _here(environ, place)):
        results.append(result)
        if not options.as_json:
            _print(prefix + result.line)
    if options.as_json:
        _print(json.dumps({"host": short_hostname(), "num_nodes": 1, "results": _plain(results)}))
    return _sum_up(results, prefix)


def _first_node(options: Options, here: Here, place: Place, folder: Path) -> int:
    word = secrets.token_hex(8)
    opened = collect(start(partial(ask, folder, word), _OPEN_LIMIT_S))
    own = list(run_checks(options.checks, here))
    answers: Answers | Gone = (
        opened
        if isinstance(opened, Gone)
        else collect(
            start(partial(gather, folder, word, place, options.wait_s), 2 * options.wait_s + _SPARE_S)
        )
    )
    if isinstance(answers, Gone):
        what = f"{place.label(0)} cannot meet the other nodes in {folder.parent}: {answers.why}"
        met = [Result("shared-folder", "fail", what, "name a folder that all nodes see: --shared DIR")]
        answers = Answers()
    else:
        met = meeting_results(answers, place, str(folder.parent), options.wait_s)
    by_node = {place.label(0): own}
    by_node |= {place.label(node): answers.results[node] for node in sorted(answers.results)}
    shown = [*met, *differences(by_node)]
    if options.as_json:
        nodes = {node: _plain(results) for node, results in by_node.items()}
        document = {"host": short_hostname(), "num_nodes": place.num_nodes, "results": _plain(shown)}
        _print(json.dumps(document | {"nodes": nodes}))
    else:
        for result in shown:
            _print(result.line)
    return _sum_up(
        shown, f"{len(by_node)} of {place.num_nodes} nodes, checks on each: {len(own)}; differences: "
    )


def _other_node(options: Options, here: Here, place: Place, node_rank: int, folder: Path) -> int:
    results = list(run_checks(options.checks, here))
    work = partial(answer, folder, node_rank, results, options.wait_s)
    answered = collect(start(work, 2 * options.wait_s + LINGER_S + _SPARE_S))
    if answered is True:
        return EXIT_DONE
    why = answered.why if isinstance(answered, Gone) else f"not within {options.wait_s:g} s"
    _say(
        f"[{place.label(node_rank)}] error: {place.label(0)}'s file in {folder.parent} was not seen ({why}): "
        "the folder is not shared, or doctor did not start there; name one that all nodes see: --shared DIR"
    )
    return EXIT_FAILED


def _sum_up(results: Iterable[Result], prefix: str) -> int:
    statuses = [result.status for result in results]
    _say(prefix + ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES))
    return EXIT_FAILED if "fail" in statuses else EXIT_DONE


def _plain(results: Iterable[Result]) -> list[dict[str, str]]:
    return [{"name": r.name, "status": r.status, "what": r.what, "remedy": r.remedy} for r in results]


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
