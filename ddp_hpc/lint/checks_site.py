"""Checks of a script against a site profile. Most only warn, as a profile's queues may be outdated."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.units import format_walltime, parse_walltime_s
from ddp_hpc.lint.check_registry import Problem, Subject, check, plain, shown
from ddp_hpc.lint.launch_commands import trains_with_torch
from ddp_hpc.lint.parse_script import Command, Script, parse_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.schedulers.registry import SCHEDULERS, is_same_scheduler
from ddp_hpc.schedulers.script_options import whole_number
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, queue_entries

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Names of GPUs as features of nodes.
_MODEL = re.compile(
    r"(?i)(?<![a-z0-9])(?:titan\w*|[rg]tx\w*|tesla\w*|[vpah]100\w*|h200|k[248]0m?|p40|t4|a[1345]0|l40s?|mi\d{3}\w*)(?![a-z0-9])"
)
_WORKFLOWS = frozenset(("snakemake", "nextflow"))
_GPUS_IN = ("-l", "--gres", "--tres-per-task")
_MASTER_BY_HOSTNAME = re.compile(
    r"\$\(hostname(?: -s| --short| -f| --fqdn)?\)|`hostname(?: -s)?`|\$HOSTNAME|\$\{HOSTNAME\}"
)
_FIRST_NODE = re.compile(r"\$\(scontrol show hostnames?\b[^()]*\)")


def _same_scheduler(subject: Subject) -> Site | None:
    site = subject.site
    return site if site and is_same_scheduler(site, subject.script.scheduler) else None


def _own_script(subject: Subject) -> Script | None:
    """Returns the script that `ddp-hpc render` writes for the site, as a reference for comparisons."""
    site = _same_scheduler(subject)
    if site is None:
        return None
    try:
        job = Job(
            num_nodes=subject.num_nodes or 1, queue=site.default_queue, walltime_s=600, account="PROJECT"
        )
        return parse_script(render(job, site))
    except RequestError:
        return None


@check("SITE001", "error", "a script for another scheduler")
def _other_scheduler(subject: Subject) -> Iterator[Problem]:
    site, script = subject.site, subject.script
    if site and script.scheduler and not is_same_scheduler(site, script.scheduler):
        what = f"the directives are for {script.scheduler}, but {site.title} uses {site.scheduler}"
        remedy = "choose another --profile, or render the job for this site"
        yield Problem(script.read()[0].line if script.read() else 1, what, remedy)


@check("SITE002", "warning", "no account")
def _no_account(subject: Subject) -> Iterator[Problem]:
    site = _same_scheduler(subject)
    if site is None or not site.account.required:
        return
    if not subject.scheduler.reader.names_account(subject.script):
        what = f"{site.title} requires an account, but the script does not set one"
        remedy = f"add {site.account.option or 'it'} to the directives, or pass it on the command line"
        yield Problem(1, what, remedy)


@check("SITE003", "error", "no file systems requested")
def _no_file_systems(subject: Subject) -> Iterator[Problem]:
    own = _own_script(subject)
    if subject.site is None or own is None or not subject.site.pbs.filesystems_resource:
        return
    requested = {name for _, name, _ in subject.script.resources()}
    for _, name, value in own.resources():
        if name == subject.site.pbs.filesystems_resource and name not in requested:
            what = f"{subject.site.title} rejects jobs that do not list their file systems"
            yield Problem(1, what, f"add #PBS -l {name}={value}")


@check("SITE004", "warning", "no GPUs requested")
def _no_gpus(subject: Subject) -> Iterator[Problem]:
    own = None if _asks_for_gpus(subject.script) else _own_script(subject)
    has_gpus = re.search("(?i)gpu", subject.script.value("--partition", "-q") or "")
    model = _MODEL.search(subject.script.value("--constraint") or "")
    names_gpu = model and subject.script.value("--gres") is None
    is_whole = subject.known_site is not None or subject.script.value("--exclusive") is not None
    # TACC, where directories have such numbers, gives whole nodes.
    is_whole |= re.search(r"/(?:work\d?|scratch\d?|home\d)/\d{5}/", subject.script.text) is not None
    is_whole |= subject.script.sets("CUDA_VISIBLE_DEVICES")
    # Other partitions of a list may have none, and the jobs of a workflow have directives of their own.
    of_workflow = any(map(_starts_workflow, subject.script.commands))
    is_other = "," in (subject.script.value("--partition") or "") or of_workflow
    if (has_gpus or names_gpu) and not (is_whole or is_other or _asks_for_gpus(subject.script)):
        option, kind = "--gpus-per-node=NUMBER", "partition"
        if subject.scheduler.reader.requests_by_resources:
            option, kind = (
                ":ngpus=NUMBER to chunks" if subject.uses_chunks else ":gpus=NUMBER to nodes",
                "queue",
            )
        flags = ("--partition", "-q") if has_gpus else ("--constraint",)
        what = (
            f"the name of this {kind if has_gpus else 'constraint'} suggests GPUs, and the job requests none"
        )
        without = f"a {kind} without GPUs" if has_gpus else "nodes without GPUs"
        remedy = f"unless the job has whole nodes, add {option}, or use {without}"
        yield Problem(subject.line_of(*flags), what, remedy, "note")
    if subject.site is None or own is None:
        return
    features = subject.script.value("--constraint")
    if features is not None and "gpu" not in features and "gpu" in (own.value("--constraint") or ""):
        return  # a job for nodes without GPUs
    if gpus := _asks_for_gpus(own):
        what = f"the script requests no GPUs, and {subject.site.title} allocates only requested GPUs"
        yield Problem(1, what, f"request them, as with {gpus}")


def _starts_workflow(command: Command) -> bool:
    """Returns whether a command starts Snakemake or Nextflow, also in a container or through a launcher."""
    words = {word.rpartition("/")[2] for word in command.argv[:8]}
    return "activate" not in words and not _WORKFLOWS.isdisjoint(words)


def _asks_for_gpus(script: Script) -> str:
    for d in script.read():
        # The name of a partition or a job may contain the word "gpu" too.
        of_moab = d.flag == "-W" and "gres:gpu" in d.value.lower()  # -W x=GRES:gpu@1
        if "gpu" in d.flag or of_moab or ("gpu" in d.value and d.flag in _GPUS_IN):
            return f"{SCHEDULERS[d.scheduler].prefix} {d.text}"
    return ""


def _entries(subject: Subject) -> tuple[Queue, ...]:
    """Returns the entries of the profile for the job's queue, or for jobs that name no queue."""
    site = _same_scheduler(subject)
    if site is None:
        return ()
    return queue_entries(site, subject.queue[1] if subject.queue else "", subject.qos)


def _open_queues(site: Site) -> list[str]:
    """Returns the names of the queues that users can submit to."""
    return list(dict.fromkeys(entry.name for entry in site.queues if entry.name and entry.submit))


def _limited_by(subject: Subject) -> str:
    """Returns what has the limits of `_entries`: the queue, or the site if the job names no queue."""
    if subject.queue:
        return f"queue {plain(subject.queue[1])}"
    return subject.site.title if subject.site else ""


def _nodes(subject: Subject) -> int | None:
    """Returns the number of nodes; None if the directives of the site or queue do not contain this number."""
    if subject.site and subject.scheduler.reader.requests_by_resources and not subject.asked_nodes:
        units = [subject.site.pbs.resources, *(entry.resources for entry in _entries(subject))]
        if any(texts and not any("{nodes}" in text for text in texts) for texts in units):
            return None
    return subject.num_nodes


@check("SITE005", "warning", "a queue that is not in the profile")
def _unknown_queue(subject: Subject) -> Iterator[Problem]:
    site = _same_scheduler(subject)
    if not (site and site.queues and subject.queue) or _entries(subject):
        return
    line, queue = subject.queue
    beside = [entry.qos for entry in site.queues if entry.name == queue]
    if not beside:
        known = _open_queues(site)
        yield Problem(
            line,
            f"{site.title} had no queue {shown(queue)} when the profile was checked on {site.checked}"
            f"{nearest(queue[:80], known)}",
            f"use one of {', '.join(known)}" if known else "omit the queue, which the scheduler chooses",
        )
    elif named := [qos for qos in dict.fromkeys(beside) if qos]:
        what = (
            f"{site.title} had no QOS {shown(subject.qos)} for {plain(queue)} when the profile was checked "
            f"on {site.checked}{nearest(subject.qos[:80], named)}"
        )
        yield Problem(subject.line_of("--qos"), what, f"use one of {', '.join(named)}, or omit --qos")


def _line_of_request(subject: Subject) -> int:
    """Returns the line that requests the queue; without one, that of the nodes."""
    return subject.queue[0] if subject.queue else subject.line_of("--nodes", "-N", "select")


@check("SITE006", "warning", "more or fewer nodes than the queue allows")
def _nodes_of_queue(subject: Subject) -> Iterator[Problem]:
    entries, nodes = _entries(subject), _nodes(subject)
    if nodes and entries and not any(entry.takes_nodes(nodes) for entry in entries):
        least, most = min(e.min_nodes for e in entries), max(e.max_nodes for e in entries)
        limits = f"{least} to {most}" if most else f"{least} or more"
        what = f"{nodes} nodes are requested, but {_limited_by(subject)} accepts {limits}"
        yield Problem(_line_of_request(subject), what, "choose another queue, or another number of nodes")


@check("SITE007", "warning", "a longer walltime than the queue allows")
def _walltime_of_queue(subject: Subject) -> Iterator[Problem]:
    walltime_s, nodes = subject.walltime_s or 0, _nodes(subject)
    fitting = [e for e in _entries(subject) if nodes is None or e.takes_nodes(nodes)]
    limits_s = [parse_walltime_s(e.max_walltime) if e.max_walltime else sys.maxsize for e in fitting]
    most_s = max(limits_s, default=sys.maxsize)
    if subject.walltime and walltime_s > most_s:
        for_nodes = f" for {nodes} nodes" if nodes else ""
        yield Problem(
            subject.walltime[0],
            f"{format_walltime(walltime_s)} is requested, but {_limited_by(subject)} allows "
            f"{format_walltime(most_s)}{for_nodes}",
            "request less time or choose another queue, as a routing queue may drop the job silently"
            if subject.queue
            else "request less time",
        )


@check("SITE008", "error", "more GPUs or CPUs than a node has")
def _larger_than_a_node(subject: Subject) -> Iterator[Problem]:
    site, script = _same_scheduler(subject), subject.script
    if site is None or (site.queues and subject.queue and not _entries(subject)):
        return  # the nodes of a queue that is not in the profile may be larger
    gpus, devices = subject.gpus_per_node, site.node.devices
    if gpus and gpus > devices and (devices or site.node.cpu_only):
        what = f"{gpus} GPUs per node are requested, but {site.title} has {devices or 'none'}"
        remedy = f"request {devices} per node, and more nodes" if devices else "request no GPUs"
        yield Problem(subject.line_of("--gpus-per-node", "--gres", "select"), what, remedy)
    threads = site.node.threads or site.node.cores
    per_task, tasks = whole_number(script.value("--cpus-per-task")), subject.ranks_per_node
    if threads and per_task and tasks and per_task * tasks > threads:
        what = f"{tasks} tasks x {per_task} CPUs are requested per node, but {site.title} has {threads}"
        remedy = f"use --cpus-per-task={max(1, threads // tasks)}"
        yield Problem(subject.line_of("--cpus-per-task"), what, remedy)
    for command in script.launches("mpiexec") if site.launch.dialect == "pals" else ():
        given = [command.option("--ppn", "-ppn"), command.option("--depth", "-d")]
        ranks, depth = (whole_number(subject.value_of(value or "")) or 0 for value in given)
        if threads and ranks * depth > threads:
            yield Problem(
                command.line,
                f"{ranks} ranks x depth {depth} need {ranks * depth} hardware threads of each node, and "
                f"{site.title} has {threads}",
                f"use --depth={max(1, threads // ranks)}, or fewer ranks per node",
            )


@check("SITE009", "warning", "the name of a node, or a network, that is not the fast one")
def _slow_master(subject: Subject) -> Iterator[Problem]:
    site = subject.site
    if site is None or not (site.fabric.suffix or site.fabric.interface):
        return
    own = _own_script(subject) if "SOCKET_IFNAME" in subject.script.text else None
    for line, name, value in subject.script.assignments:
        known = own.last_assigned(name) if own and name.endswith("SOCKET_IFNAME") else None
        # NCCL takes an interface whose name begins with the value.
        if known and value.isalnum() and not value.startswith(known.partition(",")[0].rstrip("0123456789")):
            what = f"{name} is {shown(value)}, but the network of {site.title} is {known}"
            yield Problem(line, what, f"use {name}={known}")
        has_suffix = not site.fabric.suffix or not _FIRST_NODE.fullmatch(value)
        is_slow = _MASTER_BY_HOSTNAME.fullmatch(value) or not has_suffix
        if name == "MASTER_ADDR" and is_slow and value == subject.script.last_assigned(name):
            fast, remedy = site.fabric.interface, "start the ranks with ddp-hpc, and without MASTER_ADDR"
            if suffix := site.fabric.suffix:
                fast = f"the name with the suffix {suffix}"
                remedy = f"append {suffix} to the name, such as MASTER_ADDR=$(hostname -s){suffix}"
            what = f"on {site.title}, hostname is the name on the slow network; the fast network is {fast}"
            yield Problem(line, what, remedy)


@check("SITE010", "error", "an option that the site rejects")
def _refused_option(subject: Subject) -> Iterator[Problem]:
    site = _same_scheduler(subject)
    refused = {f"--{word.lstrip('-')}" for word in site.slurm.forbidden} if site else set()
    for d in subject.script.read():
        if d.flag in refused and site:
            yield Problem(d.line, f"{site.title} rejects {d.flag}", "remove the option")


@check("SITE011", "error", "a queue that accepts no submissions")
def _inner_queue(subject: Subject) -> Iterator[Problem]:
    site, entries = _same_scheduler(subject), _entries(subject)
    if site and subject.queue and entries and not any(entry.submit for entry in entries):
        known = _open_queues(site)
        yield Problem(
            subject.queue[0],
            f"queue {subject.queue[1]} of {site.title} accepts no submissions, only jobs from a "
            "routing queue",
            f"use one of {', '.join(known)}" if known else "omit the queue, which the scheduler chooses",
        )


@check("SITE012", "error", "a shorter walltime than the queue allows")
def _too_short_for_queue(subject: Subject) -> Iterator[Problem]:
    limits_s = [parse_walltime_s(e.min_walltime) if e.min_walltime else 0 for e in _entries(subject)]
    walltime_s, least_s = subject.walltime_s or 0, min(limits_s, default=0)
    if subject.walltime and 0 < walltime_s < least_s:
        what = (
            f"{format_walltime(walltime_s)} is requested, but {_limited_by(subject)} "
            f"requires {format_walltime(least_s)} or more"
        )
        yield Problem(subject.walltime[0], what, f"request at least {format_walltime(least_s)}")


@check("SITE013", "warning", "more GPUs than the queue allows")
def _gpus_of_queue(subject: Subject) -> Iterator[Problem]:
    nodes, gpus = _nodes(subject), subject.gpus_per_node
    most = [entry.max_devices for entry in _entries(subject)]
    if nodes and gpus and most and all(most) and nodes * gpus > max(most):
        what = f"{nodes * gpus} GPUs are requested in total, but {_limited_by(subject)} allows {max(most)}"
        yield Problem(_line_of_request(subject), what, "choose another queue, or fewer nodes")


@check("SITE014", "warning", "local ranks on cores that are not next to their GPUs")
def _other_core_order(subject: Subject) -> Iterator[Problem]:
    expected = list(subject.site.launch.cpu_bind) if subject.site else []
    text = "\n".join(subject.script.lines)
    # Scripts that give each rank its GPU with a wrapper or a list can use any order of the cores.
    if not expected or re.search(r"CUDA_VISIBLE_DEVICES|ZE_AFFINITY_MASK|affinity", text):
        return
    for command in subject.script.commands:
        kind, _, cores = (command.option("--cpu-bind") or "").partition(":")
        bound = cores.split(":")
        if kind == "list" and bound != expected[: len(bound)] and set(bound) <= set(expected):
            site = subject.site
            what = (
                f"local rank 0 is bound to cores {plain(bound[0])}, but on {site.title if site else ''} "
                f"the cores next to the first GPU are {expected[0]}"
            )
            yield Problem(command.line, what, f"use --cpu-bind list:{':'.join(expected[: len(bound)])}")


@check("SITE015", "warning", "the other nodes get the GPU UUIDs of the first node")
def _gpus_of_first_node(subject: Subject) -> Iterator[Problem]:
    site = _same_scheduler(subject)
    if site is None or _VISIBLE not in site.env.unset or (subject.num_nodes or 1) < 2:
        return
    # Any line with the variable may be the site's own remedy.
    if any(_VISIBLE in line for line in subject.script.lines) or not trains_with_torch(subject):
        return
    for command in subject.script.launches("mpiexec", "mpirun"):
        # ddp-hpc's own programs recognize the UUIDs of another node.
        if command.launched and "ddp_hpc" not in command.text:
            what = (
                f"on {site.title}, {_VISIBLE} has the UUIDs of the node's GPUs, but {command.name} passes on "
                "those of the first node, so the ranks on other nodes see no GPU"
            )
            yield Problem(command.line, what, f"add `unset {_VISIBLE}` before {command.name}")
