"""The files `rank_0` and `first_failure`: who may write them, and which attempt they belong to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import rank_ends
from ddp_hpc.base.rank_ends import RankEnd

END = RankEnd(rank=1, world_size=2, host="n2", exit_code=3, signal=0, at_s=1700000000.5)


def test_the_first_rank_that_fails_is_recorded_and_a_later_one_is_not(tmp_path: Path) -> None:
    assert rank_ends.write_first_failure(tmp_path, "1 17", END)
    assert not rank_ends.write_first_failure(tmp_path, "1 17", replace(END, rank=0, exit_code=143, signal=15))
    assert rank_ends.first_failure(tmp_path, "1 17") == END
    assert [path.name for path in tmp_path.iterdir()] == ["first_failure"]


def test_the_failure_of_another_attempt_does_not_count(tmp_path: Path) -> None:
    rank_ends.write_first_failure(tmp_path, "1 17", END)
    assert rank_ends.first_failure(tmp_path, "2 17") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"attempt": "1 17"}', "\0", '{"attempt": "1 17", "rank": "1"}']
)
def test_a_damaged_record_counts_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "first_failure").write_text(text)
    assert rank_ends.first_failure(tmp_path, "1 17") is None


def test_an_unknown_key_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    rank_ends.write_first_failure(tmp_path, "1 17", END)
    path = tmp_path / "first_failure"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": 3}))
    assert rank_ends.first_failure(tmp_path, "1 17") == END


def test_rank_0_began_and_ended(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        rank_ends.rank_0_end(tmp_path, "1 17")
    rank_ends.write_began(tmp_path, "1 17")
    assert rank_ends.rank_0_end(tmp_path, "1 17") is None
    rank_ends.write_ended(tmp_path, "1 17", 0)
    assert rank_ends.rank_0_end(tmp_path, "1 17") == 0
    with pytest.raises(LookupError):
        rank_ends.rank_0_end(tmp_path, "2 17")


@pytest.mark.parametrize("text", ["1 17 ended", "1 17 ended x", "1 17 ended -1"])
def test_an_end_without_a_valid_code_counts_as_no_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank_0").write_text(text)
    assert rank_ends.rank_0_end(tmp_path, "1 17") is None
