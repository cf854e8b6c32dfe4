"""The role of a scheduler that writes the directives of rendered scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import on_command_line
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_options import QUEUE_OPTIONS
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.raw_options import raw_directive
from ddp_hpc.schedulers.directive_values import (
    Directives,
    directive_value,
    optional_value,
    refuse_unused,
    walltime_of,
)
from ddp_hpc.sites.site import Site

if TYPE_CHECKING:
    from ddp_hpc.schedulers.scheduler import Scheduler


# Options that may be repeated, because their value names what they set, such as `-l NAME=VALUE`.
_NAMED_IN_VALUE = ("-l", "-W")
# The name of a resource or attribute in the value of an option, such as `select` in `-l select=2:ncpus=4`.
_NAME_IN_VALUE = r"(?:^|[,&\s])([A-Za-z_]\w*)(?==)"


class ScriptWriter:
    """Writes directives. The defaults are those of a machine without a scheduler."""

    template: ClassVar[str]
    launchers: ClassVar[tuple[str, ...]] = ("mpiexec",)
    agent_launcher: ClassVar[str] = ""
    """The launcher that starts torchrun's agent on every node; empty if the script itself starts it."""
    why_omp_num_threads: ClassVar[str] = ""
    """An additional reason why scripts for this scheduler set OMP_NUM_THREADS."""
    passes_arguments: ClassVar[bool] = False
    """Whether the submit command passes arguments to a script: `sbatch SCRIPT ARGUMENTS`."""
    may_lose_nodes: ClassVar[bool] = False
    """Whether the supervisor can replace nodes of a job, or leave them out."""
    queue_options: ClassVar[frozenset[str]] = frozenset(("directive",))
    """The fields of `Job` in `QUEUE_OPTIONS` that `directives` or `submit_options` writes. Other ones are
    refused."""
    instead_of: ClassVar[Mapping[str, str]] = {}
    """For fields that are refused, the reason and what to do instead."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """Returns the values of the script's directives; by default those that most schedulers have.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        if not self.may_lose_nodes:
            option, _, value = job.node_loss_option.partition(" ")
            refuse_unused(site, [(option, value)])
        return {
            "name": directive_value("job name", job.name),
            "walltime": walltime_of(layout, site),
            "queue": optional_value("queue", layout.queue.name),
            "account_option": site.account.option,
            "account": optional_value("account", job.account),
            "options": [],
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        """Returns the directives for those of `queue_options` that `directives` does not cover.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        return []

    def script_directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        """Returns the values of all directives of the script. Options of the job replace those of the site.

        Raises:
            RequestError: the scheduler or the site cannot do what the job requests.
        """
        for name in QUEUE_OPTIONS:
            if (value := getattr(job, name)) and name not in self.queue_options:
                option = on_command_line(name)
                given = f"{option} {value}" if isinstance(value, str) else option
                default = f"ddp-hpc does not write this option for {self.scheduler.title}. Use --directive."
                raise RequestError(f"{given} was given, but {self.instead_of.get(name, default)}")
        values = self.directives(job, site, layout)
        if requested := [*self.submit_options(job, site, layout), *self._raw_options(job)]:
            names = {name for option in requested for name in self.option_names(option)}
            of_site = [
                option for option in values["options"] if not names.intersection(self.option_names(option))
            ]
            values["options"] = [*of_site, *requested]
        return values

    def _raw_options(self, job: Job) -> Iterator[str]:
        scheduler, own = self.scheduler, self.scheduler.prefix
        for text in job.directive:
            prefix, option = raw_directive(text)
            if prefix not in ("", own):
                raise RequestError(
                    f"--directive {text!r} was given, but the directives of {scheduler.title} begin with "
                    f"{own}. Use an option of {scheduler.submit_program}."
                )
            yield option

    def option_names(self, option: str) -> list[str]:
        """Returns the names of the settings in the text of a directive, such as `--mem` or `-l place`."""
        try:
            words = shlex.split(option)
        except ValueError:  # a line of the user's own template has an unclosed quote
            words = option.split()
        pairs = list(self.scheduler.reader.split_options(words)) or [
            (words[0].partition("=")[0], " ".join(words[1:]))
        ]
        return [
            name
            for flag, value in pairs
            for name in (
                [f"{flag} {part}" for part in re.findall(_NAME_IN_VALUE, value)]
                if flag in _NAMED_IN_VALUE
                else [flag]
            )
        ]

    def refuse_qos(self, site: Site) -> str:
        """Returns the reason why the site does not support a QOS; empty if it does."""
        return f"{site.title} uses {self.scheduler.title}, and only Slurm has a QOS"

    def account_placeholder(self, site: Site) -> str:
        """Returns the account option of the submit command with a placeholder, such as `-A PROJECT`."""
        option = site.account.option
        return f"{option}PROJECT" if option.endswith("=") else f"{option} PROJECT"

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[tuple[str, str, str]]:
        """Returns name, value and purpose of each variable that mpiexec needs to start ranks under this
        scheduler.
        """
        return []
