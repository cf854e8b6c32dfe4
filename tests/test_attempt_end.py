"""The files `rank_0` and `end`: who may write them, and which attempt they belong to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import attempt_end
from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.run_outcomes import Cause

END = AttemptEnd(
    cause=Cause.EXITED, exit_code=3, reason="rank 1 exited with code 3", rank=1, host="n2", step=7
)


def test_the_first_end_of_an_attempt_counts_unless_its_ranks_were_restarted(tmp_path: Path) -> None:
    assert attempt_end.write_end(tmp_path, "1 17", END)
    assert not attempt_end.write_end(tmp_path, "1 17", replace(END, rank=0, exit_code=143))
    assert attempt_end.read_end(tmp_path, "1 17") == END
    done = AttemptEnd(cause=Cause.DONE, exit_code=0, reason="training complete", step=60)
    assert attempt_end.write_end(tmp_path, "1 17", done, replace=True)
    assert attempt_end.read_end(tmp_path, "1 17") == done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "timeline"]
    lines = [json.loads(line) for line in (tmp_path / "timeline").read_text().splitlines()]
    assert [(line["attempt"], line["moment"], line["cause"]) for line in lines] == [
        ("1 17", "attempt ended", "exited"),
        ("1 17", "attempt ended", "done"),
    ]


def test_the_end_of_another_attempt_does_not_count_and_is_replaced(tmp_path: Path) -> None:
    attempt_end.write_end(tmp_path, "1 17", END)
    assert attempt_end.read_end(tmp_path, "2 17") is None
    assert attempt_end.write_end(tmp_path, "2 17", END)
    assert attempt_end.read_end(tmp_path, "2 17") == END


def test_a_later_attempt_replaces_the_earlier_ones(tmp_path: Path) -> None:
    assert not attempt_end.is_replaced(tmp_path, "1 17")
    (tmp_path / "attempts").write_text("1 17 0 1000\n2 17 40 2000\n")
    assert attempt_end.is_replaced(tmp_path, "1 17")
    assert not attempt_end.is_replaced(tmp_path, "2 17")
    assert attempt_end.is_replaced(tmp_path, "2 1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"attempt": "1 17"}',
        "\0",
        '{"attempt": "1 17", "cause": "bored", "exit_code": 1}',
    ],
)
def test_a_damaged_record_counts_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "end").write_text(text)
    assert attempt_end.read_end(tmp_path, "1 17") is None


def test_rank_0_began_and_ended(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        attempt_end.rank_0_end(tmp_path, "1 17")
    attempt_end.write_began(tmp_path, "1 17")
    assert attempt_end.rank_0_end(tmp_path, "1 17") is None
    attempt_end.write_ended(tmp_path, "1 17", 0)
    assert attempt_end.rank_0_end(tmp_path, "1 17") == 0
    with pytest.raises(LookupError):
        attempt_end.rank_0_end(tmp_path, "2 17")


@pytest.mark.parametrize("text", ["1 17 ended", "1 17 ended x", "1 17 ended -1"])
def test_an_end_without_a_valid_code_counts_as_no_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank_0").write_text(text)
    assert attempt_end.rank_0_end(tmp_path, "1 17") is None
