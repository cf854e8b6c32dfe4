"""A scheduler: its name, and an object for each of its four roles.

The rest of the project calls the roles of a `Scheduler` and never compares its name.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ddp_hpc.base.record import record

if TYPE_CHECKING:
    from ddp_hpc.schedulers.commands import Commands
    from ddp_hpc.schedulers.inside_job import InsideJob
    from ddp_hpc.schedulers.reader import ScriptReader
    from ddp_hpc.schedulers.writer import ScriptWriter

Role = Literal["writer", "reader", "commands", "inside_job"]


@record
class Scheduler:
    """One scheduler.

    `name` is its name in profiles, and `title` its name in messages. `submit_program` queues a script; if
    `has_queue` is False, it runs the script immediately on this machine. `prefix` begins directives, such as
    `#SBATCH`. `query_command` reports the state of a job, and its presence on the PATH shows that this
    machine has the scheduler; it is empty if jobs of this scheduler cannot be monitored.

    Each of the `roles` is the class ROLE in the module of this name in `ddp_hpc.schedulers.NAME`. The
    defaults of all roles are in the modules of these names in `ddp_hpc.schedulers`. Modules are imported when
    they are used, so that a command imports only the scheduler and the roles that it needs.
    """

    name: str
    title: str
    submit_program: str
    prefix: str = ""
    roles: tuple[Role, ...]
    query_command: str = ""
    has_queue: bool = True

    @cached_property
    def writer(self) -> ScriptWriter:
        """Writes the directives of rendered scripts."""
        writer: ScriptWriter = self._role("writer", "ScriptWriter")
        return writer

    @cached_property
    def reader(self) -> ScriptReader:
        """Reads the directives of users' scripts."""
        reader: ScriptReader = self._role("reader", "ScriptReader")
        return reader

    @cached_property
    def commands(self) -> Commands:
        """Submits, reports and cancels jobs with the commands of this machine."""
        commands: Commands = self._role("commands", "Commands")
        return commands

    @cached_property
    def inside_job(self) -> InsideJob:
        """Describes the job in which this process runs."""
        inside_job: InsideJob = self._role("inside_job", "InsideJob")
        return inside_job

    def _role(self, role: Role, default: str) -> Any:
        if role in self.roles:
            return import_module(f"ddp_hpc.schedulers.{self.name}.{role}").ROLE(self)
        return getattr(import_module(f"ddp_hpc.schedulers.{role}"), default)(self)
