"""Takes pictures of the report's page: `python -m tests.trace.screenshots REPORT.html docs/images`."""

import sys
from pathlib import Path

from .browser import chromium, open_page

WINDOWS = {"desktop": (1280, 900), "narrow": (390, 844)}
# The whole page would be too long for one picture, so the second one begins at the timeline.
PARTS = {"": "html", "_timeline": "#timeline-title0"}


def main(report: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for window, (width, height) in WINDOWS.items():
            opened = open_page(browser, report.resolve(), width, height)
            for part, where in PARTS.items():
                opened.page.evaluate("(where) => document.querySelector(where).scrollIntoView()", where)
                opened.page.mouse.move(0, 0)
                opened.page.screenshot(path=directory / f"report_{window}{part}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
