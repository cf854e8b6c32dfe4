"""An example of docs/examples/rpc with a fault planted in one rank, in the middle of the training.

`PLANT=kill:1 python planted.py with_rpc.py` kills rank 1 in its 20th step, `stop:1` stops it there, and
`raise:1` raises an error in it. On rank 0, the server, the fault occurs with the 20th gradient.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ddp_hpc import ConnectedWorld

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "rpc"
WHEN = 20


def plant() -> None:
    # As in the examples, but they do it before torch is imported, which has already happened here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import ranks
    import regression

    kind, rank = os.environ["PLANT"].split(":")
    at_as_it_is, push_as_it_is = ranks.at, regression.ParameterServer.push

    def fail() -> None:
        if kind == "raise":
            raise ValueError("planted in one rank")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def at(world: ConnectedWorld) -> Callable[[int], None]:
        def step_begins(step: int) -> None:
            if step == WHEN and world.rank == int(rank):
                fail()
            at_as_it_is(world)(step)

        return step_begins

    once = [rank == "0"]

    def push(self: regression.ParameterServer, gradient: object) -> None:
        # Gradients arrive in several threads: the 20th and the 21st can be handled at the same time.
        if self.num_updates >= WHEN and once[0]:
            once[0] = False
            fail()
        push_as_it_is(self, gradient)

    ranks.at, regression.ParameterServer.push = at, push


def main(argv: list[str]) -> None:
    sys.argv = argv
    sys.path.insert(0, str(FOLDER))
    if "PLANT" in os.environ:
        plant()
    runpy.run_path(str(FOLDER / argv[0]), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
