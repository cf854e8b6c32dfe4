"""No function is longer than 60 lines, so that a reader sees it whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_MAX_LINES = 60
# The options of qsub, in the order of its manual page.
_ALLOWED = {"ddp_hpc/rehearse/pbs/qsub.py: _attributes"}


def _long_functions(source: str, path: str, max_lines: int) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > max_lines:
                yield f"{path}: {node.name}", num_lines


def _modules() -> list[Path]:
    return [path for package in ("ddp_hpc", "data_gen") for path in sorted((_ROOT / package).rglob("*.py"))]


def test_no_function_is_longer_than_60_lines() -> None:
    modules = _modules()
    assert len(modules) > 100
    found = {
        name: num_lines
        for path in modules
        for name, num_lines in _long_functions(
            path.read_text(encoding="utf-8"), path.relative_to(_ROOT).as_posix(), _MAX_LINES
        )
    }
    assert found.keys() <= _ALLOWED, f"split these functions (lines): {found}"


def test_nested_and_asynchronous_functions_are_measured() -> None:
    source = "class C:\n  def method(self):\n    async def inner():\n      pass\n      pass\n"
    assert dict(_long_functions(source, "m.py", 2)) == {"m.py: method": 4, "m.py: inner": 3}
