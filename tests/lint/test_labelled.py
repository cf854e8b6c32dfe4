"""Checks on labelled scripts."""

from __future__ import annotations

import pytest

from ddp_hpc.lint.run_checks import lint_script
from tests.lint.labelled import ACCEPTED_BY_SBATCH, REJECTED_BY_SBATCH, SCRIPTS, S


def script_of(directives: str) -> str:
    """Return a Slurm script with these directives, which has another walltime if they contain one."""
    lines = directives.split("|")
    has_time = any(line.startswith(("--time=", "-t")) for line in lines)
    return ("#!/bin/bash\n" if has_time else S) + "".join(f"#SBATCH {line}\n" for line in lines)


def errors(text: str) -> list[str]:
    return [found.check for found in lint_script(text) if found.severity == "error"]


@pytest.mark.parametrize(("check", "directives"), REJECTED_BY_SBATCH)
def test_a_directive_that_sbatch_rejects_has_an_error(check: str, directives: str) -> None:
    assert check in errors(script_of(directives))


@pytest.mark.parametrize("directives", ACCEPTED_BY_SBATCH)
def test_a_directive_that_sbatch_accepts_has_no_error(directives: str) -> None:
    assert errors(script_of(directives)) == []


@pytest.mark.parametrize(("check", "expected", "text"), SCRIPTS)
def test_a_script_has_the_finding_or_not(check: str, expected: bool, text: str) -> None:
    assert (check in {found.check for found in lint_script(text)}) == expected
