"""Select the checks to run, and remove the findings that comments in the script silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.lint.check_registry import CHECKS, Check, LintFinding

_COMMENT = re.compile(r"#\s*ddp-hpc:\s*(ignore|ignore-file)\[([A-Za-z0-9_, ]{1,500})\]")
_MAX_CHARS = 4000


def chosen_checks(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Check]:
    """Returns the checks that are selected and not ignored; without `select`, all checks are selected.

    `select` and `ignore` contain ids of checks, or beginnings of ids. If both match, the longer one wins:
    `--select SLURM --ignore SLURM014` leaves out one check, and `--ignore SLURM --select SLURM002` runs one.

    Raises:
        RequestError: no check has this id or beginning.
    """
    for text in (*select, *ignore):
        if not any(check.startswith(text) for check in CHECKS):
            raise RequestError(
                f"no lint check is called {text!r}{nearest(text, list(CHECKS))}. See ddp-hpc lint --list."
            )

    def longest(id_: str, beginnings: Sequence[str]) -> int:
        return max((len(text) for text in beginnings if id_.startswith(text)), default=-1)

    everything = -1 if select else 0
    return [
        check
        for check in CHECKS.values()
        if max(longest(check.id, select), everything) > longest(check.id, ignore)
    ]


def split_codes(values: Iterable[str]) -> tuple[str, ...]:
    """Returns the ids in values such as `SLURM,RANK008`, in capital letters."""
    return tuple(code.strip().upper() for value in values for code in value.split(",") if code.strip())


def without_ignored(findings: Iterable[LintFinding], lines: Sequence[str]) -> Iterator[LintFinding]:
    """Yields the findings that no comment of the script silences.

    `# ddp-hpc: ignore[ID, ID]` after a command applies to this line; on a line of its own, it applies to the
    next line that is not such a comment. `# ddp-hpc: ignore-file[ID]` applies to the whole script.
    """
    of_line: dict[int, set[str]] = {}
    of_file: set[str] = set()
    waiting: set[str] = set()
    for number, line in enumerate(lines, start=1):
        match = _COMMENT.search(line, 0, _MAX_CHARS) if "ddp-hpc:" in line else None
        codes = set(split_codes([match[2]])) if match else set()
        if match and match[1] == "ignore-file":
            of_file |= codes
        elif match and not line[: match.start()].strip():
            waiting |= codes
        elif codes or waiting:
            of_line[number] = codes | waiting
            waiting = set()
    for finding in findings:
        if not _is_named(finding.check, of_file | of_line.get(finding.line, set())):
            yield finding


def _is_named(check: str, codes: Collection[str]) -> bool:
    return any(check.startswith(code) for code in codes)
