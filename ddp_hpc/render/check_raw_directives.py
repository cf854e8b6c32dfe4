"""Compares the directives given with --directive with those in the rendered script."""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.raw_options import raw_directive
from ddp_hpc.schedulers.scheduler import Scheduler


def check_raw_directives(script: str, job: Job, scheduler: Scheduler) -> None:
    """Checks that the script contains each --directive, and that no other line sets the same option.

    Raises:
        RequestError: the template does not write `directives.options`, or another line sets the same option.
    """
    if not job.directive:
        return
    prefix = f"{scheduler.reader.prefix} "
    lines = [line.removeprefix(prefix) for line in script.split("\n") if line.startswith(prefix)]
    own = [raw_directive(text)[1] for text in job.directive]
    for option in own:
        if option not in lines:
            raise RequestError(
                f"--directive {option!r} was given, but the template does not write `directives.options`. "
                "Add this variable to the template."
            )
        lines.remove(option)
    for option in own:
        names = {*scheduler.writer.option_names(option)}
        for line in lines:
            if names.intersection(scheduler.writer.option_names(line)):
                raise RequestError(
                    f"--directive {option!r} was given, but ddp-hpc writes {line!r} itself. Use the option "
                    "of ddp-hpc render for it, or a profile of your own."
                )
