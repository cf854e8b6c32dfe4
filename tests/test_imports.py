"""Modules import each other in one direction only, also through the packages that contain them."""

import re

import grimp

from tests.conftest import PROJECT


def ancestors(module: str) -> list[str]:
    """Packages that Python imports before the module."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_there_is_no_import_circle() -> None:
    graph = grimp.build_graph("ddp_hpc", "data_gen", exclude_type_checking_imports=True)
    imports = {}
    for module in graph.modules:
        direct = graph.find_modules_directly_imported_by(module)
        reached = {*direct, *ancestors(module)}
        for other in direct:
            reached.update(ancestors(other))
        imports[module] = (reached - {module}) & graph.modules
    assert circles(imports) == []


def test_only_the_directory_of_schedulers_compares_their_names() -> None:
    """Other code asks the object of the scheduler, so that a new scheduler needs no change elsewhere."""
    own = PROJECT / "ddp_hpc" / "schedulers"
    files = [path for path in (PROJECT / "ddp_hpc").rglob("*.py") if own not in path.parents]
    assert [str(path) for path in files if re.search(r"scheduler ==", path.read_text())] == []
