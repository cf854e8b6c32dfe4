"""The recorded environments are complete, name their origin, and do not identify the recording machine."""

import re
import sys

import pytest

from . import FOLDER, Case, cases, load
from .record import CHECKOUT

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@every_case
def test_a_case_contains_exactly_its_ranks(case: Case) -> None:
    for rank in range(case.num_ranks):
        assert "HOME" in load(case.name, rank)
    with pytest.raises(KeyError):
        load(case.name, case.num_ranks)


@every_case
def test_a_case_names_its_origin(case: Case) -> None:
    header = case.path.read_text().partition("[rank 0]")[0]
    wanted = {"recorded": ("where", "how", "date"), "composed": ("sources", "date")}[case.origin]
    for key in (*wanted, "versions", "command"):
        assert re.search(rf"^# {key}: \S", header, re.MULTILINE), key
    assert case.versions
    assert case.command


@every_case
def test_a_case_contains_no_directory_of_the_recording_machine(case: Case) -> None:
    for rank in range(case.num_ranks):
        for name, value in load(case.name, rank).items():
            assert not re.search(r"/root\b|/home/(?!user\b)", value), f"{name}={value}"
            assert str(CHECKOUT) not in value, f"{name}={value}"
            assert sys.prefix not in value, f"{name}={value}"


def test_the_readme_lists_every_case() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (\S+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((case.name, case.launcher, case.origin) for case in cases())
