"""`python -m ddp_hpc.torchrun`: torchrun with the rendezvous backend `ddp-hpc`, for `torchrun_script.sh`.

The module accepts the arguments of torchrun. If torchrun's agent is killed, its ranks are ended too. Ranks
that exit with code 2 because of an invalid request are not restarted.
"""

from __future__ import annotations

import gc
import sys

from ddp_hpc.rendezvous.end_with_parent import run_guarded


def main() -> None:
    """Runs torchrun with the arguments of this process; see the module's docstring."""
    sys.exit(run_guarded(_run_agent, "torchrun's agent"))


def _run_agent() -> None:
    gc.disable()  # see ddp_hpc.train._import_torch
    from ddp_hpc.torchrun import agent

    gc.freeze()
    gc.enable()
    agent.run(sys.argv[1:])


if __name__ == "__main__":
    main()
