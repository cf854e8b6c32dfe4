"""Converts messages that were written for the command line, so that they name the arguments of library
functions.
"""

from __future__ import annotations

import re

# Arguments whose names differ from those of the options of ddp_hpc.train.
_RENAMED = {
    "data": "data",
    "hang-timeout": "hang_timeout_s",
    "init-timeout": "init_timeout_s",
    "snapshot-dir": "folder",
    "snapshot-every-s": "every_s",
    "snapshot-every-steps": "every_steps",
    "timeout": "timeout_s",
    "trace-max-mib": "max_mib",
}
_SAME = (
    "activation-checkpointing", "amp", "backend", "batch-size", "bucket-mib", "compress-gradients",
    "cpu-offload", "device", "discovery", "epochs", "find-unused-parameters", "keep", "max-steps",
    "mesh", "optimizer", "seed", "shuffle", "src-key", "static-graph", "strategy", "sync-batchnorm",
    "tgt-key", "threads", "workers",
)  # fmt: skip
_NAMES = {name: name.replace("-", "_") for name in _SAME} | _RENAMED
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_COMMAND = re.compile(r"python -m |ddp-hpc |torchrun |mpiexec |srun ")


def with_argument_names(text: str) -> str:
    """Returns a message of this package with `batch_size` instead of `--batch-size`, for example.

    Command lines in the message do not change.
    """
    command = _COMMAND.search(text)
    begin = command.start() if command else len(text)
    return _OPTION.sub(lambda found: _NAMES.get(found[1], found[0]), text[:begin]) + text[begin:]
