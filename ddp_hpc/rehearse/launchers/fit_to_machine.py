"""Fits a launch to one machine: starts fewer ranks, and changes their commands and environments."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ddp_hpc.base.job_variables import SIMULATED_NODE
from ddp_hpc.rehearse.settings import JsonFile

# Ranks must not see these variables, which name a network interface that this machine does not have.
_FABRIC_VARIABLES = (
    "DDP_HPC_FABRIC_SUFFIX",
    "DDP_HPC_FABRIC_INTERFACE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
STEP_SCRIPT, _TRAINER = "torchrun_script.sh", "ddp_hpc.train"
HERE = "127.0.0.1"
# The first argument of torchrun_script.sh if it names a program; otherwise, ddp_hpc.train runs.
_PROGRAM = re.compile(r"-m|python[0-9.]*|.*\.py|.*/.*")


@dataclass(frozen=True, kw_only=True)
class Limits(JsonFile):
    """Limits of a launch. The default values mean no limits.

    Of the `requested_nodes` that the script expects, `num_nodes` are simulated. `arguments` are added to the
    command of the ranks. `trainer_arguments`, an option and its value, are added only if the command is
    `ddp_hpc.train` without this option. `cpus` is the number of CPUs of this machine that the ranks share.
    The ranks are killed when the process `keeper_pid` has ended. `fail` is what fails, as in `--fail`, and
    `fail_after_s` is when it fails after the start of the ranks; None: after the first checkpoint.
    """

    FILE: ClassVar[str] = "limits.json"

    ranks_per_node: int = 0
    num_nodes: int = 0
    requested_nodes: int = 0
    threads: int = 0
    cpus: int = 0
    arguments: tuple[str, ...] = ()
    trainer_arguments: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    keeper_pid: int = 0
    fail: str = ""
    fail_after_s: float | None = None

    def counts(self, num_ranks: int, per_node: int) -> list[int]:
        """Returns the number of ranks to start on each node; prints a message if some are not started."""
        full, rest = divmod(num_ranks, per_node)
        num_nodes = full + bool(rest)
        if not self.ranks_per_node:
            return [per_node] * full + [rest] * bool(rest)
        # List only the simulated nodes, since the script may request thousands.
        here = range(min(num_nodes, self.num_nodes))
        counts = [min(per_node if node < full else rest, self.ranks_per_node) for node in here]
        if sum(counts) < num_ranks:
            sys.stderr.write(
                f"rehearse: starting {sum(counts)} of {num_ranks} ranks, because "
                f"{self.num_nodes} nodes with at most {self.ranks_per_node} ranks each are simulated\n"
            )
        return counts

    def command(self, argv: Sequence[str]) -> list[str]:
        """Returns the command of a rank with additional arguments and without names of simulated nodes."""
        if not self.ranks_per_node or runs_guard(argv):
            return list(argv)
        added = list(self.arguments)
        if runs_trainer(argv):
            option = self.trainer_arguments[:1]
            if option and not any(word.startswith(option[0]) for word in (*argv, *added)):
                added += self.trainer_arguments
        return [self._local(word) for word in argv] + added

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of a rank: no GPUs, no fast network, and MASTER_ADDR on this machine."""
        if not self.ranks_per_node:
            return dict(environ)
        kept = {name: value for name, value in environ.items() if name not in _FABRIC_VARIABLES}
        kept["MASTER_ADDR"] = self._local(kept.get("MASTER_ADDR") or HERE)
        kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self.threads)}
        # A rank would report that it has fewer CPUs than the job has requested.
        kept["DDP_HPC_CPUS_PER_NODE"] = str(self.cpus)
        # From these variables, scripts take the number of ranks per node that torchrun starts.
        for name in ("DDP_HPC_RANKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
            if kept.get(name, "").isdecimal():
                kept[name] = str(min(int(kept[name]), self.ranks_per_node))
        return kept

    def of_node(self, name: str) -> dict[str, str]:
        """Returns the variables of the ranks on a node, which report its name as that of their host."""
        return {SIMULATED_NODE: name.partition(".")[0]} if self.ranks_per_node else {}

    def _local(self, word: str) -> str:
        """Replaces the name of a simulated node with 127.0.0.1; a port is kept, as in `node1:29500`."""
        for node in self.nodes:
            word = re.sub(rf"(?<![\w.-]){re.escape(node)}(\.[\w.-]+)?(?=:\d|$)", HERE, word)
        return word


def runs_guard(argv: Sequence[str]) -> bool:
    """Returns whether a command is the supervisor's process on another node, which is not a rank."""
    return "ddp_hpc.supervisor.guard" in argv


def runs_trainer(argv: Sequence[str]) -> bool:
    """Returns whether a command runs ddp_hpc.train: directly, or with torchrun_script.sh or ddp-hpc train."""
    names = [word.rpartition("/")[2] for word in argv]
    pairs = list(pairwise(names))
    if ("-m", _TRAINER) in pairs or ("ddp-hpc", "train") in pairs:
        return True
    if STEP_SCRIPT not in names:
        return False
    program = argv[names.index(STEP_SCRIPT) + 1 :]
    return not program or _PROGRAM.fullmatch(program[0]) is None
