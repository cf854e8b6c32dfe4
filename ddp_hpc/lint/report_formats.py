"""Print findings as text, JSON, SARIF 2.1.0, or workflow commands of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ddp_hpc.base.version import __version__
from ddp_hpc.lint.check_registry import CHECKS, LintFinding

Located = tuple[str, LintFinding]
"""The path of a script, with one of its findings."""

_PAGES = "docs/reference/lint"


def as_text(found: Sequence[Located]) -> str:
    """Returns the findings as text, with one line per finding."""
    return "".join(
        f"{path}:{one.line}: {one.severity} {one.check}: {one.what}; {one.remedy}\n" for path, one in found
    )


def as_json(found: Sequence[Located]) -> str:
    """Returns the findings as a JSON list."""
    return json.dumps([{"path": path, **asdict(one)} for path, one in found], indent=2) + "\n"


def as_github(found: Sequence[Located]) -> str:
    """Returns the findings as workflow commands; GitHub Actions shows them in the diff of a pull request."""
    commands = {"error": "error", "warning": "warning", "note": "notice"}
    return "".join(
        f"::{commands[one.severity]} file={_property(path)},line={one.line},title={one.check}::"
        f"{_data(f'{one.what}; {one.remedy}')}\n"
        for path, one in found
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(found: Sequence[Located]) -> str:
    """Returns the findings as a log for code scanning (OASIS SARIF 2.1.0)."""
    ids = sorted({one.check for _, one in found})
    rules = [
        {
            "id": id_,
            "shortDescription": {"text": CHECKS[id_].title},
            "helpUri": f"{_PAGES}/{id_}.md",
            "defaultConfiguration": {"level": CHECKS[id_].severity},
        }
        for id_ in ids
    ]
    results = [
        {
            "ruleId": one.check,
            "ruleIndex": ids.index(one.check),
            "level": one.severity,
            "message": {"text": f"{one.what}; {one.remedy}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": path},
                        "region": {"startLine": one.line},
                    }
                }
            ],
        }
        for path, one in found
    ]
    driver = {"name": "ddp-hpc lint", "version": __version__, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


FORMATS: dict[str, Callable[[Sequence[Located]], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
