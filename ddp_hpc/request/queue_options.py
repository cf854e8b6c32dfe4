"""Options of a job that become directives: memory, dependencies, mail, arrays and others, and their checks.

The formats are the same for all schedulers. Each scheduler translates them to its own options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.base.record import record

QUEUE_OPTIONS = (
    "mem",
    "exclusive",
    "constraint",
    "reservation",
    "dependency",
    "mail_user",
    "mail_type",
    "array",
    "directive",
)
"""The fields of `Job` that become directives, and that not every scheduler has."""

DEPENDENCIES = ("after", "afterok", "afternotok", "afterany")
MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "ALL")
# sbatch.1, --mail-type
SLURM_MAIL_TYPES = (
    *("REQUEUE", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80"),
    *("TIME_LIMIT_50", "ARRAY_TASKS"),
)

# PBS: qsub -m
_MAIL_POINTS = {"BEGIN": "b", "END": "e", "FAIL": "a"}
_INDICES = r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([1-9][0-9]{0,6}))?)?"
_MEMORY = r"(?i)([1-9][0-9]{0,8})([KMGT])(?:i?B)?"
_CONSTRAINT = r"[A-Za-z0-9(\[][A-Za-z0-9_.:@+,=&|/()\[\]*-]*"
_RESERVATION = r"[A-Za-z0-9][A-Za-z0-9_.:@+,#-]*"
_JOB_ID = r"[A-Za-z0-9][A-Za-z0-9_.\[\]-]*"
_MAIL_USER = r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:@[A-Za-z0-9][A-Za-z0-9.-]*)?"


def check_queue_options(given: Mapping[str, object]) -> None:
    """Checks the values of the fields in `QUEUE_OPTIONS`; `given` maps field names to values.

    Raises:
        RequestError: a value has an invalid format.
    """
    text = {name: str(given[name] or "") for name in QUEUE_OPTIONS if name != "directive"}
    if text["mem"] and text["mem"] != "0":
        parse_memory(text["mem"])
    if text["dependency"]:
        check_dependency(text["dependency"])
    if text["array"]:
        parse_array(text["array"])
    if text["mail_type"]:
        parse_mail_types(text["mail_type"])
    if text["mail_user"] and not text["mail_type"]:
        raise RequestError(
            f"--mail-user {_shown(text['mail_user'])} was given without --mail-type, so no mail would be "
            "sent. Add for example --mail-type END,FAIL."
        )
    for name, pattern, example in (
        ("constraint", _CONSTRAINT, "a feature of nodes, such as a100"),
        ("reservation", _RESERVATION, "the name of a reservation"),
        ("mail_user", _MAIL_USER, "one mail address or user name"),
    ):
        if text[name] and not re.fullmatch(pattern, text[name]):
            raise RequestError(
                f"{on_command_line(name)} {_shown(text[name])} cannot be written into a directive. "
                f"Give {example}, without blanks or quotes."
            )


def parse_memory(text: str) -> tuple[int, str]:
    """Returns the number and the unit (K, M, G or T, multiples of 1024) of a memory size such as 64G.

    Raises:
        RequestError: the text has another format.
    """
    match = re.fullmatch(_MEMORY, text)
    if match is None:
        raise RequestError(
            f"--mem {_shown(text)} is not a whole number with a unit (K, M, G or T). Use for example 64G."
        )
    return int(match[1]), match[2].upper()


@record
class Array:
    """The indices of a job array, and the maximum number of its jobs that run at the same time, or 0."""

    text: str
    ranges: tuple[range, ...]
    limit: str


def parse_array(text: str) -> Array:
    """Returns the array of INDICES[%LIMIT], such as 0-3, 1,5,7, 0-30:10 or 0-99%10.

    Raises:
        RequestError: the text has another format, or the last index is less than the first.
    """
    indices, percent, limit = text.partition("%")
    matches = [re.fullmatch(_INDICES, part) for part in indices.split(",")]
    ranges = tuple(range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)) for m in matches if m)
    is_limit = not percent or re.fullmatch("[1-9][0-9]{0,6}", limit)
    if None in matches or not is_limit or not all(ranges):
        raise RequestError(
            f"--array {_shown(text)} is not a list of indices. Use for example 0-3, 1,5,7, or 0-99%10 for at "
            "most 10 jobs at the same time."
        )
    return Array(text=indices, ranges=ranges, limit=limit)


def one_range(text: str, scheduler: str) -> Array:
    """Returns the array, for schedulers whose arrays are a single range of indices.

    Raises:
        RequestError: the array is not a single range with at least two indices.
    """
    array = parse_array(text)
    if len(array.ranges) > 1 or array.ranges[0].stop - array.ranges[0].start < 2:
        raise RequestError(
            f"--array {text} was given, but {scheduler} supports only a single range with at least two "
            "indices. Use for example 0-3."
        )
    return array


def check_dependency(text: str) -> None:
    """Checks that the text has the format `TYPE:JOBID[:JOBID...][,...]`, with types such as afterok.

    Raises:
        RequestError: the text has another format.
    """
    for part in text.split(","):
        kind, *jobs = part.split(":")
        if kind not in DEPENDENCIES:
            raise RequestError(
                f"--dependency has the unknown type {_shown(kind)}{nearest(kind[:80], DEPENDENCIES)}. Use "
                f"{', '.join(DEPENDENCIES)}, such as afterok:123."
            )
        if not jobs or not all(re.fullmatch(_JOB_ID, job) for job in jobs):
            raise RequestError(
                f"--dependency {_shown(part)} does not name jobs. Use {kind}:JOBID, with IDs that contain "
                "only letters, digits and _ . - [ ]."
            )


def parse_mail_types(text: str) -> tuple[str, ...]:
    """Returns the types of a list such as END,FAIL, in capital letters.

    Raises:
        RequestError: a type is unknown.
    """
    known = (*MAIL_TYPES, *SLURM_MAIL_TYPES)
    types = tuple(dict.fromkeys(word.upper() for word in text.split(",")))
    for name in types:
        if name not in known:
            raise RequestError(
                f"--mail-type has the unknown type {_shown(name)}{nearest(name[:80], known)}. Use a list of "
                f"{', '.join(MAIL_TYPES)}, such as END,FAIL."
            )
    return types


def mail_points(types: Sequence[str], scheduler: str) -> str:
    """Returns the argument of `qsub -m` for types of --mail-type.

    Raises:
        RequestError: a type exists only in Slurm, or NONE is combined with others.
    """
    for name in types:
        if name in SLURM_MAIL_TYPES:
            raise RequestError(
                f"--mail-type {name} was given, but {scheduler} has no such event. Use BEGIN, END, FAIL or "
                "ALL."
            )
    if "NONE" in types and len(types) > 1:
        raise RequestError(f"--mail-type {','.join(types)} combines NONE with other types. Omit one of them.")
    if "NONE" in types:
        return "n"
    return "".join(point for name, point in sorted(_MAIL_POINTS.items()) if name in types or "ALL" in types)


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")
