"""Each check has its page in docs/lint/, whose examples are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.batch.lint import CHECKS, lint_script
from ddp_hpc.batch.site import load_site

PAGES = Path(__file__).parents[2] / "docs" / "lint"
# A carriage return and an answer of sbatch cannot be shown in a page.
WITHOUT_EXAMPLE = {"JOB002", "SLURM900"}


def examples(check: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (PAGES / f"{check}.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("check", CHECKS)
def test_its_page_says_what_the_check_says(check: str) -> None:
    text = (PAGES / f"{check}.md").read_text()
    assert text.startswith(f"# {check}: {CHECKS[check].title}\n\nSeverity: {CHECKS[check].severity}.\n")
    assert "\nSource: " in text
    assert "\nMend: " in text


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in WITHOUT_EXAMPLE])
def test_its_example_has_the_finding_and_the_mended_one_has_not(check: str) -> None:
    bad, *mended = examples(check)
    profile = re.search(r"^Example with --profile (\w+):$", (PAGES / f"{check}.md").read_text(), re.MULTILINE)
    site = load_site(profile[1]) if profile else None
    assert check in {finding.check for finding in lint_script(bad, site)}
    for text in mended:
        assert check not in {finding.check for finding in lint_script(text, site)}


def test_there_is_no_page_without_a_check_and_the_list_is_whole() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*CHECKS, "README"}
    listed = re.findall(r"^\| \[(\w+)\]", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert listed == list(CHECKS)
