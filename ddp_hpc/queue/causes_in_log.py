"""The causes of a job's end that only the log shows.

The script ends with an ordinary exit code even if, for example, the kernel killed a task for lack of memory.
"""

from __future__ import annotations

import re

_CAUSES = {
    "walltime": r"DUE TO TIME LIMIT|=>> PBS: job killed: walltime",
    # slurmstepd writes `oom-kill event(s)` in Slurm 22.05, and `oom_kill event` in 26.05. The other messages
    # are those of OverMemoryKill, those for mem and vmem in OpenPBS's resmom/linux/mom_mach.c, and those of
    # PyTorch and Python.
    "memory": (
        r"oom[-_]kill event|: Out Of Memory$|exceeded memory limit .{0,80}, being killed|"
        r"Exceeded (?:job|step) memory limit|=>> PBS: job killed: v?mem|"
        r"DefaultCPUAllocator: can't allocate memory|^MemoryError\b"
    ),
    "node": r"Node failure on |DUE TO NODE FAILURE",
    "preempted": r"DUE TO PREEMPTION",
    # PyTorch's allocators print these messages. Since PyTorch 2.5, the exception is torch.OutOfMemoryError.
    "gpu memory": r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError: ",
    # Messages of OpenSSH, with which MPICH's mpiexec starts ranks on other nodes.
    "ssh": (
        r"^ssh: connect to host \S+ port [0-9]+: |^Host key verification failed|"
        r"Permission denied \(publickey"
    ),
    "disk": r"No space left on device|Disk quota exceeded",
    # The first message comes from torch.distributed (2.11 and 2.13).
    "variables": (
        r"environment variable \w+ expected, but not set|"
        r"^KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
    ),
}
_TRAINED_ALONE = re.compile(
    r"^\[[^]\s]+\] warning: "
    r"([0-9]+ ranks were started, but rank 0's program (?:has not opened a process group|uses ).*)",
    re.MULTILINE,
)
_NOT_SAVED = re.compile(
    r"^(?:\[[^]\n]+\] )?WARNING: (the snapshot of step ([0-9]+)\b.* was NOT saved in .*)", re.MULTILINE
)
_LOST_NODE = re.compile(r"Node failure on ([A-Za-z0-9_.-]+)")


def cause_in(log: str) -> str:
    """Returns the cause that the log shows; empty if it shows none."""
    return next((cause for cause, text in _CAUSES.items() if re.search(text, log, re.MULTILINE)), "")


def lost_node_in(log: str) -> str:
    """Returns the node that Slurm reports as lost; empty if it reports none."""
    match = _LOST_NODE.search(log)
    return match[1] if match else ""


def warning_in(log: str) -> str:
    """Returns the warning of `ddp-hpc exec` that ranks may have trained alone; empty if the log has none.

    Such a job can end without an error, with results as if it had run on one GPU.
    """
    match = _TRAINED_ALONE.search(log)
    return match[1] if match else ""


def not_saved_in(log: str, saved_step: int) -> str:
    """Returns the trainer's last warning that a snapshot was not saved; empty if a later one was saved.

    The training continues, so its user still has time to free space on the disk.
    """
    text, step = (_NOT_SAVED.findall(log) or [("", 0)])[-1]
    return text if int(step) > saved_step else ""
