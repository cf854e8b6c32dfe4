"""torchrun with an agent that does not restart ranks that have rejected their options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, DdpHpcError
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.torchrun import rendezvous_backend


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


def run(arguments: Sequence[str]) -> None:
    """Runs torchrun with these arguments; exits with code 2 if the request of the ranks is wrong."""
    rendezvous_backend.register()
    vars(api)["LocalElasticAgent"] = _Agent  # `launch_agent` looks up the class by this name
    try:
        torchrun.main(arguments)
    except DdpHpcError as error:
        sys.stderr.write(f"[{short_hostname()}] error: {error}\n")
        sys.exit(error.exit_code)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != EXIT_WRONG_REQUEST:
            raise
        # The ranks have printed the reason, such as an unknown option.
        sys.exit(EXIT_WRONG_REQUEST)
