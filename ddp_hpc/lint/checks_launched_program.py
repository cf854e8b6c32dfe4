"""Checks of the Python program that a script starts, if its file is in the submission directory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain
from ddp_hpc.lint.launch_commands import Start, starts
from ddp_hpc.lint.resumption_of_script import resumption_of_script
from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import text_of

# Each of these reads RANK and WORLD_SIZE from the environment. Without them, init_process_group() fails, and
# the Hugging Face Trainer, Accelerate and DeepSpeed train separately on each rank.
_NEEDS_VARIABLES = re.compile(
    r"\binit_process_group\(|\bAccelerator\(|\bTrainingArguments\b|\bdeepspeed\.(?:init|initialize)"
)
# Programs that get their rank from another source, directly or through a library.
_DETECTS_RANKS = re.compile(
    r"SLURM_PROCID|SLURM_LOCALID|PMI_RANK|PMIX_RANK|PALS_|OMPI_COMM|MV2_COMM|FLUX_TASK|mpi4py|\bddp_hpc\b|"
    r"submitit|idr_torch|environ\[['\"]RANK['\"]\]\s*=|setdefault\(['\"]RANK['\"]|\brank=|"
    r"init_method=['\"](?:tcp|file):"
)


@check("RANK016", "warning", "ranks without the variables of torchrun")
def _without_variables(subject: Subject) -> Iterator[Problem]:
    if re.search(r"\bRANK=", "\n".join(subject.script.lines)):
        return
    for start in starts(subject):
        is_python = start.is_launched and start.program == "python" and not start.is_torchrun
        if re.search(r"ddp[-_]hpc[ .]exec", start.command.text):
            continue
        if not is_python or start.launcher_hides_options or (start.num_ranks or 1) < 2:
            continue
        if needs := _needs_variables(start):
            yield Problem(
                start.command.line,
                f"{start.num_ranks} ranks are started, but {plain(needs)} needs the variables of torchrun, "
                "such as RANK, which this launcher does not set",
                f"start `ddp-hpc exec -- python {plain(needs)}`, or start torchrun once per node",
            )


def _needs_variables(start: Start) -> str:
    """Returns the name of the program's file if it needs the variables; empty if not, or if it is unknown."""
    program, directory = program_of(start.words), start.subject.directory
    if program is None or program.kind != "file" or directory is None or "$" in program.name:
        return ""
    text = (text_of(directory / program.name) or b"").decode("utf-8", "replace")
    return program.name if _NEEDS_VARIABLES.search(text) and not _DETECTS_RANKS.search(text) else ""


@check("JOB020", "warning", "a program that is not resumed after the walltime")
def _not_resumed(subject: Subject) -> Iterator[Problem]:
    if subject.directory is None or not subject.scheduler.has_queue:
        return
    resumption = resumption_of_script(subject.script, subject.directory)
    if resumption is not None and (warning := resumption.warning(subject.walltime_s)):
        yield Problem(
            subject.script.supervised.line if subject.script.supervised else 1,
            warning,
            resumption.how_to_resume,
        )
