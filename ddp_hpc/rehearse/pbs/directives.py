"""What qsub was asked: its options and the script's directives, read the way PBS reads them."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.rehearse.launchers.options import RefusedError

USAGE = "usage: qsub [-A acct] [-e path] [-j oe|eo] [-k keep] [-l resource_list] [-N name] [-o path]\n"
USAGE += "            [-q dest] [-r y|n] [-v variable_list] [-W otherattributes=value...] [script]"
OPTIONS = "A:a:C:c:e:fhIJ:j:k:l:M:m:N:o:P:p:q:R:r:S:u:Vv:W:Xz"  # qsub.1B of OpenPBS
# They change what is printed or who is told, not how the job runs here.
_WITHOUT_EFFECT = ("-a", "-c", "-f", "-M", "-m", "-P", "-p", "-R", "-u", "-z")

_NAME = re.compile(r"[A-Za-z0-9_+][!-#%-~]*")
_RESOURCE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=\S+")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options and directives together; None and empty where nothing was said."""

    name: str = ""
    queue: str = ""
    account: str = ""
    keep: str = ""
    join: str = "n"
    output: str = ""
    error: str = ""
    umask: int = 0o077
    after: tuple[str, ...] = ()
    resources: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


class _IllegalError(Exception):
    """An option's value that qsub itself refuses, before it asks the server."""


def directive_lines(script: str) -> list[str]:
    """The text after `#PBS` of each line that counts.

    The first line that is neither blank, comment nor directive ends the
    directives: what comes after it is a comment to PBS.

    Raises:
        RefusedError: for a script with Windows line ends.
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
    """The script's directives and then the options, which win, resource by resource.

    Raises:
        RefusedError: an option or a value that qsub does not take.
    """
    request = Request()
    for line in directive_lines(script):
        try:
            options, rest = getopt.getopt(shlex.split(line), OPTIONS)
            request = _with_options(request, options, environ)
            if rest:
                raise RefusedError(f"qsub: directive error: {line}", 1)
        except (getopt.GetoptError, ValueError) as error:
            raise RefusedError(f"qsub: directive error: {line}", 1) from error
        except _IllegalError as error:
            raise RefusedError(f"qsub: {error}", 1) from error
    try:
        options, _ = getopt.getopt(list(argv), OPTIONS)
        return _with_options(request, options, environ)
    except getopt.GetoptError as error:
        raise RefusedError(f"qsub: invalid option -- '{error.opt}'\n{USAGE}", 2) from error
    except _IllegalError as error:
        raise RefusedError(f"qsub: {error}\n{USAGE}", 2) from error


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
        case "-r":
            _check(value in ("y", "n"), option)
            return {}
        case "-V":
            return {"variables": dict(environ) | request.variables}
        case "-S":
            _check(value.rpartition("/")[2] in ("bash", "sh"), option)
            return {}
        case "-C" | "-h" | "-I" | "-J" | "-X":
            raise RefusedError(f"qsub: the stand-in does not do {option}", 99)
        case _ if option in _WITHOUT_EFFECT:
            return {}
        case "-W":
            name, _, text = value.partition("=")
            if name == "depend":
                _check(re.fullmatch(r"afterany(:[0-9][^:]*)+", text) is not None, option)
                return {"after": tuple(text.split(":")[1:])}
            if name in ("group_list", "sandbox", "run_count"):
                return {}
            _check(re.fullmatch("umask=[0-7]{1,4}", value) is not None, option)
            return {"umask": int(text, 8)}
    return {{"-A": "account", "-q": "queue", "-o": "output", "-e": "error"}[option]: value}


def _check(good: bool, option: str) -> None:
    if not good:
        raise _IllegalError(f"illegal {option} value")


def _resources(value: str) -> dict[str, str]:
    parts = value.split(",")
    _check(all(_RESOURCE.fullmatch(part) for part in parts), "-l")
    return {name: text for name, _, text in (part.partition("=") for part in parts)}


def _variables(value: str, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if (not equals and name not in environ) or value.count("'") % 2 or value.count('"') % 2:
            raise RefusedError("qsub: cannot send environment with the job", 1)
        found[name] = text if equals else environ[name]
    return found
