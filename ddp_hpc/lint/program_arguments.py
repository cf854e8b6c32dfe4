"""The arguments that a Python program accepts, as its calls of argparse define them.

The program is parsed, never run: its parser is built again from the source code, and argparse itself judges
the command line. A parser that cannot be built as a whole accepts everything.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from ddp_hpc.request.program_files import ProgramFiles

# What argparse may be told without an effect on the arguments that it accepts.
_OF_PARSER = frozenset(
    (
        "prog", "usage", "description", "epilog", "formatter_class", "add_help", "allow_abbrev",
        "argument_default",
    )
)  # fmt: skip
_WITHOUT_VALUE = frozenset(("store_true", "store_false", "store_const", "append_const", "count"))
# With these, a program has arguments that its calls do not show, or reads only a part of the arguments.
_HIDE_ARGUMENTS = frozenset(
    (
        "parse_known_args", "parse_known_intermixed_args", "parse_intermixed_args", "add_subparsers",
        "HfArgumentParser", "_add_action", "_actions", "_option_string_actions", "REMAINDER", "PARSER",
    )
)  # fmt: skip
_NUMBERS: dict[str, Callable[[str], object]] = {"int": int, "float": float}
# Functions that may read sys.argv without an effect on the arguments.
_ONLY_READ = frozenset(("len", "print", "join", "info", "basename"))
_Definition = tuple[tuple[str, ...], dict[str, Any]]


class Complaint(NamedTuple):
    """Why a program rejects its arguments: the end of a sentence about it, and what to do."""

    what: str
    remedy: str


class _RejectedError(Exception):
    """The error message of argparse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RejectedError(message)


class _Choices(list[object]):
    """Choices that contain any value of a variable."""

    def __contains__(self, value: object) -> bool:
        return _is_unknown(value) or super().__contains__(value)


def complaint(files: ProgramFiles, words: Sequence[str]) -> Complaint | None:
    """Returns why a program rejects these arguments; None if it accepts them, or if that is not known."""
    given: list[str] = []
    options: dict[str, argparse.Action] = {}
    is_lax = False
    try:
        definitions = _definitions(files)
        if definitions and {"-h", "--help"}.isdisjoint(words):
            options = dict(_built(definitions, is_lax=True)._option_string_actions)
            given = _known(words, options)
            is_lax = len(given) < len(words)
            _built(definitions, is_lax=is_lax).parse_args(given)
    except _RejectedError as rejected:
        return _explained(str(rejected), given, options, is_lax)
    except (argparse.ArgumentError, TypeError, ValueError, AttributeError, KeyError, RecursionError):
        return None  # argparse does not accept the definitions as they were read
    return None


def _is_unknown(word: object) -> bool:
    """Returns whether the shell replaces a word, or a part of it."""
    return isinstance(word, str) and any(mark in word for mark in "$`*?{")


def _known(words: Sequence[str], options: dict[str, argparse.Action]) -> list[str]:
    """Returns the words without those of which the shell may make several, or none."""
    given: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        is_value = bool(given) and (action := options.get(given[-1])) is not None and action.nargs is None
        if not _is_unknown(word) or is_value or (equals and name[:2] == "--" and not _is_unknown(name)):
            given.append(word)
    return given


def _explained(
    message: str, given: Sequence[str], options: dict[str, argparse.Action], is_lax: bool
) -> Complaint | None:
    kind, _, rest = message.partition(": ")
    if kind == "the following arguments are required":
        return Complaint(f"requires {rest}", "add it")
    if kind != "unrecognized arguments":
        return Complaint(f"rejects its {message}", "see its call of add_argument")
    word = rest.split(" ")[0]
    if word.startswith("-"):
        name = word.partition("=")[0]
        near = get_close_matches(name, options, n=1, cutoff=0.75)
        return Complaint(f"has no option {name}", f"did you mean {near[0]}?" if near else "remove it")
    if is_lax:
        return None  # the word may belong to one that the shell replaces
    flag = given[given.index(word) - 1] if word in given[1:] else ""
    if flag in options and options[flag].nargs == 0:
        return Complaint(f"takes no value after {flag}, such as {word}", f"write {flag} alone")
    return Complaint(f"takes no argument {word} here", "remove it, or write its option before it")


def _built(definitions: Sequence[_Definition], *, is_lax: bool) -> _Parser:
    """Returns a parser; if it is lax, no argument is required, as variables may contain some."""
    parser = _Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    for names, given in definitions:
        own = dict(given)
        if is_lax:
            own.pop("required", None)
            own |= {"nargs": "*"} if names[0][:1] != "-" or own.get("nargs") == "+" else {}
        parser.add_argument(*names, **own)
    return parser


def _definitions(files: ProgramFiles) -> list[_Definition] | None:
    """Returns the arguments of all calls of add_argument; None if there may be others."""
    # Modules may have parsers for their own use.
    trees = files.trees[:1] if any(map(_num_parsers, files.trees[:1])) else files.trees
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [one for tree in trees for one in _calls(tree) if _name(one[0].func) == "add_argument"]
    has_other_name = sum(_name(node) == "add_argument" for node in nodes) != len(calls)
    if sum(map(_num_parsers, trees)) != 1 or has_other_name or not _is_whole(nodes, files):
        return None
    found = [_definition(call, is_conditional) for call, is_conditional in calls]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else None


def _num_parsers(tree: ast.Module) -> int:
    """Returns the number of parsers that a file makes; one more if it makes a special one."""
    calls = [call for call, _ in _calls(tree) if _name(call.func) == "ArgumentParser"]
    return len(calls) + any(call.args or {word.arg for word in call.keywords} - _OF_PARSER for call in calls)


def _is_whole(nodes: Sequence[ast.AST], files: ProgramFiles) -> bool:
    """Returns whether a parser has only the arguments of the calls in these nodes, and reads all words."""
    imports = [
        (alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}", alias.asname)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    others = [name for name, _ in imports if name.partition(".")[0] != "argparse"]
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    parses = [call for tree in files.trees for call, _ in _calls(tree) if _is_parse(call)]
    return (
        not {("argparse", None), ("argparse.ArgumentParser", None)}.isdisjoint(imports)
        and not any("argparse" in name.lower() for name in others)
        and all(_name(base) != "ArgumentParser" for base in bases)
        and _HIDE_ARGUMENTS.isdisjoint(map(_name, nodes))
        and bool(parses)
        and all(map(_reads_command_line, parses))
        and not any(_changes_arguments(tree, parses) for tree in files.trees)
        and not _is_passed_on(files)
    )


def _is_parse(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "parse_args"


def _reads_command_line(call: ast.Call) -> bool:
    given = [ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords))]
    return not given or given[0] in ("sys.argv[1:]", "argv", "args", "None")


def _changes_arguments(tree: ast.Module, parses: Sequence[ast.Call]) -> bool:
    """Returns whether the program uses sys.argv itself, other than its own name."""
    harmless = [call for call, _ in _calls(tree) if _name(call.func) in _ONLY_READ]
    own_name = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and ast.unparse(n) == "sys.argv[0]"]
    known = {id(node) for part in (*parses, *harmless, *own_name) for node in ast.walk(part)}
    return any(_name(node) == "argv" and id(node) not in known for node in ast.walk(tree))


def _is_passed_on(files: ProgramFiles) -> bool:
    """Returns whether a function or another name gets the parser, and may add arguments."""
    nodes = [node for tree in files.trees for node in ast.walk(tree)]
    names: set[str] = set()  # of the parser, and of its groups
    # The functions that return it, or a part of it.
    makers = {"ArgumentParser", "add_argument_group", "add_mutually_exclusive_group"}
    num_known = 0
    while num_known < len(names) + len(makers):
        num_known = len(names) + len(makers)
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_call_of(node.value, makers):
                names.update(map(_name, node.targets))
            elif isinstance(node, ast.FunctionDef):
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
                is_maker = any(
                    value and (_is_call_of(value, makers) or _name(value) in names) for value in values
                )
                makers |= {node.name} if is_maker else set()
    return any(_name(part) in names or _is_call_of(part, makers) for node in nodes for part in _given(node))


def _given(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node gives to a function, to a list, or to another name."""
    if isinstance(node, ast.Call):
        yield from (*node.args, *(word.value for word in node.keywords))
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
        yield node.value
    elif isinstance(node, ast.List | ast.Tuple | ast.Dict):
        yield from ast.iter_child_nodes(node)


def _definition(call: ast.Call, is_conditional: bool) -> _Definition | None:
    """Returns the names and the properties of an argument; None if the source code does not show them."""
    names = tuple(
        one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
    )
    words = {word.arg: word.value for word in call.keywords}
    values = {name: node.value for name, node in words.items() if isinstance(node, ast.Constant)}
    is_optional = bool(names) and names[0].startswith("-")
    if not names or len(names) < len(call.args) or None in words or (is_conditional and not is_optional):
        return None
    action, nargs = values.get("action", None if "action" in words else "store"), values.get("nargs")
    given: dict[str, Any] = {"dest": values["dest"]} if is_optional and values.get("dest") else {}
    if is_optional and not is_conditional and values.get("required") is True:
        given["required"] = True
    if action in _WITHOUT_VALUE:
        return names, given | {"action": action} | ({"const": 0} if action.endswith("const") else {})
    if action in ("help", "version"):
        return names, {"action": "store_true"}
    if action is None and ast.unparse(words["action"]).endswith("BooleanOptionalAction"):
        return names, given | {"action": argparse.BooleanOptionalAction}
    if action not in ("store", "append", "extend") or ("nargs" in words and "nargs" not in values):
        return None
    given |= {"action": action} | _accepted(words)
    return names, given | ({"nargs": nargs} if nargs is not None else {})


def _accepted(words: dict[str | None, ast.expr]) -> dict[str, Any]:
    """Returns the type and the choices of an argument, if they are numbers and texts."""
    given: dict[str, Any] = {}
    kind = words.get("type")
    name = kind.id if isinstance(kind, ast.Name) else ""
    if convert := _NUMBERS.get(name):

        def number(text: str) -> object:
            return text if _is_unknown(text) else convert(text)

        number.__name__ = name  # argparse prints it
        given["type"] = number
    choices = words.get("choices")
    if isinstance(choices, ast.List | ast.Tuple | ast.Set) and (kind is None or name in ("str", *_NUMBERS)):
        values = [one.value for one in choices.elts if isinstance(one, ast.Constant)]
        given |= {"choices": _Choices(values)} if len(values) == len(choices.elts) else {}
    return given


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in names


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name; empty if the node is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, bool]]:
    """Yields the calls in the order of the source code, and whether a condition or a loop contains each."""
    pending = [(tree, False)]
    while pending:
        node, is_conditional = pending.pop()
        if isinstance(node, ast.Call):
            yield node, is_conditional
        is_main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        within = is_conditional or (isinstance(node, ast.If | ast.For | ast.While | ast.Try) and not is_main)
        pending += [(child, within) for child in reversed([*ast.iter_child_nodes(node)])]
