"""A headless Chromium without network access, for tests of HTML pages."""

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
    """A page and its problems: errors, and requests other than for its own file."""

    page: Any
    problems: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts the browser for the block. Without one, tests are skipped, or fail if it is required."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        reason = f"the tests of the page require one of {', '.join(PROGRAMS)}: apt-get install chromium"
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
    """Opens the file as a page, and aborts all other requests."""
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    opened = Opened(context.new_page())
    problems, own = opened.problems, file.as_uri()
    opened.page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    opened.page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    opened.page.on(
        "request", lambda request: request.url == own or problems.append(f"request: {request.url}")
    )
    context.route("**/*", lambda route: route.continue_() if route.request.url == own else route.abort())
    opened.page.goto(own)
    return opened
