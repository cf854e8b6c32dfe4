"""Parses the options of qsub and the directives of a script as PBS does."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.rehearse.launchers.options import RefusedError

USAGE = "usage: qsub [options] [script | -- command [arguments]]"  # the real one has seven lines
OPTIONS = "A:a:C:c:e:fhIJ:j:k:l:M:m:N:o:P:p:q:R:r:S:u:Vv:W:Xz"  # qsub.1B of OpenPBS
# These options change output or notifications, but not how the job runs here.
_WITHOUT_EFFECT = ("-a", "-f", "-R", "-z")
_UNSUPPORTED = ("-C", "-h", "-I", "-X")
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
_VALUES = {
    "-N": r"[A-Za-z0-9_+][!-#%-~]*",
    "-j": "oe|eo|n",
    "-k": "n|[doe]+",
    "-m": "n|[abej]+",
    "-r": "y|n",
    "-p": "[+-]?[0-9]{1,4}",
    "-J": r"[0-9]{1,4}-[0-9]{1,4}(:[1-9][0-9]{0,3})?(%[1-9][0-9]{0,3})?",
}

_RESOURCE = re.compile(r"\s*([^=,\s]+)(?:=(\S*))?")
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
    is_sandboxed: bool = False
    attributes: dict[str, str] = field(default_factory=dict)  # those of qstat that options set
    resources: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


class _IllegalError(Exception):
    """The value of an option is invalid."""


def directive_lines(script: str) -> list[str]:
    """Returns the directives of a script, without `#PBS`.

    PBS reads directives up to the first command; later lines that begin with #PBS are comments.

    Raises:
        RefusedError: the script has Windows line ends.
    """
    if "\r\n" in script:
        raise RefusedError("qsub: script contains cr, lf", 1)
    directives = []
    for line in script.split("\n"):
        if re.match(r"#PBS(\s|$)", line):
            directives.append(line.removeprefix("#PBS").strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return directives


def read_request(argv: Sequence[str], script: str, environ: Mapping[str, str]) -> Request:
    """Returns the request in the directives of a script and the options of qsub, which take precedence.

    Resources of -l are merged by name.

    Raises:
        RefusedError: qsub does not accept an option or its value.
    """
    request = Request()
    try:
        for line in directive_lines(script):
            request = _with_directive(request, line, environ)
        options, _ = getopt.getopt(list(argv), OPTIONS)
        return _with_options(request, options, environ)
    except getopt.GetoptError as error:
        raise RefusedError(f"qsub: {_getopt_message(error)}\n{USAGE}", 2) from error
    except _IllegalError as error:
        raise RefusedError(f"qsub: {error}\n{USAGE}", 2) from error


def _with_directive(request: Request, line: str, environ: Mapping[str, str]) -> Request:
    """Returns the request with the options of one directive.

    Error messages quote the directive, as do_dir in qsub.c does.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise RefusedError("qsub: unmatched ", 1) from error
    named = f"qsub: directive error: {''.join(f'{word} ' for word in words)}"
    try:
        options, rest = getopt.gnu_getopt(words, OPTIONS)
        request = _with_options(request, options, environ)
    except _IllegalError as error:
        raise RefusedError(f"qsub: {error}\n{named}", 1) from error
    except getopt.GetoptError as error:
        raise RefusedError(f"qsub: {_getopt_message(error)}\n{named}", 1) from error
    if rest:
        raise RefusedError(named, 1)
    return request


def _getopt_message(error: getopt.GetoptError) -> str:
    if "requires argument" in error.msg:
        return f"option requires an argument -- '{error.opt}'"
    return f"invalid option -- '{error.opt}'"


def _with_options(
    request: Request, options: Sequence[tuple[str, str]], environ: Mapping[str, str]
) -> Request:
    for option, value in options:
        request = replace(request, **_change(request, option, value, environ))
    return request


def _change(request: Request, option: str, value: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the request that an option changes."""
    _check(option not in _VALUES or re.fullmatch(_VALUES[option], value) is not None, option)
    if option in _UNSUPPORTED:
        raise RefusedError(f"qsub: the stand-in does not support {option}", 99)
    if option in _WITHOUT_EFFECT:
        return {}
    if option in _ATTRIBUTES:
        return {"attributes": {**request.attributes, _ATTRIBUTES[option]: value}}
    match option:
        case "-r":
            return {"attributes": {**request.attributes, "Rerunable": str(value == "y")}}
        case "-l":
            return {"resources": request.resources | _resources(value)}
        case "-v":
            return {"variables": request.variables | _variables(value, environ)}
        case "-V":
            return {"variables": dict(environ) | request.variables}
        case "-J":
            indices = array_indices(value)
            _check(len(indices) > 0, option)
            return {"indices": indices}
        case "-W":
            changes: dict[str, Any] = {}
            # Commas separate attributes, and also the parts of one `depend`.
            for part in re.split(r",(?=[a-z_]+=)", value):
                changes |= _attribute(part, {**request.attributes, **changes.get("attributes", {})})
            return changes
    return {_FIELDS[option]: value}


def array_indices(value: str) -> range:
    """Returns the indices of `-J`, such as `0-3` or `0-30:10%2`; empty if PBS refuses the value."""
    if not re.fullmatch(_VALUES["-J"], value):
        return range(0)
    first, last, step, *_ = [int(number) for number in re.findall("[0-9]+", value.partition("%")[0])] + [1]
    return range(first, last + 1, step) if first < last else range(0)


def _attribute(value: str, attributes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the request that an option `-W NAME=VALUE` changes.

    `attributes` are those that earlier options have set.
    """
    name, _, text = value.partition("=")
    if name == "depend":
        _check(all(map(_DEPEND.fullmatch, text.split(","))), "-W")
        if re.search(r"\[[^\]]", text):  # parse_depend.c
            raise _IllegalError("cannot have dependancy on subjob or range\nqsub: illegal -W value")
        pairs = [(kind, job) for part in text.split(",") for kind, *jobs in [part.split(":")] for job in jobs]
        return {"after": tuple(pairs)}
    shown = {**attributes, name: text}
    if name == "sandbox":
        return {"is_sandboxed": text == "PRIVATE", "attributes": shown}
    if name in ("group_list", "run_count"):
        return {"attributes": shown}
    _check(re.fullmatch("umask=[0-7]{1,4}", value) is not None, "-W")
    # qstat prints the umask without leading zeros.
    shown["umask"] = text.lstrip("0") or "0"
    return {"umask": int(text, 8), "attributes": shown}


def _check(good: bool, option: str) -> None:
    if not good:
        raise _IllegalError(f"illegal {option} value")


def _resources(value: str) -> dict[str, str]:
    """Parses resources as set_resources of OpenPBS's set_resource.c does."""
    resources = {}
    for part in value.split(","):
        match = _RESOURCE.fullmatch(part)
        if match is None:
            raise _IllegalError("illegal -l value")
        resources[match[1]] = match[2] or ""
    return resources


def _variables(value: str, environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if (not equals and name not in environ) or value.count("'") % 2 or value.count('"') % 2:
            raise RefusedError("qsub: cannot send environment with the job", 1)
        # OpenPBS 23.06 doubles each backslash.
        variables[name] = (text if equals else environ[name]).replace("\\", "\\\\")
    return variables
