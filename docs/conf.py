"""Configuration of the documentation site, which `make docs` builds with Sphinx."""

from sphinx.application import Sphinx

import ddp_hpc

project = "ddp-hpc"
author = "the ddp-hpc maintainers"
copyright = "2026, the ddp-hpc maintainers"  # noqa: A001 - Sphinx requires this name
release = version = ddp_hpc.__version__

extensions = ["myst_parser", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["examples/**"]
nitpicky = True

# Creates anchors for headings down to level 4, so that Sphinx can check links to them.
myst_heading_anchors = 4

html_theme = "furo"
smartquotes = False  # curly quotes would break commands that users copy
html_title = f"ddp-hpc {release}"
html_show_sourcelink = False

# The copy button copies only commands, without prompts and output.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True


def _list_lint_pages_on_their_own_page(app: Sphinx, _: object) -> None:
    """Keeps the pages of lint checks out of the sidebar, since reference/lint/README.md lists them."""
    if app.env.docname.startswith("reference/lint/"):
        app.env.metadata[app.env.docname]["orphan"] = True


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _list_lint_pages_on_their_own_page)
