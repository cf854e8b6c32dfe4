"""The nodes of a job with spare nodes: which ones the ranks use, and which ones do not answer.

A scheduler waits for minutes before it considers a node lost (300 s with Slurm's default SlurmdTimeout), and
connections to a node without power time out even later. The supervisor therefore connects to each node every
few seconds. A host that is up accepts or refuses a connection at once, whatever listens there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import counted
from ddp_hpc.queue.failed_nodes import failed_nodes, record_failed_node
from ddp_hpc.supervisor.job_log import say

_EVERY_S, _ANSWER_S = 3.0, 3.0
# Lost packets and a busy kernel must not cost a node.
_LOST_AFTER_S = 12.0
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

    def without(self, lost: Collection[str]) -> Nodes | None:
        """Returns the nodes after each lost one has been replaced; None without enough spare nodes."""
        spare = [name for name in self.spare if name not in lost]
        replacements, missing = iter(spare), [name for name in self.used if name in lost]
        if len(missing) > len(spare):
            return None
        used = tuple(next(replacements) if name in lost else name for name in self.used)
        return Nodes(used, tuple(replacements))


class NodeWatch:
    """Connects to nodes in the background, and knows which ones no longer answer.

    Only nodes that have answered once can be lost: a firewall can discard all connections. Of `ports`, the
    first one that answers is used for each node.
    """

    def __init__(self, names: Sequence[str], ports: Sequence[int] = (9,)) -> None:
        self._names, self._ports = tuple(names), tuple(ports)
        self._answered_s: dict[str, float] = {}
        self._places: dict[str, tuple[Any, ...]] = {}
        self._round_s = 0.0
        self._rounds = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def lost(self, silent_s: float = _LOST_AFTER_S) -> list[str]:
        """Returns the nodes that have not answered for `silent_s`."""
        lost = self.silent(silent_s)
        # If only this node answers, its own network is down.
        return lost if len(self._answered_s) - len(lost) > 1 else []

    def silent(self, silent_s: float) -> list[str]:
        """Returns the nodes that have not answered for `silent_s`, even if no node answers."""
        with self._rounds:
            # Not the current time: this process can have been suspended.
            return [name for name, at_s in self._answered_s.items() if self._round_s - at_s > silent_s]

    def look_again(self) -> list[str]:
        """Asks all nodes once more, and returns those that do not answer."""
        self.ask_again()
        return self.lost(silent_s=0.0)

    def ask_again(self) -> None:
        """Waits until all nodes have been asked once more."""
        asked_s = time.monotonic()
        with self._rounds:
            self._rounds.wait_for(lambda: self._round_s > asked_s, 4 * (_EVERY_S + _ANSWER_S))

    def _watch(self) -> None:
        # When this process ends, the pool accepts no more tasks (RuntimeError).
        with suppress(RuntimeError), ThreadPoolExecutor(min(_MOST_THREADS, len(self._names))) as pool:
            for round_number in count():
                began_s = time.monotonic()
                answered = [name for name, is_up in pool.map(self._answers, self._names) if is_up]
                if round_number == 0 and (silent := ", ".join(sorted({*self._names} - {*answered}))):
                    say(f"ddp-hpc: no answer from {silent[:200]}; until it answers, its loss is not noticed")
                with self._rounds:
                    self._round_s = began_s
                    self._answered_s |= dict.fromkeys(answered, began_s)
                    self._rounds.notify_all()
                time.sleep(_EVERY_S)

    def _answers(self, name: str) -> tuple[str, bool]:
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
    """The nodes of a job with spare nodes, of which the bad ones are replaced. `names` are all of them.

    Nodes that fail are recorded in the run directory. Those of earlier jobs become the spare ones.

    Raises:
        RequestError: all of them would be spare.
    """

    def __init__(
        self, names: Sequence[str], num_spare: int, run_dir: Path | None, ports: Sequence[int] = (9,)
    ) -> None:
        if len(names) <= num_spare:
            raise RequestError(
                f"--spare-nodes {num_spare} was given, but this job has only {counted(len(names), 'node')}; "
                "request more nodes"
            )
        self.names = tuple(names)
        self._run_dir = run_dir
        failed = {each.node for each in failed_nodes(run_dir)} if run_dir is not None else set()
        self.nodes = Nodes.of(sorted(names, key=failed.__contains__), num_spare)
        self._watch = NodeWatch(names, ports)

    @property
    def node_of_guard(self) -> str:
        """The last node that answers, but not the first one of the job."""
        lost = self._watch.lost()
        return next((name for name in reversed(self.names[1:]) if name not in lost), self.names[-1])

    def lost(self) -> list[str]:
        """Returns the nodes of the ranks that have not answered for too long."""
        return [name for name in self._watch.lost() if name in self.nodes.used]

    def replaceable(self, host: str) -> str:
        """Returns the node of the ranks with this host name, if a spare one can replace it; otherwise
        nothing.
        """
        node = next((name for name in self.nodes.used if name.partition(".")[0] == host), "")
        return node if node and self.nodes.without([*self._watch.lost(), node]) is not None else ""

    def replace_bad(self, suspect: str) -> str:
        """Replaces the nodes that do not answer, and the node `suspect`, on which two attempts have failed.

        Returns why the ranks cannot be started again, or nothing.
        """
        silent = self._watch.look_again()
        why = self.replace({name: "no answer" for name in self.nodes.used if name in silent}, silent)
        if suspect in self.nodes.used and not why:
            self.replace({suspect: "two attempts have failed"}, silent)
        return why

    def replace(self, bad: Mapping[str, str], silent: Collection[str] = ()) -> str:
        """Replaces these nodes, each with the reason, by spare ones that answer.

        Returns why the ranks cannot be started, or nothing.
        """
        if not bad:
            return ""
        if self._run_dir is not None:
            for name, why in bad.items():
                record_failed_node(self._run_dir, name, why)
        what = "; ".join(f"node {name}: {why}" for name, why in bad.items())
        nodes = self.nodes.without({*bad, *silent, *self._watch.lost()})
        if nodes is None:
            return f"{what}; too few spare nodes are left"
        news = ", ".join(name for name in nodes.used if name not in self.nodes.used)
        say(f"ddp-hpc: {what}; replaced by {news}")
        self.nodes = nodes
        return ""
