"""`python -m ddp_hpc.torchrun`: torchrun with the rendezvous backend `ddp-hpc`, for `torchrun_script.sh`.

The module accepts the arguments of torchrun. If torchrun's agent is killed, its ranks are ended too. Ranks
that exit with code 2 because of an invalid request are not restarted.
"""

from __future__ import annotations

import gc
import sys

from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, DdpHpcError
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.rendezvous.end_with_parent import run_guarded


def main() -> None:
    """Runs torchrun with the arguments of this process; see the module's docstring."""
    sys.exit(run_guarded(_run_agent, "torchrun's agent"))


def _run_agent() -> None:
    gc.disable()  # see ddp_hpc.train._import_torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ddp_hpc.training.process_group import torchrun_agent, torchrun_rendezvous

    gc.freeze()
    gc.enable()
    torchrun_rendezvous.register()
    torchrun_agent.register()
    try:
        run.main(sys.argv[1:])
    except DdpHpcError as error:
        sys.stderr.write(f"[{short_hostname()}] error: {error}\n")
        sys.exit(error.exit_code)
    except ChildFailedError as error:
        if not torchrun_agent.has_refused(error):
            raise
        # The ranks have printed the reason.
        sys.exit(EXIT_WRONG_REQUEST)


if __name__ == "__main__":
    main()
