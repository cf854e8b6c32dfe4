"""Options of sbatch that exclude each other, or whose numbers contradict each other.

Source: `validate_options_salloc_sbatch_srun` in src/common/slurm_opt.c, `_opt_verify` in src/sbatch/opt.c,
and `gres_job_state_validate` with `_test_gres_cnt` in gres.c of SchedMD/slurm, in the last releases of 22.05
to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.hostlist import expand_hostlist
from ddp_hpc.schedulers.slurm.check_option_values import node_range


class Contradiction(NamedTuple):
    """Options that sbatch rejects together, and the first and the last version that does; empty: all do."""

    flags: tuple[str, ...]
    what: str
    remedy: str
    since: str = ""
    until: str = ""


# Options that exclude each other, and the first version that rejects them.
_EXCLUSIVE = (
    (("--mem", "--mem-per-cpu", "--mem-per-gpu"), ""),
    (("--ntasks-per-gpu", "--ntasks-per-node"), ""),
    (("--ntasks-per-gpu", "--gpus-per-task"), ""),
    (("--cpus-per-gpu", "--cpus-per-task"), ""),
    (("--exclusive", "--oversubscribe"), "23.02"),
)
_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres")
_MAY_REQUEST_GPUS = {*_GPUS, "--ntasks-per-gpu", "--ntasks-per-tres", "--tres-per-task"}
GPUS_IN_GRES = re.compile(r"(?:^|,)(?:gres[:/])?gpu")
GPUS_TWICE_SINCE = "26.05"
"""The first version of Slurm that rejects --gres=gpu with --gpus-per-node."""
_ONE = "keep one of them"


def contradictions(given: Mapping[str, str]) -> Iterator[Contradiction]:
    """Yields the options that contradict each other, what is wrong with them, and a remedy.

    `given` has the values of the options of a job, as sbatch read them; empty if they are unknown.
    """
    for flags, since in _EXCLUSIVE:
        both = tuple(flag for flag in flags if flag in given)
        if len(both) > 1:
            yield Contradiction(both, f"sbatch rejects {' with '.join(both)}", _ONE, since)
    nodes, hosts = node_range(given.get("--nodes", "")), _num_hosts(given.get("--nodelist", ""))
    if nodes and hosts and 0 < nodes[1] < hosts:
        what = f"--nodelist names {hosts} nodes, but --nodes allows {nodes[1]}"
        remedy = "request as many nodes as the list has, or omit --nodelist"
        yield Contradiction(("--nodes", "--nodelist"), what, remedy, until="22.05")
    gpus = {flag: _gpu_request(given[flag], is_gres=flag == "--gres") for flag in _GPUS if flag in given}
    requests = {flag: request for flag, request in gpus.items() if request}
    of_gpus = _of_gpus(given, {flag: sum(request.values()) for flag, request in requests.items()})
    # One finding for each pair of options: remedies for the types and for the numbers would differ.
    yield from {frozenset(one.flags): one for one in (*of_gpus, *_of_types(requests))}.values()


def _of_types(gpus: Mapping[str, Mapping[str, int]]) -> Iterator[Contradiction]:
    typed = [flag for flag, request in gpus.items() if any(request)]
    untyped = [flag for flag, request in gpus.items() if "" in request]
    if typed and untyped:
        flags = tuple(dict.fromkeys((typed[0], untyped[0])))
        what = f"{typed[0]} has a type of GPU and {untyped[0]} has none, so sbatch rejects them"
        yield Contradiction(flags, what, f"{_ONE}, with the type")


def _of_gpus(given: Mapping[str, str], gpus: Mapping[str, int]) -> Iterator[Contradiction]:
    nodes = node_range(given.get("--nodes", "")) or (0, 0)
    given_tasks = _number(given.get("--ntasks"))
    if given_tasks and given_tasks < nodes[0]:
        nodes = (given_tasks, given_tasks)  # with fewer tasks than nodes, sbatch requests fewer nodes
    is_fixed = nodes[0] > 0 and nodes[0] == nodes[1] and "--cpus-per-task" not in given
    per_node = _number(given.get("--ntasks-per-node"))
    has_tasks = given_tasks or is_fixed or (per_node and nodes[0] and nodes[0] == nodes[1])
    # If no option says how many tasks there are, the command line of sbatch may do it.
    counts = [given[flag] for flag in ("--ntasks", "--nodes", "--ntasks-per-node") if flag in given]
    has_tasks = has_tasks or "" in counts or not counts
    total, of_task = gpus.get("--gpus", 0), gpus.get("--gpus-per-task", 0)
    of_node = gpus.get("--gres", 0) or gpus.get("--gpus-per-node", 0)
    node_flag = "--gres" if gpus.get("--gres") else "--gpus-per-node"
    if "--gpus-per-node" in given and GPUS_IN_GRES.search(given.get("--gres", "")):
        what = "sbatch rejects --gres=gpu with --gpus-per-node"
        yield Contradiction(("--gres", "--gpus-per-node"), what, "keep --gpus-per-node", GPUS_TWICE_SINCE)
    if "--mem-per-gpu" in given and not (_MAY_REQUEST_GPUS & set(given)):
        what = "sbatch rejects --mem-per-gpu without GPUs"
        yield Contradiction(("--mem-per-gpu",), what, "request GPUs, or use --mem")
    if "--cpus-per-gpu" in given and not (_MAY_REQUEST_GPUS & set(given)):
        what = "sbatch rejects --cpus-per-gpu without GPUs"
        yield Contradiction(("--cpus-per-gpu",), what, "request GPUs, or use --cpus-per-task", "23.02")
    if of_task and not (total or has_tasks):
        since = "23.02" if per_node and "--nodes" not in given else ""
        others = "--ntasks, --nodes or --gpus" if since else "--ntasks or --gpus"
        what = f"sbatch rejects --gpus-per-task without {others}"
        yield Contradiction(("--gpus-per-task",), what, "add --ntasks", since)
    # Since 23.02, the list may have more nodes than the job.
    least = nodes[0] or _num_hosts(given.get("--nodelist", ""))
    if 0 < total < least:
        what = f"--gpus={total} requests fewer GPUs than nodes ({least})"
        remedy = "use --gpus-per-node, or request fewer nodes"
        yield Contradiction(("--gpus", "--nodes", "--nodelist"), what, remedy)
    elif (
        total and of_node and (total % of_node or (nodes[0] and not nodes[0] <= total // of_node <= nodes[1]))
    ):
        what = f"--gpus={total} is not the number of nodes times {node_flag} ({of_node})"
        yield Contradiction(("--gpus", node_flag), what, _ONE)
    if total and of_task and given_tasks and given_tasks * of_task != total:
        what = f"{given_tasks} tasks with {of_task} GPUs each are not the {total} GPUs of --gpus"
        yield Contradiction(("--gpus", "--gpus-per-task", "--ntasks"), what, "keep --gpus or --gpus-per-task")
    elif of_task and of_node and (of_task > of_node or of_node % of_task):
        what = f"--gpus-per-task={of_task} does not divide {node_flag} ({of_node})"
        yield Contradiction(("--gpus-per-task", node_flag), what, "omit one of them")


def _gpu_request(value: str, *, is_gres: bool) -> dict[str, int]:
    """Returns the number of GPUs by type; the type is empty if none is named."""
    numbers: dict[str, int] = {}
    for item in value.split(","):
        match = re.fullmatch(
            r"(?:gres[:/])?(?:gpu(?=[:(]|$):?)?(?:([^:\d()][^:()]*):?)?(\d{1,9})?(?:\(.*)?", item
        )
        is_gpu = not is_gres or re.match(r"(?:gres[:/])?gpu\b", item)
        if match and is_gpu and item:
            number = int(match[2]) if match[2] else 1
            if number:
                numbers[match[1] or ""] = numbers.get(match[1] or "", 0) + number
    return numbers


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"\d{1,9}", text) else 0


def _num_hosts(names: str) -> int:
    """Returns the number of hosts in a list such as node[01-04],login1; 0 if it is unknown."""
    # Other characters are those of a variable, or of the name of a file.
    if len(names) > 1000 or not re.fullmatch(r"[\w.,\[\]-]+", names):
        return 0
    try:
        return len(set(expand_hostlist(names)))
    except LaunchError:
        return 0
