"""Lint checks for LSF scripts: options that bsub rejects, and mistakes that LSF does not report."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.errors import nearest
from ddp_hpc.schedulers.base import Problem, ScriptCheck, ScriptOptions, whole_number
from ddp_hpc.schedulers.lsf.parse_directives import LONG, is_known

_BLANK = re.compile(r"#[ \t]+BSUB[ \t]+-[A-Za-z]")


def _unknown_option(script: ScriptOptions) -> Iterator[Problem]:
    for d in script.read():
        if d.flag and not is_known(d.flag):
            shown = ascii(d.flag[:80])
            yield Problem(
                line=d.line,
                what=f"{shown} is not a bsub option{nearest(d.flag[1:80], sorted(LONG))}",
                remedy="use LSF options, which have one dash, such as -n 4 or -gpu num=2; see bsub(1)",
            )


def _nearly_directive(script: ScriptOptions) -> Iterator[Problem]:
    for number, line in enumerate(script.lines, start=1):
        if _BLANK.match(line):
            yield Problem(
                line=number,
                what="bsub may read this line as a directive, although a blank follows the #",
                remedy="write #BSUB for a directive, or ##BSUB for a comment",
            )
        elif re.match(r"#(?!BSUB)(?i:bsub)[ \t]+-[A-Za-z]", line):
            yield Problem(
                line=number,
                what="this line is a comment, since bsub reads only directives in capital letters",
                remedy="write #BSUB",
            )


def _slots_without_span(script: ScriptOptions) -> Iterator[Problem]:
    slots = whole_number((script.value("-n") or "").split(",")[0])
    requirements = [d.value for d in script.read() if d.flag == "-R"]
    if slots and slots > 1 and not any("span[" in value or "cu[" in value for value in requirements):
        lines = [d.line for d in script.read() if d.flag == "-n"]
        yield Problem(
            line=lines[-1],
            what=f"{slots} slots are requested without span, so LSF may take them from any number of hosts",
            remedy='add #BSUB -R "span[hosts=1]" for one host, or "span[ptile=N]" for N slots per host',
        )


def _chain_with_done(script: ScriptOptions) -> Iterator[Problem]:
    for d in script.read():
        if d.flag == "-w" and re.search(r"\bdone\(|^[\"']?[\w-]+[\"']?$", d.value):
            yield Problem(
                line=d.line,
                what="with done(), the job waits forever if the one before it reaches its run limit or fails",
                remedy="use ended(), and let the job check the state of the run when it starts",
            )


CHECKS = (
    ScriptCheck(
        id="LSF001", severity="error", title="an option that bsub does not have", run=_unknown_option
    ),
    ScriptCheck(
        id="LSF002",
        severity="warning",
        title="a line that is nearly a directive",
        run=_nearly_directive,
    ),
    ScriptCheck(
        id="LSF003", severity="note", title="slots on an unknown number of hosts", run=_slots_without_span
    ),
    ScriptCheck(id="LSF004", severity="warning", title="a job chain with done()", run=_chain_with_done),
)
