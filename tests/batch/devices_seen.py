"""Which devices of a node each rank of a job script sees, by the manuals of the launchers."""

from __future__ import annotations

import re
import shlex

_VISIBLE = re.compile(r"^\s*(?:export|env) (?:CUDA|HIP|ROCR)_VISIBLE_DEVICES=([0-9,]+)", re.MULTILINE)


def num_devices_seen(script: str, devices: int) -> int:
    """The number of devices that each rank sees on nodes of `devices` devices.

    srun(1): `--gpus-per-task=N` implies `--gpu-bind=per_task:N`, and --gpu-bind restricts each task to the
    GPUs that it is bound to, except for `none`. The other launchers pass on what they see.
    """
    if listed := _VISIBLE.findall(script):
        devices = min(devices, len(listed[-1].split(",")))
    # The options of the launch line, which is continued on the next lines.
    words = shlex.split(script[script.index("\nexec python -m ddp_hpc.job ") :].replace("\\\n", " "))
    launcher = words[words.index("--") + 1 :]
    options = dict(word.partition("=")[::2] for word in launcher if word.startswith("--gpu"))
    if launcher[0] != "srun" or options.get("--gpu-bind") == "none":
        return devices
    per_task = options.get("--gpus-per-task")
    if per_task:
        return int(per_task)
    return 1 if "--gpu-bind" in options else devices
