"""Formats and parses heartbeat messages, and formats the error lines that name lost ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base import rank_names
from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.option_names import named
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.training.process_group.start_phases import PREPARING, STARTING, UNCONNECTED

_MAX_NODES, _MAX_PLACES = 4, 3
NOT_BEGUN = -1  # the step that a rank reports before its first step
_MUTE = "its process is stopped, or Python is blocked in a C call"
_CUT = "its node does not answer: the node, or the network between the two nodes, is down"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of the heartbeat, in seconds."""

    silent_s: float  # time until a node counts as disconnected, because its kernel does not respond
    hang_s: float  # time without progress until a main thread counts as hanging
    first_s: float  # this limit replaces `hang_s` until the first step of a process has ended
    connect_s: float  # this limit replaces `first_s` until the process group is connected
    gone_s: float  # time from the end of a connection without a goodbye until its rank is reported
    period_s: float  # interval between two beats
    answer_s: float  # time for ranks to send the stack traces that rank 0 requests

    @property
    def gap_s(self) -> float:
        """The delay above which a thread that wakes up late assumes that its whole process was stopped."""
        return max(2 * self.period_s, self.silent_s / 4)


@dataclass(frozen=True)
class Beat:
    """The position of a rank's main thread, the time spent there, and the limit on that time.

    `turn` counts the rounds through the phases within a step; `order` is the phase's index in a round.
    """

    step: int = NOT_BEGUN
    turn: int = 0
    order: int = 0
    for_s: float = 0.0
    limit_s: float = float("inf")
    phase: str = STARTING

    @property
    def place(self) -> tuple[int, int, int]:
        """The position as a tuple for comparisons; a smaller tuple is further behind."""
        return self.step, self.turn, self.order

    def line(self) -> str:
        """Formats the beat as one line; `parse` accepts the part after the first word."""
        return f"at {self.step} {self.turn} {self.order} {self.for_s:.3f} {self.limit_s} {self.phase}"

    @classmethod
    def parse(cls, text: str) -> Beat:
        """Parses a beat from the text of `line` after its first word. Raises ValueError for other text."""
        step, turn, order, for_s, limit_s, phase = text.split(maxsplit=5)
        return cls(int(step), int(turn), int(order), float(for_s), float(limit_s), phase)

    def __str__(self) -> str:
        if self.step != NOT_BEGUN:
            return f"in step {self.step} ({self.phase})"
        return self.phase if self.phase in (*UNCONNECTED, PREPARING) else "before the first step"

    @property
    def slow_text(self) -> str:
        """What to do if the work at this position was only slow."""
        option = "init_timeout" if self.phase in UNCONNECTED else "hang_timeout"
        return f"if the work was only slow, raise {named(option)}"


@dataclass
class RankStatus:
    """What rank 0 knows about a rank."""

    rank: int
    host: str
    beat: Beat = Beat()
    for_s: float = 0.0  # time spent at this place so far
    where: str = ""  # position in the code; empty if the rank did not answer
    stack: str = ""
    node_answers: bool = True  # False: the node's kernel did not acknowledge the request for stack traces


def end_of_lost(cause: Cause, reason: str, ranks: Sequence[RankStatus], silent_s: float) -> AttemptEnd:
    """Returns the end of the attempt that has lost these ranks, the first of which is blamed."""
    first = ranks[0]
    return AttemptEnd(
        cause=cause,
        exit_code=cause.exit_code,
        reason=reason,
        rank=first.rank,
        host=first.host,
        step=None if first.beat.step == NOT_BEGUN else first.beat.step,
        silent_s=silent_s,
    )


def name_ranks(ranks: Sequence[RankStatus]) -> str:
    """Lists ranks with their nodes, as in `rank 3 on n2`, or `ranks 4, 5 on n2 and 6, 7 on n3`."""
    return rank_names.name_ranks((seen.rank, seen.host) for seen in ranks)


def seconds(duration_s: float) -> str:
    """Formats a duration, as in `600 s` or `0.6 s`."""
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"


def gone_text(gone: Sequence[RankStatus], gone_s: float) -> str:
    """Returns the error line for ranks whose connection closed without a goodbye."""
    last = max(gone, key=lambda seen: seen.beat.place).beat
    return (
        f"{name_ranks(gone)} {_is(gone)} gone: the connection closed unexpectedly {seconds(gone_s)} "
        f"ago, last seen {last}. Look on that node for what killed it: out of memory (dmesg, the "
        "scheduler's log), a signal, a crash"
    )


def cut_off_text(cut_off: Sequence[RankStatus], silent_s: float) -> str:
    """Returns the error line for ranks whose nodes no longer answer."""
    last = max(cut_off, key=lambda seen: seen.beat.place).beat
    hosts = sorted({seen.host for seen in cut_off})
    return (
        f"{name_ranks(cut_off)} {_is(cut_off)} cut off, last seen {last}: the node or its network is down, "
        f"with no answer for {seconds(silent_s)}. Exclude {', '.join(hosts[:_MAX_NODES])} from the next job"
    )


def rank_0_cut_off_text(host: str, silent_s: float) -> str:
    """Returns the error line that another rank reports if rank 0's node no longer answers."""
    return (
        f"lost contact with rank 0 on {host}: the node or its network is down, "
        f"with no answer for {seconds(silent_s)}"
    )


def rank_0_mute_text(host: str, silence_s: float, node_answers: bool | None, own: Beat) -> str:
    """Returns the error line that another rank, whose beat is `own`, reports if rank 0 is silent.

    `node_answers` tells whether the kernel of rank 0's node answers; None: that is not known.
    """
    text = f"lost contact with rank 0 on {host}: no message for {seconds(silence_s)}"
    if node_answers is False:
        return f"{text}, and {_CUT}"
    if node_answers is None:
        return f"{text}. Either {_MUTE}, or {_CUT}; {own.slow_text}"
    return f"{text}, though its node answers. Either {_MUTE}; {own.slow_text}"


def rank_0_gone_text(host: str) -> str:
    """Returns the error line that another rank reports if rank 0 exited without a goodbye."""
    return (
        f"rank 0 on {host} is gone: its connection closed unexpectedly. Look for its own error, and "
        f"for what killed it on {host}"
    )


def hang_text(laggards: Sequence[RankStatus], here: Sequence[RankStatus], stacks: Path | None) -> str:
    """Returns the error line for ranks that make no progress. `stacks` is the path of their stack traces."""
    beat = laggards[0].beat
    for_s = min(seen.for_s for seen in laggards)
    everyone = len(laggards) == len(here) > 1
    subject = f"all {len(here)} ranks" if everyone else name_ranks(laggards)
    parts = [
        f"{subject} {'have' if len(laggards) > 1 else 'has'} been {beat} for {seconds(for_s)} "
        f"({_places(laggards)})"
    ]
    if everyone:
        parts[0] += ", and none is behind: check the network between them, the devices and the file system"
    elif len(here) > 1:
        parts[0] += ", and all others are waiting"
    if stacks is not None:
        parts.append(f"stacks of all threads: {stacks}")
    if beat.step == NOT_BEGUN:
        # torch's watchdog monitors collectives, but not the creation of NCCL's communicators.
        parts.append("with NCCL, run the job again with NCCL_DEBUG=INFO to see which connection is missing")
    parts.append(beat.slow_text)
    return "; ".join(parts)


def _places(ranks: Sequence[RankStatus]) -> str:
    """Lists the positions in the code, beginning with those of the fewest ranks, which are likely to be
    outliers.
    """
    places: dict[str, list[RankStatus]] = {}
    for seen in ranks:
        silence = _MUTE if seen.node_answers else _CUT
        places.setdefault(f"at {seen.where}" if seen.where else f"no answer: {silence}", []).append(seen)
    if len(places) == 1:
        return next(iter(places))
    fewest_first = sorted(places.items(), key=lambda item: len(item[1]))
    listed = [f"{name_ranks(there)} {place}" for place, there in fewest_first[:_MAX_PLACES]]
    return "; ".join(listed) + ("; ..." if len(places) > _MAX_PLACES else "")


def _is(ranks: Sequence[RankStatus]) -> str:
    return "are" if len(ranks) > 1 else "is"
