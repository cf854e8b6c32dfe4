"""A headless Chromium that is offline, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
REQUIRE = "DDP_HPC_REQUIRE_BROWSER"


@dataclass
class Opened:
    """A page, and all that it did that it should not: errors, and requests but for its own file."""

    page: Any
    problems: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; it ends with the block. Without one tests are skipped, or fail where one is required."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        reason = f"the page's tests need one of {', '.join(PROGRAMS)}: apt-get install chromium"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}", pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Any, file: Path, width: int = 1280, height: int = 900) -> Opened:
    """The file's page, with every other request refused."""
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    opened = Opened(context.new_page())
    problems, own = opened.problems, file.as_uri()
    opened.page.on("console", lambda said: problems.append(f"{said.type}: {said.text}"))
    opened.page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    opened.page.on("request", lambda asked: asked.url == own or problems.append(f"request: {asked.url}"))
    context.route("**/*", lambda route: route.continue_() if route.request.url == own else route.abort())
    opened.page.goto(own)
    return opened
