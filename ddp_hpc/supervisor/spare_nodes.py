"""The nodes of a job that can lose some: which ones the ranks use, and which ones do not answer.

A scheduler waits for minutes before it considers a node lost (300 s with Slurm's default SlurmdTimeout), and
connections to a node without power time out even later. The supervisor therefore connects to each node every
few seconds. A host that is up accepts or refuses a connection at once, whatever listens there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.job_variables import DOWN_NODES
from ddp_hpc.base.units import counted
from ddp_hpc.queue.failed_nodes import failed_nodes, record_failed_node
from ddp_hpc.supervisor.job_log import say

_EVERY_S, _ANSWER_S = 3.0, 3.0
NO_ANSWER = "no answer"
# Lost packets and a busy kernel must not cost a node.
_LOST_AFTER_S, _MOST_ROUNDS = 12.0, 6
_MOST_THREADS = 64


@dataclass(frozen=True)
class Nodes:
    """The nodes that the ranks use, in the scheduler's order, and the spare ones."""

    used: tuple[str, ...]
    spare: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], num_spare: int) -> Nodes:
        """Returns the nodes of a new job: its last `num_spare` nodes are spare."""
        num_used = len(names) - num_spare
        return cls(tuple(names[:num_used]), tuple(names[num_used:]))

    def without(self, lost: Collection[str], least: int) -> Nodes | None:
        """Returns the nodes after lost ones have been replaced, or left out if no spare node remains; None if
        fewer than `least` are left.
        """
        replacements = (name for name in self.spare if name not in lost)
        used = [next(replacements, "") if name in lost else name for name in self.used]
        used = [name for name in used if name]
        return Nodes(tuple(used), tuple(replacements)) if len(used) >= least else None


class NodeWatch:
    """Connects to nodes in the background, and knows which ones no longer answer.

    Only nodes that have answered once can be lost: a firewall can discard all connections. Of `ports`, the
    first one that answers is used for each node. If at most one node answers, the network of this one may be
    down: no node is lost while `is_connected` returns False.
    """

    def __init__(
        self,
        names: Sequence[str],
        ports: Sequence[int] = (9,),
        is_connected: Callable[[], bool] = lambda: True,
    ) -> None:
        self._names, self._ports, self._is_connected = tuple(names), tuple(ports), is_connected
        self._answered_s: dict[str, float] = {}
        self._places: dict[str, tuple[Any, ...]] = {}
        self._round_s = 0.0
        self._rounds = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def lost(self, silent_s: float = _LOST_AFTER_S) -> list[str]:
        """Returns the nodes that have not answered for `silent_s`."""
        with self._rounds:
            # Not the current time: this process can have been suspended.
            answered_s = [(name, self._answered_s.get(name, self._round_s)) for name in self._names]
            return [name for name, at_s in answered_s if self._round_s - at_s > silent_s]

    def forget(self, names: Collection[str]) -> None:
        """No longer connects to these nodes."""
        self._names = tuple(name for name in self._names if name not in names)

    def silent_s(self, name: str) -> float:
        """Returns the time since the last answer of a node that has answered once."""
        with self._rounds:
            return time.monotonic() - self._answered_s[name]

    def look_again(self) -> list[str]:
        """Asks all nodes once more, and again while one is silent but not yet lost; returns the lost ones."""
        lost: list[str] = []
        for _ in range(_MOST_ROUNDS):
            self.ask_again()
            lost = self.lost(_LOST_AFTER_S)
            if lost == self.lost(silent_s=0.0):
                break
        return lost

    def ask_again(self) -> None:
        """Waits until all nodes have been asked once more."""
        asked_s = time.monotonic()
        with self._rounds:
            self._rounds.wait_for(lambda: self._round_s > asked_s, 4 * (_EVERY_S + _ANSWER_S))

    def _watch(self) -> None:
        # When this process ends, the pool accepts no more tasks (RuntimeError).
        with suppress(RuntimeError), ThreadPoolExecutor(min(_MOST_THREADS, len(self._names))) as pool:
            is_alone = False
            for round_number in count():
                began_s = time.monotonic()
                is_connected = is_alone and self._is_connected()
                answered = [name for name, is_up in pool.map(self._answers, self._names) if is_up]
                if round_number == 0 and (silent := ", ".join(sorted({*self._names} - {*answered}))):
                    say(
                        f"ddp-hpc: no answer yet from {silent[:200]}; the loss of a node that has never "
                        "answered cannot be detected"
                    )
                known = [name for name in self._names if name in self._answered_s]
                is_alone = len(answered) < min(2, len(known))
                if is_connected or not is_alone:  # other rounds do not count
                    with self._rounds:
                        self._round_s = began_s
                        self._answered_s |= dict.fromkeys(answered, began_s)
                        self._rounds.notify_all()
                time.sleep(max(0.0, began_s + _EVERY_S - time.monotonic()))

    def _answers(self, name: str) -> tuple[str, bool]:
        if directory := os.environ.get(DOWN_NODES):  # a rehearsal, whose nodes have no addresses
            return name, not Path(directory, name).exists()
        # The name is resolved only once, since a name server that does not answer must not cost a node.
        if name in self._places:
            return name, _is_up(self._places[name])
        for port in self._ports:
            with suppress(OSError):  # the name is unknown
                for *_, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
                    if _is_up(place[:2]):
                        self._places[name] = place[:2]
                        return name, True
        return name, False


def _is_up(place: tuple[Any, ...]) -> bool:
    try:
        socket.create_connection(place, _ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer, or no route
        return False
    return True


class NodePool:
    """The nodes of a job, of which the bad ones are replaced, or left out. `names` are all of them.

    At least `min_nodes` nodes are used; without it, always as many as at first. For the other arguments, see
    `NodeWatch`.

    Nodes that fail are recorded in the run directory. Those of earlier jobs become the spare ones.

    Raises:
        RequestError: all nodes would be spare.
    """

    def __init__(
        self,
        names: Sequence[str],
        num_spare: int,
        *,
        min_nodes: int | None = None,
        run_dir: Path | None = None,
        ports: Sequence[int] = (9,),
        is_connected: Callable[[], bool] = lambda: True,
    ) -> None:
        if len(names) <= num_spare:
            raise RequestError(
                f"--spare-nodes {num_spare} was given, but this job has only {counted(len(names), 'node')}; "
                "request more nodes"
            )
        self.first = names[0]
        """The node of this process."""
        failed = {each.node for each in failed_nodes(run_dir)} if run_dir is not None else set()
        self.nodes = Nodes.of(sorted(names, key=failed.__contains__), num_spare)
        if left_out := ", ".join(name for name in self.nodes.spare if name in failed):
            num = sum(name not in failed for name in self.nodes.spare)
            say(
                f"ddp-hpc: not used, because they have failed in this run: {left_out}; "
                f"{counted(num, 'spare node')} left"
            )
        self.num_nodes = len(self.nodes.used)
        """The number of nodes that are used at first."""
        self._min_nodes, self._run_dir = min_nodes or self.num_nodes, run_dir
        self._watch = NodeWatch(names, ports, is_connected)

    @property
    def node_of_guard(self) -> str:
        """The last node that answers, but not the first one of the job; empty if there is none."""
        left_out = {self.first, *self._watch.lost()}
        others = [name for name in (*self.nodes.used, *self.nodes.spare) if name not in left_out]
        return others[-1] if others else ""

    def lost(self) -> list[str]:
        """Returns the nodes of the ranks that have not answered for too long."""
        return [name for name in self._watch.lost() if name in self.nodes.used]

    def silent_s(self, name: str) -> float:
        """Returns the time since the last answer of a lost node."""
        return self._watch.silent_s(name)

    def replaceable(self, host: str) -> str:
        """Returns the node of the ranks with this host name, if enough nodes are left without it; otherwise
        nothing.
        """
        node = next((name for name in self.nodes.used if name.partition(".")[0] == host), "")
        left = self.nodes.without([*self._watch.lost(), node], self._min_nodes)
        return node if left is not None else ""

    def replace_bad(self, suspect: str) -> str:
        """Replaces the nodes that do not answer, and the node `suspect`, on which two attempts have failed.

        Returns why the ranks cannot be started again, or nothing.
        """
        silent = self._watch.look_again()
        why = self.replace({name: NO_ANSWER for name in self.nodes.used if name in silent}, silent)
        if suspect in self.nodes.used and not why:
            self.replace({suspect: "two attempts have failed on it"}, silent)
        return why

    def replace(self, bad: Mapping[str, str], silent: Collection[str] = ()) -> str:
        """Replaces these nodes, each with the reason, by spare ones that answer, or leaves them out.

        Returns why the ranks cannot be started, or nothing.
        """
        if not bad:
            return ""
        if self._run_dir is not None:
            for name, why in bad.items():
                record_failed_node(self._run_dir, name, why)
        what = "; ".join(
            f"no answer from {name}" if why == NO_ANSWER else f"node {name}: {why}"
            for name, why in bad.items()
        )
        left_out = {*bad, *silent, *self._watch.lost()}
        before, nodes = self.nodes, self.nodes.without(left_out, self._min_nodes)
        if nodes is None:
            return f"{what}; too few nodes are left"
        if news := ", ".join(name for name in nodes.used if name not in before.used):
            what += f"; replaced by {news}"
        if (num := len(nodes.used)) < len(before.used):
            what += f"; the ranks use {counted(num, 'node')} instead of {len(before.used)} (--min-nodes)"
        say(f"ddp-hpc: {what}")
        self._watch.forget(left_out)
        self.nodes = nodes
        return ""
