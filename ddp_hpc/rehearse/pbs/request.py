"""Reads the directives of a script and the options of qsub, and assigns the requested chunks to nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs.server import Settings
from ddp_hpc.schedulers.registry import SCHEDULERS

_READER = SCHEDULERS["pbs"].reader
# These options change output or notifications, but not how the job runs here.
_WITHOUT_EFFECT = ("-a", "-f", "-R", "-z")
# The attributes of qstat that options set.
_ATTRIBUTES = {
    "-A": "Account_Name",
    "-c": "Checkpoint",
    "-j": "Join_Path",
    "-k": "Keep_Files",
    "-m": "Mail_Points",
    "-M": "Mail_Users",
    "-p": "Priority",
    "-P": "project",
    "-q": "queue",
    "-S": "Shell_Path_List",
    "-u": "User_List",
}
_FIELDS = {"-N": "name", "-o": "output", "-e": "error"}
_INDICES = re.compile(r"([0-9]{1,4})-([0-9]{1,4})(?::([1-9][0-9]{0,3}))?(?:%[1-9][0-9]{0,3})?")
_DEPEND = re.compile(r"(?:after|afterok|afternotok|afterany)(?::[0-9][^:,]*)+")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job request from the options and directives of qsub. The defaults are those of PBS."""

    name: str = ""
    output: str = ""
    error: str = ""
    umask: int = 0o077
    after: tuple[tuple[str, str], ...] = ()  # dependencies: their kind, such as afterany, and the job
    indices: range = range(0)  # indices of the subjobs of an array
    attributes: dict[str, str] = field(default_factory=dict)  # those of qstat that options set
    resources: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a `select` request on its node."""

    ncpus: int
    mpiprocs: int
    ompthreads: int
    node: str


def operands(argv: Sequence[str]) -> list[str]:
    """Returns the arguments of qsub that are not options."""
    return [value for flag, value in _READER.split_options(argv) if not flag]


def read_request(argv: Sequence[str], script: str, environ: Mapping[str, str]) -> Request:
    """Returns the request in the directives of a script and the options of qsub, which take precedence.

    Resources of -l are merged by name.

    Raises:
        RefusedError: qsub does not accept an option or its value.
    """
    own = [(each.flag, each.value) for each in parse_script(script).directives_of("pbs") if not each.late]
    given = [(flag, value) for flag, value in _READER.split_options(argv) if flag]
    request = Request()
    for flag, value in (*own, *given):
        request = replace(request, **_change(request, flag, value, environ))
    return request


def _change(request: Request, flag: str, value: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the request that an option changes."""
    if flag in _WITHOUT_EFFECT:
        return {}
    if flag in _ATTRIBUTES:
        return {"attributes": {**request.attributes, _ATTRIBUTES[flag]: value}}
    if flag in _FIELDS:
        return {_FIELDS[flag]: value}
    match flag:
        case "-r":
            return {"attributes": {**request.attributes, "Rerunable": str(value == "y")}}
        case "-l":
            return {"resources": request.resources | _resources(value)}
        case "-v":
            return {"variables": request.variables | _variables(value, environ)}
        case "-V":
            return {"variables": dict(environ) | request.variables}
        case "-J" if array_indices(value):
            return {"indices": array_indices(value)}
        case "-W":
            changes: dict[str, Any] = {}
            # Commas separate attributes, and also the parts of one `depend`.
            for part in re.split(r",(?=[a-z_]+=)", value):
                changes |= _attribute(part, {**request.attributes, **changes.get("attributes", {})})
            return changes
    raise RefusedError(f"qsub: the stand-in does not support {flag} {value}".rstrip(), 2)


def array_indices(value: str) -> range:
    """Returns the indices of `-J`, such as `0-3` or `0-30:10%2`; empty if PBS refuses the value."""
    match = _INDICES.fullmatch(value)
    if match is None or int(match[1]) >= int(match[2]):
        return range(0)
    return range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))


def _attribute(value: str, attributes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the request that an option `-W NAME=VALUE` changes.

    `attributes` are those that earlier options have set.
    """
    name, _, text = value.partition("=")
    if name != "depend":
        # qstat prints the umask without leading zeros.
        shown = {**attributes, name: (text.lstrip("0") or "0") if name == "umask" else text}
        return {"attributes": shown, **({"umask": int(text, 8)} if name == "umask" else {})}
    if re.search(r"\[[^\]]", text):  # parse_depend.c
        raise RefusedError("qsub: cannot have dependancy on subjob or range\nqsub: illegal -W value", 2)
    if not all(map(_DEPEND.fullmatch, text.split(","))):
        raise RefusedError("qsub: illegal -W value", 2)
    pairs = [(kind, job) for part in text.split(",") for kind, *jobs in [part.split(":")] for job in jobs]
    return {"after": tuple(pairs)}


def _resources(value: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in value.split(",")]
    return {name: text for name, _, text in pairs}


def _variables(value: str, environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if (not equals and name not in environ) or value.count("'") % 2 or value.count('"') % 2:
            raise RefusedError("qsub: cannot send environment with the job", 1)
        # OpenPBS 23.06 doubles each backslash.
        variables[name] = (text if equals else environ[name]).replace("\\", "\\\\")
    return variables


def walltime_s(request: Request) -> int:
    """Returns the seconds of the requested walltime; 0 without one.

    Raises:
        RefusedError: the walltime has another format.
    """
    text = request.resources.get("walltime", "0")
    seconds = _READER.walltime_s(text)
    if seconds is None:
        raise RefusedError("qsub: Illegal attribute or resource value Resource_List.walltime", 166)
    return seconds


def select_of(request: Request) -> str:
    """Returns the requested chunks in the syntax of `select`."""
    return request.resources.get("select", "1")


def place(request: Request, settings: Settings) -> list[Chunk]:
    """Returns the first chunks, each on a node of its own, up to the number of simulated nodes.

    Raises:
        RefusedError: the server would refuse the request.
    """
    chunks = zip(settings.nodes, _chunks(select_of(request), settings, len(settings.nodes)), strict=False)
    return [Chunk(node=node, **numbers) for node, numbers in chunks]


def _chunks(select: str, settings: Settings, most: int) -> Iterator[dict[str, int]]:
    for group in select.split("+"):
        count, *pairs = group.split(":") if group[:1].isdecimal() else ("1", *group.split(":"))
        given = dict(pair.partition("=")[::2] for pair in pairs)
        numbers = {name: given.get(name, "") for name in ("ncpus", "mpiprocs", "ompthreads")}
        if not count.isdecimal() or not all(text.isdecimal() for text in numbers.values() if text):
            raise RefusedError("qsub: Illegal attribute or resource value Resource_List.select", 166)
        ncpus = int(numbers["ncpus"] or settings.default_chunk_ncpus)
        chunk = {
            "ncpus": ncpus,
            "mpiprocs": int(numbers["mpiprocs"] or 1),
            "ompthreads": int(numbers["ompthreads"] or ncpus),
        }
        for _ in range(min(int(count), most)):  # a script can request millions
            yield chunk
