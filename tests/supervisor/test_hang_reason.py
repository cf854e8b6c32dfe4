"""Which silent runs count as hangs, and what the sentence about a hang says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.discovery.python_stacks import Frame
from ddp_hpc.discovery.silence import SilentRank
from ddp_hpc.supervisor.hang_reason import hang_of

LIMIT_S = 600.0
TORCH = "/env/lib/python3.12/site-packages/torch"
MAIN = Frame("/home/me/train.py", 90, "<module>")
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward"),
    Frame(f"{TORCH}/autograd/__init__.py", 354, "backward"),
    Frame(f"{TORCH}/_tensor.py", 630, "backward"),
    Frame("/home/me/train.py", 63, "train"),
    MAIN,
)
BARRIER = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 4500, "barrier"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/home/me/train.py", 70, "save"),
    MAIN,
)
EVALUATION = (Frame("/home/me/evaluate.py", 30, "evaluate"), MAIN)


def rank(number: int, frames: tuple[Frame, ...] = BACKWARD, **values: object) -> SilentRank:
    """A rank of 4 that waits, two on each node."""
    waiting = SilentRank(
        rank=number,
        world_size=4,
        host=f"n{1 + number // 2}",
        state="S",
        cpu_share=0.0,
        same_s=0.0,
        frames=frames,
    )
    return replace(waiting, **values)  # type: ignore[arg-type]  # the fields of the test


def computing(number: int, frames: tuple[Frame, ...] = EVALUATION, **values: object) -> SilentRank:
    return rank(number, frames, **{"state": "R", "cpu_share": 1.0, **values})


def hang(*reports: SilentRank) -> AttemptEnd | None:
    return hang_of(reports, LIMIT_S, Path("stacks"))


def reason(*reports: SilentRank) -> str:
    end = hang(*reports)
    assert end is not None
    return end.reason


def test_a_rank_that_computes_while_the_others_wait_is_named_first_although_it_may_only_be_slow() -> None:
    end = hang(rank(0), rank(1), computing(2), rank(3))
    assert end is not None
    assert end.reason == (
        "no output or checkpoint for 600 s: rank 2 on n2 "
        "computes in evaluate.py:30 (evaluate), while ranks 0, 1 on n1 and 3 on n2 wait in train.py:63 "
        "(train: backward); stacks of all threads: stacks; if the program was only slow, raise --idle-timeout"
    )
    assert (end.rank, end.host) == (2, "n2")


def test_if_all_ranks_wait_the_one_in_another_collective_is_named_first() -> None:
    end = hang(rank(0), rank(1, BARRIER), rank(2), rank(3))
    assert end is not None
    assert "s: rank 1 on n1 waits in train.py:70 (save: barrier), while ranks 0 on n1 and 2, 3" in end.reason
    assert end.rank == 1


def test_no_rank_is_blamed_if_two_places_have_as_many_ranks() -> None:
    end = hang(rank(0), rank(1, BARRIER), rank(2), rank(3, BARRIER))
    assert end is not None
    assert (end.rank, end.host) == (None, "")


def test_a_rank_that_uses_no_cpu_outside_of_a_collective_is_elsewhere() -> None:
    end = hang(rank(0), rank(1), rank(2), rank(3, EVALUATION))
    assert end is not None
    assert "rank 3 on n2 is in evaluate.py:30 (evaluate), while ranks 0, 1 on n1" in end.reason
    assert end.rank == 3


def test_on_a_busy_node_a_rank_that_loops_computes_and_one_that_has_just_begun_to_wait_waits() -> None:
    ranks = (rank(0, cpu_share=0.2), computing(1, cpu_share=0.2, same_s=0.0), rank(2), rank(3))
    assert "s: rank 1 on n1 computes in evaluate.py:30 (evaluate), while ranks 0 on n1 and 2, 3" in reason(
        *ranks
    )


def test_a_rank_that_polls_in_a_collective_waits() -> None:
    end = hang(computing(0, BARRIER), computing(1, BARRIER), rank(2, EVALUATION), computing(3, BARRIER))
    assert end is not None
    assert (
        "rank 2 on n2 is in evaluate.py:30 (evaluate), while ranks 0, 1 on n1 and 3 on n2 wait" in end.reason
    )
    assert end.rank == 2


def test_a_model_that_hangs_in_its_forward_pass_is_not_in_a_collective() -> None:
    ddp = Frame(f"{TORCH}/nn/parallel/distributed.py", 1700, "forward")
    forward = (Frame("/home/me/model.py", 20, "forward"), ddp, MAIN)
    assert "rank 1 on n1 is in model.py:20 (forward), while" in reason(
        rank(0), rank(1, forward), rank(2), rank(3)
    )


def test_all_ranks_at_the_same_place() -> None:
    said = reason(*map(rank, range(4)))
    assert "for 600 s: all 4 ranks wait in train.py:63 (train: backward); stacks" in said


def test_ranks_in_the_same_call_of_a_framework_are_distinguished_by_its_lines() -> None:
    fit = (Frame("/env/lib/python3.12/site-packages/lightning/trainer.py", 5, "fit"), MAIN)
    frames = [(*BACKWARD[:3], *fit), (*BARRIER[:2], *fit)]
    said = reason(rank(0, frames[0]), rank(1, frames[1]), rank(2, frames[0]), rank(3, frames[0]))
    assert "rank 1 on n1 waits in train.py:90 (<module>: distributed_c10d.py:4500 barrier), while" in said
    assert "train.py:90 (<module>: graph.py:829 _engine_run_backward)" in said


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (
            "T",
            "rank 1 on n1 cannot continue because its process is stopped in evaluate.py:30 (evaluate), while",
        ),
        ("D", "rank 1 on n1 waits for a file system or a driver in evaluate.py:30 (evaluate), while"),
    ],
)
def test_the_state_of_a_process_that_the_kernel_blocks(state: str, what: str) -> None:
    assert what in reason(rank(0), rank(1, EVALUATION, state=state), rank(2), rank(3))


def test_a_rank_that_does_not_answer_is_named_first() -> None:
    end = hang(rank(0), rank(1), computing(2))
    assert end is not None
    assert "rank 3 does not answer: the program has ended, or the node is down, while rank 2" in end.reason
    assert end.rank == 3


def test_a_rank_whose_program_has_ended_is_no_hang_while_the_others_compute() -> None:
    assert hang(computing(0), computing(1), computing(2)) is None


def test_a_program_without_python() -> None:
    assert "rank 1 on n1 is at an unknown line, because its Python stack could not be read" in reason(
        rank(0), rank(1, ()), rank(2), rank(3)
    )


def test_ranks_that_all_compute_do_not_hang() -> None:
    assert hang(*map(computing, range(4))) is None


def test_ranks_that_compute_at_the_same_lines_for_twice_the_limit_hang() -> None:
    assert hang(*(computing(number, same_s=LIMIT_S) for number in range(4))) is not None
    assert hang(*(computing(number, same_s=LIMIT_S - (number == 3)) for number in range(4))) is None


def test_only_some_places_of_a_large_run_are_listed() -> None:
    lines = [rank(number, (Frame("/home/me/train.py", number, "train"),)) for number in range(4)]
    assert "train.py:2 (train); the remaining ranks are at 1 other place" in reason(*lines)
