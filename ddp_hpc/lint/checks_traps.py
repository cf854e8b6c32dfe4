"""Check of a trap for the signal before the end of a job, which bash runs only between its commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.blocks import is_in_background
from ddp_hpc.lint.check_registry import Problem, Subject, check
from ddp_hpc.lint.checks_job_steps import is_in_loop

# The signals that a scheduler sends before a job ends.
_SIGTERM = frozenset(("TERM", "SIGTERM", "15"))
_SIGNALS = frozenset(("USR1", "SIGUSR1", "10", "USR2", "SIGUSR2", "12")) | _SIGTERM


@check("RANK006", "warning", "a trap that runs only after the launcher has ended")
def _trap_and_foreground(subject: Subject) -> Iterator[Problem]:
    commands, is_for_shell = subject.script.commands, "B:" in (subject.script.value("--signal") or "")
    # At the time limit, the launcher gets SIGTERM, too, so it ends, and the trap runs.
    signals = _SIGNALS if is_for_shell else _SIGNALS - _SIGTERM
    if subject.scheduler.name == "slurm" and not is_for_shell:
        return  # nothing sends the other signals to the batch shell; SLURM008 and SLURM009 report this
    traps = [c for c in commands if c.name == "trap" and signals & {w.upper() for w in c.words[2:]}]
    # A trap that also covers EXIT is for cleaning up, so it may run late.
    if not traps or traps[0].words[1:2] == ("",) or {"EXIT", "0"} & {*traps[0].words}:
        return
    # Only the last launch is checked: earlier ones are usually short.
    last = list(subject.in_foreground("srun|mpiexec|mpirun|torchrun|python3?"))[-1:]
    others = list(subject.in_foreground("snakemake|nextflow|matlab|rscript|julia"))[-1:]
    for command in last + others:
        starts_program = command.name in ("torchrun", "python", "python3") or (
            command in others or (command.launched and command.launched[1:2] != ("-c",))
        )
        is_read = subject.script.lines[command.line - 2].rstrip().endswith("<(")  # its output is
        before = [c for c in commands if traps[0].line < c.line < command.line]
        in_background = [c for c in before if c.ends == "&"]
        is_started = any(c.launched or re.match(r"python|bash|srun|mpi", c.name) for c in in_background)
        has_waited = is_started and any(c.name == "wait" for c in before)
        is_behind = has_waited or is_in_background(subject.script.lines, command.line)
        if command.line > traps[0].line and starts_program and not (is_read or is_behind):
            what = f"{command.name} runs in the foreground, so the trap of line {traps[0].line} runs after it"
            remedy = "start it in the background and wait for it: ... & wait $!"
            is_short = is_in_loop(subject, command) and _sets_flag(subject, traps[0].words[1])
            yield Problem(command.line, what, remedy, "note" if command in others or is_short else None)


def _sets_flag(subject: Subject, code: str) -> bool:
    """Returns whether the code of a trap, or its function, only prints, and sets a variable or a file."""
    function = re.search(
        rf"(?ms)^[ \t]*(?:function )?{re.escape(code)}\s*(?:\(\))?\s*\{{(.*?)(?:^|;)\s*\}}",
        subject.script.text,
    )
    parts = re.split(r"[;\n]+", function[1] if function else code)
    return all(re.match(r"\s*(?:$|#|echo\s|touch\s|\w+=)", part) for part in parts)
