"""Mistakes that users made: lint finds them, and does not report the corrected scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lint_precision import Mistake, read_mistakes

MISTAKES = read_mistakes(Path(__file__).with_name("mistakes.txt"))


def name_of(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize(
    "mistake", [mistake for mistake in MISTAKES if mistake.checks != ("none",)], ids=name_of
)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    assert mistake.found_by()


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_a_corrected_script_has_no_error_or_warning(mistake: Mistake) -> None:
    assert mistake.findings(mistake.corrected) == []


def test_each_mistake_has_its_own_name_and_a_source() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) > 100
    without = [mistake for mistake in MISTAKES if not mistake.source.startswith("https://")]
    assert {mistake.source for mistake in without} == {"none, written from memory"}
