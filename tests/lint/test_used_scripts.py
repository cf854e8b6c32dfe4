"""Scripts that scientists use have no error and no warning; similar scripts that are wrong have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script

ENTRIES = re.split(r"^== ", Path(__file__).with_name("used_scripts.txt").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("entry", ENTRIES)
def test_only_a_wrong_script_has_an_error_or_a_warning(entry: str) -> None:
    title, _, text = entry.partition("\n")
    check, _, wrong = title.partition(" ")
    found = [one for one in lint_script(text, select=[check]) if one.severity != "note"]
    assert bool(found) == (wrong == "wrong")
