"""Renders self-contained HTML pages with charts.

Names in traces and run directories can contain anything, so they are escaped in the templates and in plotly's
labels. The Content-Security-Policy of a page allows only its own two scripts, and no loading of other
resources.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.text_table import cut
from ddp_hpc.trace.event_names import shortened
from ddp_hpc.trace.html_figures import MAX_NAME, Figure
from ddp_hpc.trace.table_columns import HINTS

_DIRECTORY = Path(__file__).parent / "html"
_MAX_SENTENCES = 100
_MAX_SENTENCE = 700
_MODULE = re.compile(
    r"\(\s*function\(root, factory\).*?this, \(\) => \{\n(.*)return Plotly;\s*\}\)\);\s*", re.DOTALL
)
"""Plotly's script inside the function that makes it a module for other environments than a page."""


def document(template: str, figures: Mapping[str, Figure], **variables: object) -> str:
    """Returns an HTML document of about 5 MB, nearly all of which is plotly's script.

    `figures` are the charts by their names in the template. The text can be encoded as UTF-8.

    Raises:
        RequestError: plotly is not installed.
    """
    plotly = _plotly()
    script = (_DIRECTORY / "charts.js").read_text(encoding="utf-8")
    text = _environment().get_template(template).render(
        figures=figures,
        style=Markup((_DIRECTORY / "page.css").read_text(encoding="utf-8")),  # noqa: S704
        plotly=Markup(plotly), script=Markup(script),  # noqa: S704
        script_hashes=[_hash(plotly), _hash(script)],
        **variables,
    )  # fmt: skip
    # JSON can contain unpaired surrogates, which cannot be encoded as UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise RequestError(
            f"the HTML page requires plotly, which is not installed; run {install_command('report')}"
        ) from error
    # A browser would parse the script once to skip this function, and again to call it.
    return _MODULE.sub(lambda found: found[1], get_plotlyjs())


def _hash(script: str) -> str:
    """Returns the hash of a script for the Content-Security-Policy (CSP level 2, section 4.2.5)."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_DIRECTORY), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "beginning": lambda sentence: re.split(r"[:.,](?:\s|$)", sentence, maxsplit=1)[0],
        "cut": cut, "lines": _lines, "shortened": partial(shortened, limit=MAX_NAME),
    }  # fmt: skip
    environment.globals["hints"] = HINTS
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _lines(sentences: Sequence[str]) -> list[str]:
    lines = [cut(sentence, _MAX_SENTENCE) for sentence in sentences[:_MAX_SENTENCES]]
    num_left = len(sentences) - _MAX_SENTENCES
    return [*lines, f"and {num_left:,} more"] if num_left > 0 else lines
