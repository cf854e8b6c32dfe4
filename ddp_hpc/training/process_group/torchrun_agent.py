"""An agent for torchrun that does not restart ranks that have rejected their options."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from ddp_hpc.base.errors import EXIT_WRONG_REQUEST


class _Agent(LocalElasticAgent):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        # After a restart, ranks may exit with this code temporarily, while ranks of a lost node still use
        # the run directory.
        is_first_start = self._remaining_restarts == worker_group.spec.max_restarts
        codes = [failure.exitcode for failure in result.failures.values()]
        if result.state is WorkerState.FAILED and is_first_start and EXIT_WRONG_REQUEST in codes:
            self._remaining_restarts = 0
        return result


def register() -> None:
    """Makes torchrun use this agent: `launch_agent` looks up the class by this name."""
    vars(api)["LocalElasticAgent"] = _Agent


def has_refused(error: ChildFailedError) -> bool:
    """Returns whether the ranks ended because their request is wrong, such as an unknown option."""
    return error.get_first_failure()[1].exitcode == EXIT_WRONG_REQUEST
