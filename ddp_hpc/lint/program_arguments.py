"""The arguments that a Python program accepts, as its calls of argparse define them.

The program is parsed, never run: its parser is built again from the source code, and the argparse of the
Python that runs lint judges the command line. Only a parser whose whole life is in the program's own file is
built; of all others, every argument is accepted.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from ddp_hpc.request.program_files import ProgramFiles

# What argparse may be told without an effect on the arguments that it accepts.
_OF_PARSER = frozenset(
    ("prog", "usage", "description", "epilog", "formatter_class", "add_help", "argument_default")
)
_GROUPS = frozenset(("add_argument_group", "add_mutually_exclusive_group"))
_HARMLESS = frozenset(("set_defaults", "print_help", "print_usage", "format_help", "error", "exit"))
_WITHOUT_VALUE = frozenset(("store_true", "store_false", "store_const", "append_const", "count"))
_EXITS = frozenset(("exit", "quit", "_exit", "abort"))
_HARMLESS_DECORATORS = frozenset(("record", "no_grad", "inference_mode", "staticmethod"))
_NUMBERS: dict[str, Callable[[str], object]] = {"int": int, "float": float}
# Functions that may get sys.argv without an effect on the arguments.
_ONLY_READ = frozenset(("len", "print", "join", "info", "basename"))
_MOST_WORDS = 1000
_MOST_VALUES = 100
_MOST_ARGUMENTS = 2000
_MOST_POSITIONALS = 5
# Functions that return a parser of each other.
_DEEPEST = 5
# Words of which the shell may make several, or none.
_IS_UNKNOWN = re.compile(r"[$`*?{\[(]")
# Versions of argparse differ in what they take for a number rather than for an option.
_ODD_NUMBER = re.compile(r"-\.?\d(?!\d*(?:\.\d+)?$)")
_ASKS_FOR_HELP = re.compile(r"--?h(?:e(?:lp?)?)?|-[A-Za-z]+h[A-Za-z]*")

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


def parser_of(files: ProgramFiles) -> argparse.ArgumentParser | None:
    """Returns the parser of a program; None if it has none, or if others may change it or its arguments."""
    try:
        definitions = _definitions(files)
        parser = _Parser(add_help=False)
        for names, properties in definitions or ():
            parser.add_argument(*names, **properties)
    except (argparse.ArgumentError, TypeError, ValueError, AttributeError, LookupError, RecursionError):
        return None  # argparse does not accept the definitions as they were read
    return parser if definitions else None


def complaint(parser: argparse.ArgumentParser, words: Sequence[str]) -> Complaint | None:
    """Returns why a program rejects these arguments; None if it accepts them, or if that is not known.

    If the shell may make several words, or none, of one of them, only the names of options are judged.
    """
    options = parser._option_string_actions
    if len(words) > _MOST_WORDS or any(
        _ASKS_FOR_HELP.fullmatch(word) or _ODD_NUMBER.match(word) for word in words
    ):
        return None
    known = _known(words, options)
    if len(known) < len(words):
        return _unknown_option(known, options)
    try:
        parser.parse_args(known)
    except _RejectedError as rejected:
        return _explained(str(rejected), known, options)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        return None  # of argparse itself
    return None


def _is_unknown(word: object) -> bool:
    """Returns whether the shell replaces a word, or a part of it."""
    return isinstance(word, str) and _IS_UNKNOWN.search(word) is not None


def _known(words: Sequence[str], options: dict[str, argparse.Action]) -> list[str]:
    """Returns the words that the shell does not replace, and the values of options that are one word."""
    known: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        is_value = bool(known) and (action := options.get(known[-1])) is not None and action.nargs is None
        if not _is_unknown(word) or is_value or (equals and name[:2] == "--" and not _is_unknown(name)):
            known.append(word)
    return known


def _unknown_option(words: Sequence[str], options: dict[str, argparse.Action]) -> Complaint | None:
    before = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in before if re.match(r"--[A-Za-z]", word)]
    return next((_no_option(n, options) for n in names if not any(o.startswith(n) for o in options)), None)


def _no_option(name: str, options: dict[str, argparse.Action]) -> Complaint:
    near = get_close_matches(name, options, n=1, cutoff=0.75)
    return Complaint(
        f"has no option {name}",
        f"did you mean {near[0]}?" if near else "omit it, or use an option that its --help lists",
    )


def _no_value(flag: str, value: str) -> Complaint:
    return Complaint(f"takes no value after {flag}, such as {value}", f"write {flag} alone, or omit it")


def _explained(message: str, words: Sequence[str], options: dict[str, argparse.Action]) -> Complaint | None:
    kind, _, rest = message.partition(": ")
    if kind == "the following arguments are required":
        return Complaint(f"requires {rest}", "add them" if "," in rest else "add it")
    if flag := re.match(r"argument (?:\S+/)?(--?[\w-]+): ignored explicit argument '(.*)'", message):
        return _no_value(flag[1], flag[2])
    if kind != "unrecognized arguments":
        return Complaint(f"rejects its arguments: {message}", "see its --help")
    word = max((word for word in words if rest.startswith(word)), key=len, default=rest)
    if re.match(r"--?[A-Za-z]", word):
        return _no_option(word.partition("=")[0], options)
    flag_before = words[words.index(word) - 1] if word in words[1:] else ""
    if flag_before in options and options[flag_before].nargs == 0:
        return _no_value(flag_before, word)
    return Complaint(
        f"takes no argument {word} here", "write it as the value of an option, or omit it: see its --help"
    )


def _definitions(files: ProgramFiles) -> list[_Definition] | None:
    """Returns the arguments of all calls of add_argument; None if there may be others."""
    if not files.trees or not files.is_complete or any(map(_has_arguments, files.trees[1:])):
        return None
    tree = files.trees[0]
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    made, parsed, adds = (
        [call for call in calls if _name(call.func) == name]
        for name in ("ArgumentParser", "parse_args", "add_argument")
    )
    order = {call: number for number, call in enumerate(_always_called(nodes, tree.body))}
    is_plain = len(made) == len(parsed) == 1 and made[0] in order and parsed[0] in order
    if not is_plain or not _is_of_argparse(nodes, made[0]) or parsed[0].args or parsed[0].keywords:
        return None
    names = _names_of_parser(nodes)
    if names is None or not all(_is_harmless(node, parents, names) for node in nodes):
        return None
    if len(adds) > _MOST_ARGUMENTS or any(order.get(call, len(order)) > order[parsed[0]] for call in adds):
        return None  # some are added in a branch, or not at all
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    found: list[_Definition | None] = []
    if not any(word.arg == "add_help" and _constant(word.value) is False for word in made[0].keywords):
        found.append((("-h", "--help"), {"action": "store_true"}))
    found += [_definition(call, own) for call in adds]
    # With some of these between options, versions of argparse differ, or need much time.
    without = [one[1] for one in found if one and one[0][0][0] != "-"]
    is_hard = len(without) > _MOST_POSITIONALS or any("nargs" in properties for properties in without)
    known = [one for one in found if one is not None]
    return None if is_hard or len(known) < len(found) or len(found) < 2 else known


def _has_arguments(tree: ast.Module) -> bool:
    """Returns whether a module of the program may define, read or change arguments."""
    names = ("argv", "add_argument", "parse_args", "parse_known_args")
    return any(_name(node) in names for node in ast.walk(tree))


def _is_of_argparse(nodes: Sequence[ast.AST], made: ast.Call) -> bool:
    """Returns whether a parser is one of argparse, without special properties."""
    imports = [
        (alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}", alias.asname)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if "argparse" in alias.name.lower() or "argumentparser" in alias.name.lower()
    ]
    form = ("argparse", None) if isinstance(made.func, ast.Attribute) else ("argparse.ArgumentParser", None)
    is_whole = ast.unparse(made.func) in ("argparse.ArgumentParser", "ArgumentParser")
    is_special = bool(made.args) or not {word.arg for word in made.keywords} <= _OF_PARSER
    return form in imports and {*imports} <= {form, ("argparse", None)} and is_whole and not is_special


def _names_of_parser(nodes: Sequence[ast.AST]) -> set[str] | None:
    """Returns the names of the parser, of its groups and of functions that return it; None if unclear."""
    names = {"ArgumentParser", *_GROUPS}
    for _ in range(_DEEPEST):
        before = len(names)
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_call_of(node.value, names):
                names.update(map(_name, node.targets))
            elif isinstance(node, ast.FunctionDef):
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
                is_maker = any(v and (_is_call_of(v, names) or _name(v) in names) for v in values)
                names |= {node.name} if is_maker else set()
        if len(names) == before:
            return names if "" not in names else None
    return None


def _is_harmless(node: ast.AST, parents: dict[ast.AST, ast.AST], names: set[str]) -> bool:
    """Returns whether a node leaves the parser and the command line as they are."""
    parent = parents.get(node)
    if _name(node) == "argv":
        is_own_name = isinstance(parent, ast.Subscript) and _constant(parent.slice) == 0
        return is_own_name or (isinstance(parent, ast.Call) and _name(parent.func) in _ONLY_READ)
    if isinstance(node, ast.alias) and node.name == "argv":
        return False
    if _is_call_of(node, {"add_argument", "parse_args"}):
        receiver = getattr(getattr(node, "func", None), "value", node)
        is_of_parser = _name(receiver) in names or _is_call_of(receiver, names)
        # What add_argument returns can be changed.
        return is_of_parser and (isinstance(parent, ast.Expr) or _is_call_of(node, {"parse_args"}))
    if isinstance(getattr(node, "ctx", None), ast.Store):  # such as parser.error = ...
        return not isinstance(node, ast.Attribute) or _name(node.value) not in names
    is_made = _is_call_of(node, names)
    if not is_made and (_name(node) not in names or _is_called(node, parent)):
        return True
    if isinstance(parent, ast.Return | ast.Expr | ast.FunctionDef | ast.arg) or (
        is_made and isinstance(parent, ast.Assign)
    ):
        return True  # the last two are annotations
    allowed = _HARMLESS | _GROUPS | {"add_argument", "parse_args"}
    is_method = isinstance(parent, ast.Attribute) and parent.attr in allowed
    return is_method and parent is not None and _is_called(parent, parents.get(parent))


def _is_called(node: ast.AST, parent: ast.AST | None) -> bool:
    return isinstance(parent, ast.Call) and parent.func is node


def _always_called(nodes: Sequence[ast.AST], body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Yields the calls that the program makes in any case, in this order, as far as that is clear."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            own = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            functions.setdefault(node.name, []).extend(one for one in own if one.name == "__init__")
    entered: set[str] = set()
    exits: list[ast.AST] = []

    def of_body(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
        for statement in body:
            if isinstance(statement, ast.With) or (isinstance(statement, ast.If) and _is_main(statement)):
                yield from of_body(statement.body)
            elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
                for call in of_expression(statement.value):
                    yield call
                    exits.extend([call] if _name(call.func) in _EXITS else [])
                    function = _followed(call, functions)
                    if function and function.name not in entered:
                        entered.add(function.name)
                        yield from of_body(function.body)
            elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                parts = list(ast.walk(statement))
                exits.extend(p for p in parts if isinstance(p, ast.Call) and _name(p.func) in _EXITS)
                if any(isinstance(part, ast.Return | ast.Raise) for part in parts):
                    return
            if exits or isinstance(statement, ast.Return | ast.Raise):
                return

    def of_expression(node: ast.AST | None) -> Iterator[ast.Call]:
        if node is None or isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension):
            return
        for child in ast.iter_child_nodes(node):
            yield from of_expression(child)
        if isinstance(node, ast.Call):
            yield node

    yield from of_body(body)


def _followed(call: ast.Call, functions: dict[str, list[ast.FunctionDef]]) -> ast.FunctionDef | None:
    """Returns the function of the program that a call runs at once; None if that is not clear."""
    is_method = isinstance(call.func, ast.Attribute) and _name(call.func.value) == "self"
    found = functions.get(_name(call.func), []) if isinstance(call.func, ast.Name) or is_method else []
    if len(found) != 1 or not {*map(_name, found[0].decorator_list)} <= _HARMLESS_DECORATORS:
        return None
    has_yield = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(found[0]))
    return None if has_yield else found[0]


def _is_main(statement: ast.If) -> bool:
    return ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _definition(call: ast.Call, own: set[str]) -> _Definition | None:
    """Returns the names and the properties of an argument; None if the source code does not show them.

    `own` are the names that the program gives to functions, variables and modules.
    """
    texts = [value for value in map(_constant, call.args) if isinstance(value, str) and value]
    names, words = tuple(texts), {word.arg: word.value for word in call.keywords}
    values = {name: node.value for name, node in words.items() if isinstance(node, ast.Constant)}
    is_optional = bool(names) and names[0].startswith("-")
    if not names or len(names) < len(call.args) or None in words:
        return None
    action, nargs = values.get("action", None if "action" in words else "store"), values.get("nargs")
    properties: dict[str, Any] = {"dest": values["dest"]} if is_optional and "dest" in values else {}
    if not isinstance(values.get("dest", ""), str):
        return None
    if is_optional and values.get("required") is True:
        properties["required"] = True
    if action in _WITHOUT_VALUE:
        return names, properties | {"action": action} | ({"const": 0} if action.endswith("const") else {})
    if action is None and ast.unparse(words["action"]).endswith("BooleanOptionalAction"):
        return names, properties | {"action": argparse.BooleanOptionalAction}
    is_known = nargs in (None, "?", "*", "+") or (isinstance(nargs, int) and nargs < _MOST_VALUES)
    if action not in ("store", "append", "extend") or not is_known or {"nargs"} & words.keys() - values:
        return None
    properties |= {"action": action} | _accepted(words, own)
    return names, properties | ({"nargs": nargs} if nargs is not None else {})


def _accepted(words: dict[str | None, ast.expr], own: set[str]) -> dict[str, Any]:
    """Returns the type and the choices of an argument, if they are numbers and texts."""
    properties: dict[str, Any] = {}
    kind = words.get("type")
    name = kind.id if isinstance(kind, ast.Name) and kind.id not in own else ""
    if convert := _NUMBERS.get(name):

        def number(text: str) -> object:
            return text if _is_unknown(text) else convert(text)

        number.__name__ = name  # argparse prints it
        properties["type"] = number
    choices = words.get("choices")
    if isinstance(choices, ast.List | ast.Tuple | ast.Set) and (kind is None or name in ("str", *_NUMBERS)):
        values = [one.value for one in choices.elts if isinstance(one, ast.Constant)]
        properties |= {"choices": _Choices(values)} if len(values) == len(choices.elts) else {}
    return properties


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in names


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name; empty if the node is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
