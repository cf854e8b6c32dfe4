"""Check of the options for the mail that Slurm sends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, shown
from ddp_hpc.lint.placeholders import marked_placeholder
from ddp_hpc.schedulers.slurm.check_option_values import (
    expected_value,
    meant_mail_types,
    unknown_mail_types,
)

_OF_FAILURE = re.compile(r"(?i)(?:TIME_?OUT|FAIL|ERR|ABORT|NODE_FAIL|OOM|OUT_OF_MEM)")


@check("SLURM019", "warning", "mail that Slurm does not send")
def _no_mail(subject: Subject) -> Iterator[Problem]:
    user = subject.script.value("--mail-user")
    if user and subject.script.value("--mail-type") is None and "mail-type" not in subject.script.text:
        what = "without --mail-type, Slurm sends no mail to this user"
        is_example = re.fullmatch(r"[\w.-]*mail[\w.-]*", user)  # such as emailaddress
        sends_itself = any(c.name in ("mail", "mailx", "sendmail", "mutt") for c in subject.script.commands)
        remedy = "add #SBATCH --mail-type=END,FAIL"
        severity: Severity | None = "note" if sends_itself or is_example else None
        is_to_fill_in = marked_placeholder(user)[:1] not in ("", "$")
        yield Problem(subject.line_of("--mail-user"), what, remedy, severity, is_to_fill_in)
    for d in (one for one in subject.script.read() if one.line not in subject.placeholder_lines):
        if d.flag == "--mail-user" and re.fullmatch(
            r"[\w.-]+\.(?:com|org|net|edu|gov)|(?:[\w-]+\.){2,}[a-z][a-z]", d.value
        ):
            yield Problem(d.line, f"{shown(d.value)} is not an address, as it has no @", "write NAME@HOST")
        is_read = d.flag == "--mail-type" and "$" not in d.value and not expected_value(d.flag, d.value)
        if is_read and (unknown := unknown_mail_types(d.value)):
            what = f"sbatch ignores {shown(','.join(unknown))} in --mail-type"
            remedy = "use the types in sbatch(1), such as BEGIN,END,FAIL"
            if len(unknown) == 1 and (meant := meant_mail_types(unknown[0])):
                remedy = f"write {meant} instead"
            # Slurm also sends the mail of END if the job fails (job_completion_logger in job_mgr.c).
            others = {word.strip().upper() for word in d.value.split(",")} - {
                word.upper() for word in unknown
            }
            # FAIL is also for a time limit, and for whatever else ends the job.
            is_sent = others & {"END", "ALL"} or ("FAIL" in others and all(map(_OF_FAILURE.match, unknown)))
            yield Problem(d.line, what, remedy, "note" if is_sent else None)
