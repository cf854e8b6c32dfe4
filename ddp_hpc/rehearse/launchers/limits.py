"""What of a launch is done on the one machine of a rehearsal, and what its ranks are told instead."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "limits.json"
# Names of a network that is not here.
_OF_THE_FABRIC = (
    "DDP_HPC_FABRIC_SUFFIX",
    "DDP_HPC_FABRIC_INTERFACE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
STEP_SCRIPT, _TRAINER = "torchrun_script.sh", "ddp_hpc.train"
HERE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Without a rehearsal nothing is limited: all zero and empty.

    `num_nodes` are pretended here of the `asked_nodes` that the script believes to have.
    `arguments` are added to the command of the ranks, `of_trainer` only where that is
    this project's trainer and says nothing of them itself. Ranks are killed when the process
    `keeper_pid` is gone.
    """

    ranks_per_node: int = 0
    num_nodes: int = 0
    asked_nodes: int = 0
    threads: int = 0
    arguments: tuple[str, ...] = ()
    of_trainer: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    keeper_pid: int = 0

    def counts(self, num_ranks: int, per_node: int) -> list[int]:
        """Ranks on each node: filled one after the other, then cut to what is done here, which is said."""
        full, rest = divmod(num_ranks, per_node)
        num_nodes = full + bool(rest)
        if not self.ranks_per_node:
            return [per_node] * full + [rest] * bool(rest)
        # Only those that are started: a list of all may be long.
        here = range(min(num_nodes, self.num_nodes))
        counts = [min(per_node if node < full else rest, self.ranks_per_node) for node in here]
        if sum(counts) < num_ranks:
            sys.stderr.write(
                f"rehearse: {sum(counts)} of {num_ranks} ranks are started: "
                f"{self.num_nodes} nodes with at most {self.ranks_per_node} ranks each are pretended\n"
            )
        return counts

    def command(self, words: Sequence[str]) -> list[str]:
        """The command of a rank, with what is added to it."""
        if not self.ranks_per_node:
            return list(words)
        added = list(self.arguments)
        if _TRAINER in words or any(word.endswith(f"/{STEP_SCRIPT}") for word in words):
            option = self.of_trainer[:1]
            if option and not any(word.startswith(option[0]) for word in (*words, *added)):
                added += self.of_trainer
        return [self._local(word) for word in words] + added

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A rank's environment on this machine: no fast network, no GPU, all nodes at one address."""
        if not self.ranks_per_node:
            return dict(environ)
        kept = {name: value for name, value in environ.items() if name not in _OF_THE_FABRIC}
        kept["MASTER_ADDR"] = self._local(kept.get("MASTER_ADDR") or HERE)
        kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self.threads)}
        for name in ("DDP_HPC_RANKS_PER_NODE", "SLURM_GPUS_ON_NODE"):  # what agents of torchrun start
            if kept.get(name, "").isdecimal():
                kept[name] = str(min(int(kept[name]), self.ranks_per_node))
        return kept

    def _local(self, word: str) -> str:
        """A pretended node's name, alone or before a port, as the address that leads there."""
        for node in self.nodes:
            word = re.sub(rf"(?<![\w.-]){re.escape(node)}(\.[\w.-]+)?(?=:\d|$)", HERE, word)
        return word


def write_limits(root: Path, limits: Limits) -> None:
    """For the launchers whose folder is `root`."""
    (root / _FILE).write_text(json.dumps(asdict(limits)))


def read_limits(root: Path) -> Limits:
    """What was written, else no limits."""
    try:
        values: dict[str, Any] = json.loads((root / _FILE).read_text())
    except FileNotFoundError:
        return Limits()
    lists: dict[str, Any] = {name: tuple(values[name]) for name in ("arguments", "of_trainer", "nodes")}
    return Limits(**{**values, **lists})
