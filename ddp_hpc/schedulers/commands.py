"""The role of a scheduler whose commands on this machine submit, report and cancel jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from ddp_hpc.schedulers.script_options import ScriptOptions

if TYPE_CHECKING:
    from ddp_hpc.schedulers.device_share import DeviceShare
    from ddp_hpc.schedulers.job_state import JobState
    from ddp_hpc.schedulers.scheduler import Scheduler


class JobCommands(Protocol):
    """The functions in the module `query_and_cancel` of a scheduler, which query and cancel jobs."""

    def read_job(self, job_id: str) -> JobState | None:
        """Returns the state of a job; None if the scheduler does not know it. Refuses a job array."""
        ...

    def read_jobs(self, job_id: str) -> list[JobState]:
        """Returns the state of a job, or those of the tasks of a job array; empty if it is unknown."""
        ...

    def job_id_of(self, answer: str) -> str | None:
        """Returns the job id in the last line that the submit command printed."""
        ...

    def cancel(self, job_id: str, tasks: Sequence[str] = ()) -> str:
        """Cancels a job, or `tasks` of a job array, which are all those that have not ended.

        Returns the scheduler's error message, empty on success.
        """
        ...


class Commands:
    """Submits jobs and asks about them. The defaults are those of a scheduler without such commands."""

    interactive_command: ClassVar[str] = ""
    """The command that requests an interactive allocation; empty if there is none."""
    start_without_ssh: ClassVar[str] = ""
    """What to do if mpiexec cannot start ranks on other nodes with ssh; empty for general advice."""
    job_id_pattern: ClassVar[re.Pattern[str]] = re.compile("")
    """A pattern that occurs only in job ids of this scheduler."""
    programs: ClassVar[tuple[str, ...]] = ()
    """The commands that a login node must have; the first one submits a script."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def umask_arguments(self, script: ScriptOptions, umask: int) -> list[str]:
        """Returns the options of the submit command that give a job the user's umask, if `script` is one of
        ddp-hpc that sets the default; by default none, for a scheduler that passes the umask itself.
        """
        return []

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        """Asks the scheduler of this machine which share of a node comes with one GPU of a queue; None if it
        does not say.

        Raises:
            RequestError: the nodes have fewer GPUs than requested.
        """
        return None

    def installed_version(self) -> str:
        """Returns the version of the scheduler's commands on this machine; empty if it is unknown."""
        return ""

    def account_arguments(self, account: str, option: str) -> list[str]:
        """Returns the arguments of the submit command that set the account, with the profile's `option`."""
        *before, last = (option or "-A").split()
        return [*before, f"{last}{account}"] if last.endswith("=") else [last, account]

    def submit_argv(self, script: str, options: Sequence[str]) -> list[str]:
        """Returns the command line that queues a script."""
        raise NotImplementedError

    def exclude_arguments(self, hosts: Sequence[str]) -> list[str]:
        """Returns the arguments of the submit command that exclude these hosts, if it has any."""
        return []

    def exclude_host(self, host: str) -> str:
        """Returns the submit command that excludes this host; empty if the scheduler cannot exclude hosts."""
        arguments = self.exclude_arguments([host])
        return " ".join([self.programs[0], *arguments]) if arguments else ""

    def array_options(self, index: str) -> list[str]:
        """Returns the options of the submit command for a job that continues this task of an array."""
        return []

    def job_commands(self) -> JobCommands:
        """Returns the module with the commands for jobs; only for a scheduler with a `query_command`."""
        package = type(self).__module__.rpartition(".")[0]
        return cast("JobCommands", import_module(f"{package}.query_and_cancel"))
