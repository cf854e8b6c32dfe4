"""Each check has a page in docs/reference/lint/, whose examples are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import CHECKS, lint_script
from ddp_hpc.sites.site import load_site

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "lint"
# A page cannot show a carriage return. SLURM007 requires the version of a site.
WITHOUT_EXAMPLE = {"JOB002", "SLURM007"}


def examples(check: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (PAGES / f"{check}.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("check", CHECKS)
def test_the_page_has_the_title_and_severity_of_the_check(check: str) -> None:
    text = (PAGES / f"{check}.md").read_text()
    assert text.startswith(f"# {check}: {CHECKS[check].title}\n\nSeverity: {CHECKS[check].severity}.\n")
    assert "\nSource: " in text
    assert "\nFix: " in text


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in WITHOUT_EXAMPLE])
def test_the_bad_example_has_the_finding_and_the_fixed_one_does_not(check: str, tmp_path: Path) -> None:
    page = (PAGES / f"{check}.md").read_text()
    bad, *fixed = examples(check)
    profile = re.search(r"^Example with --profile (\w+):$", page, re.MULTILINE)
    site = load_site(profile[1]) if profile else None
    programs = re.findall(r"ith this train.py:\n\n```python\n(.*?)```", page, re.DOTALL)
    if programs:
        (tmp_path / "train.py").write_text(programs[0])
    assert check in {finding.check for finding in lint_script(bad, site, directory=tmp_path)}
    if programs:
        (tmp_path / "train.py").write_text(programs[-1])
    for text in fixed:
        assert check not in {finding.check for finding in lint_script(text, site, directory=tmp_path)}


def test_every_page_has_a_check_and_the_table_is_complete() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*CHECKS, "README"}
    listed = re.findall(r"^\| \[(\w+)\]", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert listed == list(CHECKS)
