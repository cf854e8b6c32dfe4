"""Parses the options of qsub and the directives of a script as PBS does."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.rehearse.launchers.options import RefusedError

# The usage text of OpenPBS's qsub.c.
USAGE = """usage: qsub [-a date_time] [-A account_string] [-c interval]
\t[-C directive_prefix] [-e path] [-f ] [-h ] [-I [-X]] [-j oe|eo] [-J X-Y[:Z]]
\t[-k keep] [-l resource_list] [-m mail_options] [-M user_list]
\t[-N jobname] [-o path] [-p priority] [-P project] [-q queue] [-r y|n]
\t[-R o|e|oe] [-S path] [-u user_list] [-W otherattributes=value...]
\t[-v variable_list] [-V ] [-z] [script | -- command [arg1 ...]]
       qsub --version"""
OPTIONS = "A:a:C:c:e:fhIJ:j:k:l:M:m:N:o:P:p:q:R:r:S:u:Vv:W:Xz"  # qsub.1B of OpenPBS
# These options change output or notifications, but not how the job runs here.
_WITHOUT_EFFECT = ("-a", "-f", "-R", "-z")
# Attributes of qstat that options set without further effect here.
_ATTRIBUTES = {"-P": "project", "-S": "Shell_Path_List", "-u": "User_List", "-c": "Checkpoint"}

_NAME = re.compile(r"[A-Za-z0-9_+][!-#%-~]*")
_RESOURCE = re.compile(r"\s*([^=,\s]+)(?:=(\S*))?")
_ARRAY = re.compile(r"([0-9]{1,4})-([0-9]{1,4})(?::([1-9][0-9]{0,3}))?(?:%([1-9][0-9]{0,3}))?")
_DEPEND = re.compile(r"(?:after|afterok|afternotok|afterany)(?::[0-9][^:,]*)+")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job request from the options and directives of qsub. The defaults are those of PBS."""

    name: str = ""
    mail_points: str = "a"
    mail_users: str = ""
    priority: int = 0
    group_list: str = ""
    queue: str = ""
    account: str = ""
    keep: str = ""
    join: str = "n"
    output: str = ""
    error: str = ""
    umask: int = 0o077
    after: tuple[tuple[str, str], ...] = ()  # dependencies: their kind, such as afterany, and the job
    indices: range = range(0)  # indices of the subjobs of an array
    max_running: int = 0  # maximum number of subjobs that run at the same time; 0 means no limit
    is_held: bool = False
    attributes: dict[str, str] = field(default_factory=dict)
    is_rerunable: bool = True
    is_sandboxed: bool = False
    resources: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


class _IllegalError(Exception):
    """The value of an option is invalid. If the option is in a directive, qsub also prints the directive."""


class _IllegalAttributeError(_IllegalError):
    """A value is invalid, and qsub detects this only in the complete request, so it prints no directive."""


def directive_lines(script: str) -> list[str]:
    """Returns the directives of a script, without `#PBS`.

    PBS reads directives up to the first command; later lines that begin with #PBS are comments.

    Raises:
        RefusedError: the script has Windows line ends.
    """
    if "\r\n" in script:
        raise RefusedError("qsub: script contains cr, lf", 1)
    found = []
    for line in script.split("\n"):
        if re.match(r"#PBS(\s|$)", line):
            found.append(line.removeprefix("#PBS").strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


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
        raise RefusedError(f"{_said(error)}\n{USAGE}", 2) from error


def _said(error: Exception) -> str:
    # The library that parses dependencies prints its message without the name of the program.
    text = str(error)
    return text if text.startswith("cannot have") else f"qsub: {text}"


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
    except _IllegalAttributeError:
        raise
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
    match option:
        case "-N":
            if len(value) > 230:
                raise RefusedError("qsub: Job name is too long", 2)
            _check(_NAME.fullmatch(value) is not None, option)
            return {"name": value}
        case "-l":
            return {"resources": request.resources | _resources(value)}
        case "-k":
            _check(value == "n" or bool(re.fullmatch("[doe]+", value)), option)
            return {"keep": value}
        case "-j":
            _check(value in ("oe", "eo", "n"), option)
            return {"join": value}
        case "-v":
            return {"variables": request.variables | _variables(value, environ)}
        case "-m":
            _check(value == "n" or bool(re.fullmatch("[abej]+", value)), option)
            return {"mail_points": value}
        case "-p":
            _check(re.fullmatch("[+-]?[0-9]{1,4}", value) is not None, option)
            _check(-1024 <= int(value) <= 1023, option)
            return {"priority": int(value)}
        case "-r":
            if value not in ("y", "n"):
                raise _IllegalError("illegal -r value")
            return {"is_rerunable": value == "y"}
        case "-V":
            return {"variables": dict(environ) | request.variables}
        case "-h":
            return {"is_held": True}
        case "-I":
            # Interactive jobs are refused, since the stand-in has no terminal.
            raise RefusedError(
                "qsub:\tstandard input and output must be a terminal for\n\tinteractive job submission", 1
            )
        case "-J":
            indices = array_indices(value)
            _check(len(indices) > 0, option)
            return {"indices": indices, "max_running": int(value.partition("%")[2] or 0)}
        case "-C" | "-X":
            raise RefusedError(f"qsub: the stand-in does not support {option}", 99)
        case _ if option in _WITHOUT_EFFECT:
            return {}
        case _ if option in _ATTRIBUTES:
            return {"attributes": {**request.attributes, _ATTRIBUTES[option]: value}}
        case "-W":
            changes: dict[str, Any] = {}
            # Commas separate attributes, and also the parts of one `depend`.
            for part in re.split(r",(?=[a-z_]+=)", value):
                changes |= _attribute(part, {**request.attributes, **changes.get("attributes", {})})
            return changes
    return {
        {"-A": "account", "-q": "queue", "-M": "mail_users", "-o": "output", "-e": "error"}[option]: value
    }


def array_indices(value: str) -> range:
    """Returns the indices of `-J`, such as `0-3` or `0-30:10%2`; empty if PBS refuses the value."""
    match = _ARRAY.fullmatch(value)
    if match is None or int(match[1]) >= int(match[2]):
        return range(0)
    return range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))


def _attribute(value: str, attributes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the request that an option `-W NAME=VALUE` changes.

    `attributes` are those that earlier options have set.
    """
    name, _, text = value.partition("=")
    if name == "depend":
        _check(all(map(_DEPEND.fullmatch, text.split(","))), "-W")
        if re.search(r"\[[^\]]", text):  # parse_depend.c
            raise _IllegalAttributeError("cannot have dependancy on subjob or range\nqsub: illegal -W value")
        pairs = [(kind, job) for part in text.split(",") for kind, *jobs in [part.split(":")] for job in jobs]
        return {"after": tuple(pairs)}
    shown = {**attributes, name: text}
    if name == "sandbox":
        return {"is_sandboxed": text == "PRIVATE", "attributes": shown}
    if name == "group_list":
        return {"group_list": text}
    if name == "run_count":
        return {}
    _check(re.fullmatch("umask=[0-9]{1,4}", value) is not None, "-W")
    # sscanf("%o") in start_exec.c stops at the first character that is not an octal digit.
    octal = re.match("[0-7]+", text.lstrip("0"))
    shown["umask"] = text.lstrip("0") or "0"
    number = int(octal[0], 8) if octal else 0 if not text.strip("0") else 0o077
    return {"umask": number, "attributes": shown}


def _check(good: bool, option: str) -> None:
    if not good:
        raise _IllegalAttributeError(f"illegal {option} value")


def _resources(value: str) -> dict[str, str]:
    """Parses resources as set_resources of OpenPBS's set_resource.c does."""
    found = {}
    for part in value.split(","):
        match = _RESOURCE.fullmatch(part)
        if match is None:
            raise _IllegalError("illegal -l value")
        found[match[1]] = match[2] or ""
    return found


def _variables(value: str, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if (not equals and name not in environ) or value.count("'") % 2 or value.count('"') % 2:
            raise RefusedError("qsub: cannot send environment with the job", 1)
        # OpenPBS 23.06 doubles each backslash.
        found[name] = (text if equals else environ[name]).replace("\\", "\\\\")
    return found
