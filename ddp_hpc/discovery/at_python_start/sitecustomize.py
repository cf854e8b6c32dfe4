"""Python runs this module at its start, because `ddp-hpc exec` adds its directory to PYTHONPATH.

It makes the program of a rank write the stacks of its threads to a file when it receives a signal, and names
the pipe with which the flight record of NCCL is requested. The program can be run by another Python than
ddp-hpc, so this module imports nothing of it and works with old versions. Afterwards, the sitecustomize of
the environment runs, as it would without this one.
"""

import contextlib
import importlib
import os
import sys


def _write_stacks_after_signal() -> None:
    import faulthandler

    number, file = (int(word) for word in os.environ.pop("DDP_HPC_STACKS").split())
    os.fstat(file)  # the file may have been closed
    faulthandler.register(number, file=file, all_threads=True, chain=False)


def _name_pipe_for_nccl() -> None:
    stem = os.environ.pop("DDP_HPC_NCCL_PIPE")
    if os.path.isdir(os.path.dirname(stem)):  # noqa: PTH112, PTH120 - Python starts faster
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", stem)


def _run_next_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - Python starts faster
    sys.path[:] = [entry for entry in sys.path if entry != here]
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != here]
    os.environ.pop("PYTHONPATH", None)
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise  # it imports a missing module, which Python prints
        if own is not None:
            sys.modules["sitecustomize"] = own


with contextlib.suppress(Exception):  # the program must run also without stacks
    _write_stacks_after_signal()
with contextlib.suppress(Exception):
    _name_pipe_for_nccl()
_run_next_sitecustomize()
