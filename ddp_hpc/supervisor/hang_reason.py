"""Whether a silent run hangs, and the sentence that says which ranks wait and which one is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.rank_names import name_ranks
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.base.units import counted
from ddp_hpc.discovery.python_stacks import Frame
from ddp_hpc.discovery.silence import SilentRank

# A rank that computes, or polls a GPU, uses a core, which it may share; one that waits with gloo, reads or
# sleeps, almost none. A rank that waits in the backward pass has computed shortly before.
_WAITS_BELOW, _COMPUTES_IN_BACKWARD = 0.05, 0.5
_MAX_PLACES = 3
_LIBRARIES = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python[0-9.]+/")
_COLLECTIVES = re.compile(r"/torch/distributed/")
# The backward pass, and the forward pass of DDP, which exchanges buffers: they compute and wait.
_WITH_COLLECTIVES = re.compile(r"/torch/autograd/graph\.py$|/torch/nn/parallel/distributed\.py$")
_STATES = {"T": "its process is stopped", "t": "a debugger has stopped its process"}
# The verbs for one rank and for several.
_COMPUTES, _WAITS, _IS = ("computes", "compute"), ("waits", "wait"), ("is", "are")
_STOPPED, _SILENT = ("cannot continue", "cannot continue"), ("does not answer", "do not answer")


class _Place(NamedTuple):
    """Where ranks are. `order` is lowest for ranks that keep the others waiting, and 2 for these others."""

    order: int
    verbs: tuple[str, str]
    where: str


_Ranks = list[tuple[int, str]]


def hang_of(reports: Sequence[SilentRank], limit_s: float, directory: Path) -> AttemptEnd | None:
    """Returns the end of the attempt if the run hangs; None if its ranks may be computing.

    `reports` are those of the ranks that have answered, at least one, after a silence of `limit_s`, and
    `directory` contains their stacks. The run hangs if one of these ranks has used almost no CPU time, or if
    the main threads of all have been at the same lines for another `limit_s` (`same_s`): a rank that waits
    for a GPU polls, and uses CPU time.
    """
    world_size = reports[0].world_size
    missing = sorted({*range(world_size)} - {report.rank for report in reports})
    is_waiting = any(report.cpu_share < _WAITS_BELOW for report in reports)
    is_same = all(report.frames and report.same_s >= limit_s for report in reports)
    if not is_waiting and not is_same:
        return None
    places = _places(reports)
    if missing:
        gone = _Place(0, _SILENT, ": the program has ended, or the node is down")
        places[gone] = [(rank, "") for rank in missing]
    groups = sorted(places.items(), key=lambda group: (group[0].order, len(group[1])))
    first, *others = (_text(place, ranks, world_size) for place, ranks in groups[:_MAX_PLACES])
    if others:
        first += f", while {'; '.join(others)}"
    if len(groups) > _MAX_PLACES:
        first += f"; the remaining ranks are at {counted(len(groups) - _MAX_PLACES, 'other place')}"
    reason = f"no output or checkpoint for {limit_s:g} s: {first}; stacks of all threads: {directory}"
    if groups[0][0].verbs is _COMPUTES:
        reason += "; if the program was only slow, raise --idle-timeout"
    rank, host = groups[0][1][0] if _is_elsewhere(groups) else (None, "")
    cause = Cause.HANG
    code = cause.exit_code
    return AttemptEnd(cause=cause, exit_code=code, reason=reason, rank=rank, host=host, silent_s=limit_s)


def _places(reports: Sequence[SilentRank]) -> dict[_Place, _Ranks]:
    """Returns the ranks at each place. If all are at one line of the program, such as that of `trainer.fit`,
    the innermost lines distinguish them.
    """
    found: list[dict[_Place, _Ranks]] = []
    for is_exact in (False, True):
        found.append({})
        for report in reports:
            found[-1].setdefault(_place(report, is_exact=is_exact), []).append((report.rank, report.host))
        if len(found[-1]) > 1:
            return found[-1]
    return found[0]


def _is_elsewhere(groups: Sequence[tuple[_Place, _Ranks]]) -> bool:
    """Returns whether the first group differs from the others, which wait for it."""
    (first, ranks), *others = groups
    return bool(others) and ((first.order, len(ranks)) < (others[0][0].order, len(others[0][1])))


def _text(place: _Place, ranks: _Ranks, world_size: int) -> str:
    subject = f"all {world_size} ranks" if len(ranks) == world_size > 1 else name_ranks(ranks)
    return f"{subject} {place.verbs[len(ranks) > 1]}{place.where}"


def _place(report: SilentRank, *, is_exact: bool) -> _Place:
    frames, at = report.frames, _at(report.frames, is_exact)
    if report.state in _STATES:
        return _Place(0, _STOPPED, f" because {_STATES[report.state]}{at}")
    if report.state == "D":
        return _Place(1, _WAITS, f" for a file system or a driver{at}")
    if not frames:
        return _Place(1, _IS, " at an unknown line, because its Python stack could not be read")
    called = frames[: _own(frames)]  # DDP also calls the program: the forward pass of its model, and hooks
    may_wait = any(_WITH_COLLECTIVES.search(frame.file) for frame in called)
    if any(_COLLECTIVES.search(frame.file) for frame in called) or (
        may_wait and report.cpu_share < _COMPUTES_IN_BACKWARD
    ):
        return _Place(2, _WAITS, at)
    return _Place(1, _COMPUTES if report.cpu_share >= _WAITS_BELOW else _IS, at)


def _at(frames: Sequence[Frame], is_exact: bool) -> str:
    """Returns the innermost line of the program, and what it calls there; with `is_exact`, the line there."""
    if not frames:
        return ""
    own = _own(frames)
    if own is None:
        return f" in {_line(frames[0])} ({frames[0].function})"
    called = next((frame for frame in reversed(frames[:own]) if _is_telling(frame)), None)
    text = f" in {_line(frames[own])} ({frames[own].function}"
    if is_exact and own:
        return f"{text}: {_line(frames[0])} {frames[0].function})"
    return f"{text}: {called.function})" if called is not None else f"{text})"


def _own(frames: Sequence[Frame]) -> int | None:
    """Returns the index of the innermost line of the program itself; None if there is none."""
    return next((index for index, frame in enumerate(frames) if not _LIBRARIES.search(frame.file)), None)


def _is_telling(frame: Frame) -> bool:
    return frame.function not in ("wrapper", "inner", "decorate_context") and not re.match(
        r"_(?!_)", frame.function
    )


def _line(frame: Frame) -> str:
    return f"{Path(frame.file).name}:{frame.line}"
