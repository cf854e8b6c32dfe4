"""The documentation builds without warnings, its links are valid, and a browser shows it."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddp_hpc.cli import cli

from ..trace.browser import chromium

# `make check` also runs `make docs`.
pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
KINDS = ("Tutorials", "How-to guides", "Reference", "Explanation")


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs Sphinx like `make docs`: broken links and anchors are errors."""
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    return subprocess.run([*words, str(source), str(site)], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", made)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return made


def test_make_docs_runs_the_tested_command() -> None:
    assert "-m sphinx -q -W --keep-going -n -b html docs" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("link", ["missing.md", "page.md#no-such-heading"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    (source / "page.md").write_text("# A page\n")
    (source / "index.md").write_text(f"# Start\n\n```{{toctree}}\npage\n```\n\n[a link]({link})\n")
    done = build(source, tmp_path / "site")
    assert done.returncode != 0
    assert "index.md:7" in done.stderr


def test_the_command_reference_has_every_command_and_option(site: Path) -> None:
    page = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert f'id="ddp-hpc-{name}"' in page
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert f"{max(parameter.opts, key=len)}" in page, (name, parameter.opts)


def test_a_browser_shows_the_site(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_context(offline=True).new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.goto((site / "index.html").as_uri())
        captions = page.locator(".sidebar-tree .caption-text").all_inner_texts()
        assert [caption.lower() for caption in captions] == [kind.lower() for kind in KINDS]
        for index, entry in enumerate(page.locator(".sidebar-tree a.internal").all()):
            assert entry.inner_text().strip(), index
        page.locator(".sidebar-tree a.internal", has_text="Your first job on a Slurm machine").click()
        assert page.locator("article h1").inner_text().startswith("Your first job on a Slurm machine")
        page.goto((site / "index.html").as_uri())
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert problems == []


def test_the_glossary_is_sorted_and_defines_each_term_once() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^([^\n:#]+)\n: \S", page, re.MULTILINE)
    assert len(terms) > 60
    assert terms == sorted(set(terms), key=str.casefold)
