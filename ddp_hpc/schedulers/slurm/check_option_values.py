"""The values that sbatch accepts for its options.

Source: the functions `arg_set_*` in src/common/slurm_opt.c, and the functions that they call in proc_args.c,
parse_time.c, tres_bind.c and gres.c of SchedMD/slurm, in the last releases of 22.05 to 26.05. Values that
only the controller can reject, such as unknown partitions, are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ddp_hpc.schedulers.slurm.sbatch_options import VERSIONS
from ddp_hpc.schedulers.versions import is_between

# strtol(3) skips blanks and accepts a sign.
_BLANKS = r"[ \t\n\v\f\r]*"
_POSITIVE = re.compile(rf"{_BLANKS}[+]?0*[1-9]\d{{0,17}}")
_NUMBER = rf"{_BLANKS}[+-]?\d{{1,18}}"
_MEMORY = re.compile(rf"{_BLANKS}[+]?\d{{1,18}}(?:[kKmMgGtT][bB]?)?")
_NODES = re.compile(rf"(?:{_NUMBER}[kK]?[mM]?)?{_BLANKS}")
_MAX_CHARS = 400
_MAIL = frozenset(
    ("ALL", "ARRAY_TASKS", "BEGIN", "END", "FAIL", "INVALID_DEPEND", "REQUEUE", "STAGE_OUT", "TIME_LIMIT")
) | frozenset(f"TIME_LIMIT_{share}" for share in (50, 80, 90))
# Types of mail, by other words for them.
_MEANT_MAIL = {"error": "FAIL", "fail": "FAIL", "failed": "FAIL", "abort": "FAIL", "start": "BEGIN"}
_MEANT_MAIL |= {"begin": "BEGIN", "end": "END", "finish": "END", "all": "ALL"}
_MEANT_MAIL |= {"timeout": "TIME_LIMIT", "time_out": "TIME_LIMIT"}
_SIGNALS = "HUP INT QUIT ABRT KILL ALRM TERM USR1 USR2 URG CONT STOP TSTP TTIN TTOU XCPU CHLD PIPE"
_SIGNAL = re.compile(
    rf"R?B?R?:?(?:[ ]*(?:SIG)?(?:{_SIGNALS.replace(' ', '|')})[ ]*|[ ]*[+]?0*[1-9]\d{{0,4}}[ ]*)"
    r"(?:@[ ]*(?:[+]?\d{1,5})?)?",
    re.IGNORECASE,
)
_GPU_BIND = re.compile(
    r"(?:verbose,)?(?:c.*|n.*|map_gpu:[\d*,]+|mask_gpu:[0-9a-fx*,]+|per_task:\d+|single:\d+)", re.IGNORECASE
)
_COUNT = r"\d{1,18}[kKmMgGtTpP]?"
# The type of a GPU may contain blanks.
_GRES_ITEM = re.compile(
    rf"(?:gres[:/])?[A-Za-z_][\w.-]*(?::(?:[^:,=]+|(?=:)))?(?:[:=]{_COUNT})?(?:\([^)]*\))?"
)
_GPU_ITEM = re.compile(rf"(?:[^:,=\s]*:)?{_COUNT}|(?:[^:,=\s\d]|\d+g[.])[^:,=\s]*")


def is_time(text: str) -> bool:
    """Returns whether sbatch accepts a time limit, such as 90, 90:00, 1-12 or 0-335:59:00."""
    if text == "-1" or text.lower() in ("infinite", "unlimited"):
        return True
    if not re.fullmatch(r"[\d:-]+", text):
        return False
    days, dash, rest = text.rpartition("-")
    groups = [group for group in re.split("[:-]", text) if group]
    colons = rest.count(":")
    if not groups or "-" in days or ":" in days or colons > 2:
        return False
    # A number may be empty only if there is no colon: `1-` is one day.
    return colons == 0 or len(groups) >= colons + (2 if dash else 1)


def time_s(text: str) -> int | None:
    """Returns a time limit in seconds; None if it is invalid or, like 0, means no limit."""
    if not is_time(text) or not re.search(r"[1-9]", text) or text == "-1" or len(text) > _MAX_CHARS:
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(number or 0) for number in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def node_range(text: str) -> tuple[int, int] | None:
    """Returns the minimum and the maximum number of nodes; None if sbatch refuses the text.

    Since 23.11, lists such as 2,4,8 and steps such as 2-8:2 are accepted too.
    """
    if re.search("[,:]", text):
        numbers = [int(number) for number in re.findall(r"\d{1,9}", text)]
        is_list = re.fullmatch(
            r"\d{1,6}(?:-\d{1,6})?(?::\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?(?::\d{1,6})?)*", text
        )
        return (min(numbers), max(numbers)) if is_list else None
    least, dash, most = text.partition("-")
    if not (_NODES.fullmatch(least) and _NODES.fullmatch(most)):
        return None
    first, last = _nodes(least), _nodes(most) if dash else _nodes(least)
    if not dash and first < 0:
        return None
    first = max(first, 1) if dash and first < 0 else first
    return None if last not in (0, -1) and last < first else (first, max(last, 0))


def _nodes(text: str) -> int:
    match = re.match(rf"({_NUMBER})([kK]?)([mM]?)", text)
    if not match:
        return -1
    return int(match[1]) * (1024 if match[2] else 1) * (1024**2 if match[3] else 1)


def _is_mail_type(text: str) -> bool:
    words = [word.upper() for word in text.split(",")]
    # sbatch ignores unknown words if at least one word is known.
    return "NONE" in words or not _MAIL.isdisjoint(words)


def unknown_mail_types(text: str) -> list[str]:
    """Returns the words of --mail-type that sbatch ignores."""
    return [word for word in text.split(",") if word and word.upper() not in _MAIL | {"NONE"}]


def meant_mail_types(text: str) -> str:
    """Returns the types of --mail-type that these words probably stand for, such as TIME_LIMIT for TIMEOUT;
    empty if one of them is unclear.
    """
    types = [_MEANT_MAIL.get(word.lower(), "") for word in re.split(r"[,;.|\s]+", text) if word]
    return ",".join(types) if all(types) else ""


def _is_array(text: str) -> bool:
    """Returns whether slurmctld accepts the indices of an array (slurm_parse_array_tok). It ignores what
    follows % if this is no number.
    """
    parts = [
        re.fullmatch(r"\[?[ ]*(\d{1,9})(?:-(\d{1,9})(?::[1-9]\d*)?)?\]?(?:%.*)?", part)
        for part in text.split(",")
        if part
    ]
    is_valid = all(part and int(part[1]) <= int(part[2] or part[1]) for part in parts)
    return not text or (bool(parts) and is_valid)


def _is_gres(text: str) -> bool:
    if text.lower() in ("none", "help", "list"):
        return True
    return all(_GRES_ITEM.fullmatch(item) for item in text.split(",") if item)


def _is_gpus(text: str) -> bool:
    return not text or all(_GPU_ITEM.fullmatch(item) for item in text.split(",") if item)


def _is_signal(text: str) -> bool:
    seconds = text.partition("@")[2].strip()
    return bool(_SIGNAL.fullmatch(text)) and (not seconds or int(seconds) <= 65535)


def _matches(pattern: str | re.Pattern[str]) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.IGNORECASE) if isinstance(pattern, str) else pattern
    return lambda text: bool(compiled.fullmatch(text))


_COUNTS = (
    *("cores-per-socket", "cpus-per-gpu", "cpus-per-task", "mincpus", "ntasks", "ntasks-per-core"),
    *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "sockets-per-node", "threads-per-core"),
)
_MEMORIES = ("mem", "mem-per-cpu", "mem-per-gpu", "tmp")
_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_SIZE = "a whole number with K, M, G or T, such as 16G"
# Whether sbatch accepts a value, and what to write instead.
_CHECKS: dict[str, tuple[Callable[[str], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_matches(_POSITIVE), "a positive number")),
    **dict.fromkeys(_MEMORIES, (_matches(_MEMORY), _SIZE)),
    "mem": (_matches(_MEMORY), f"{_SIZE}, or 0 for all memory of each node"),
    **dict.fromkeys(
        ("time", "time-min"), (is_time, "MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS, such as 01:30:00")
    ),
    **dict.fromkeys(_GPUS, (_is_gpus, "[TYPE:]NUMBER, such as a100:4")),
    "nodes": (lambda text: node_range(text) is not None, "a number or MIN-MAX"),
    "array": (_is_array, "indices such as 0-9, 1,3,5 or 0-15%4"),
    "gres": (_is_gres, "NAME[:TYPE][:NUMBER], such as gpu:4"),
    "mail-type": (
        _is_mail_type,
        "NONE, BEGIN, END, FAIL, REQUEUE, ALL, TIME_LIMIT or another type of sbatch(1)",
    ),
    "signal": (_is_signal, "[B:]SIGNAL[@SECONDS], such as B:USR1@120"),
    "distribution": (
        _matches(r"(?:\*|block|cyclic|arbitrary|plane=\d+|pack|nopack)(?:[:,].*)?"),
        "--mem for memory, --mail-type for mail, or a distribution such as block:cyclic",
    ),
    "dependency": (
        _matches(
            r"(?:singleton|(?:after(?:any|notok|ok|corr|burstbuffer)?|expand):[\d%<{*][^,?]*|\d+)(?:[,?].*)?|"
        ),
        "a type and the IDs of jobs, such as afterok:123",
    ),
    "open-mode": (_matches("[at].*"), "append or truncate"),
    "exclusive": (
        _matches("(?:exclusive|oversubscribe|user|mcs|topo|allocation)?"),
        "--exclusive without a value, or with user, mcs or topo",
    ),
    "get-user-env": (_matches(r"[ ]*[+-]?\d*(?:[sl].*)?"), "--get-user-env without a value"),
    "hint": (
        _matches("(?:compute_bound|memory_bound|multithread|nomultithread|help|,)+"),
        "a hint of sbatch(1)",
    ),
    **dict.fromkeys(
        ("nodelist", "exclude"), (_matches(r"(?:[^\[\]]|\[[^\[\]]*\])*"), "closed brackets, as in n[1-4]")
    ),
    "priority": (_matches(r"(?!-).*"), "TOP, or a number of at least 0"),
    "kill-on-invalid-dep": (_matches("yes|no"), "yes or no"),
    "gpu-bind": (_matches(_GPU_BIND), "none, closest, single:N, per_task:N, map_gpu:LIST or mask_gpu:LIST"),
}


@dataclass(frozen=True)
class _Form:
    """A form of values that only some versions accept, and what to write for the others."""

    pattern: re.Pattern[str]
    expected: str
    since: str = ""
    until: str = ""


def _form(pattern: str, expected: str, since: str = "", until: str = "") -> _Form:
    return _Form(re.compile(pattern, re.IGNORECASE), expected, since, until)


_FORMS: dict[str, tuple[_Form, ...]] = {
    "cpu-freq": (_form("[^:]*-[^:]*", "MINIMUM-MAXIMUM:GOVERNOR", until="23.02"),),
    "get-user-env": (_form(".+", "--get-user-env without a value", until="24.11"),),
    **dict.fromkeys(_GPUS, (_form("(?:|.*,):.*", _CHECKS["gpus"][1], since="23.11"),)),
    "gres": (
        _form(r"[\w:/]+=\d.*|gres/.*|.*::.*", _CHECKS["gres"][1], since="23.11"),
        _form("gres:.*", "it without gres:", until="23.02"),
    ),
    "nodes": (_form("[^,:]*[,:].*", _CHECKS["nodes"][1], since="23.02"),),
}


def expected_value(flag: str, value: str, version: str = "") -> str:
    """Returns what sbatch expects instead of this value; empty if it accepts the value.

    If no version is given, a value is accepted if at least one version accepts it.
    """
    name = flag[2:]
    if len(value) > _MAX_CHARS:
        return ""
    if name in _CHECKS and not _CHECKS[name][0](value):
        return (meant_mail_types(value) if name == "mail-type" else "") or _CHECKS[name][1]
    form = _form_of(name, value)
    return form.expected if form and version and not is_between(version, form.since, form.until) else ""


def rejecting_versions(flag: str, value: str) -> tuple[str, str]:
    """Returns the versions that reject a value that others accept, and what to write for them.

    An example is `("before 23.11", "NAME[:TYPE][:NUMBER], such as gpu:4")`; both are empty if there are none.
    """
    form = _form_of(flag[2:], value) if len(value) <= _MAX_CHARS else None
    if form is None:
        return "", ""
    if form.since:
        return f"before {form.since}", form.expected
    return f"since {VERSIONS[VERSIONS.index(form.until) + 1]}", form.expected


def _form_of(name: str, value: str) -> _Form | None:
    return next((form for form in _FORMS.get(name, ()) if form.pattern.fullmatch(value)), None)
