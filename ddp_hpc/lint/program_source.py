"""What the source code of a PyTorch program shows about its ranks: their devices, data and checkpoints.

The code is parsed, never run. What cannot be judged counts as right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ddp_hpc.request.program_files import ProgramFiles

# Packages that divide the data among ranks, select their devices, or save for them.
_FRAMEWORKS = frozenset(
    "accelerate catalyst colossalai composer deepspeed detectron2 fairseq habitat habitat_baselines ignite keras "
    "lightning lightning_fabric lightning_lite megatron mmcv mmengine pytorch_lightning ray speechbrain submitit "
    "tensorflow trl".split()
)
# Names that contain the rank, or distinguish one rank from the others.
_RANK = re.compile(
    r"(?i)rank|master|main_(?:proc|node)|is_main|primary|chief|leader|(?:proc|node)_?id|^(?:gpu|device)(?:_?id)?$"
)
# Words of programs that know of other ranks, select a device, divide the data, or load a checkpoint.
_KNOWS_RANKS = (
    r"(?i)rank|world_?size|distribut|slurm|\bp(?:mi|mix|als)_|ompi_|\bmpi|hvd|horovod|\bddp|fsdp|task_?id|"
    r"proc_?id|proc\w*_index|\bjax|hostname|getpid|fabric|spawn|multiprocess"
)
_SELECTS_DEVICE = (
    r"(?i)^gloo|set_device|local_?rank|localid|gpu|device_(?:count|ids?|mesh)|visible_dev|cuda:$"
)
_DIVIDES_DATA = r"(?i)sampler$|shard|partition|scatter_|replica|iterable|webdataset|^wds$|dali|ffcv|by_node"
_LOADS = re.compile(
    r"torch\.load|(?:.*[._])?(?:load|resume|restore|restart)_(?:\w*_)?(?:checkpoint|ckpt|model|weight|snapshot)"
    r"\w*|(?:.*\.)?(?:auto_?)?(?:resume|restore|restart)\w*"
)
_SAVES = re.compile(r"(?is)torch\.save\(.*(?:state|model|net|check|ckpt|dict|snap|save).*")
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_FLAGS = (ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.JoinedStr, ast.BinOp)


class _Place(NamedTuple):
    """The file and the function of a node (the class for `__init__`), and the conditions of its execution."""

    file: str
    function: str = ""
    conditions: tuple[ast.AST, ...] = ()


@dataclass(frozen=True, eq=False)
class ProgramSource:
    """The source code of a program, and of its modules that are at hand."""

    files: ProgramFiles

    @property
    def shares_device(self) -> bool:
        """Whether all ranks of a node use the first GPU."""
        return self._connects_ranks and self._has("^cuda") and not self._has(_SELECTS_DEVICE)

    @property
    def shares_data(self) -> bool:
        """Whether each rank of a parallel program reads all of the data."""
        loaders = [call for call, _ in self._calls if _name(call.func) == "DataLoader"]
        shuffles = any(one.arg == "shuffle" for call in loaders for one in call.keywords)
        by_rank = any(
            "rank" in word.lower()
            for node, _ in self._nodes
            if isinstance(node, ast.Slice)
            or isinstance(getattr(node, "op", None), ast.Add | ast.Mult | ast.Sub)
            for word in _words(node)
        )
        return self._connects_ranks and shuffles and not self._has(_DIVIDES_DATA) and not by_rank

    @property
    def has_one_rank(self) -> bool:
        """Whether the program trains a model, and cannot know of other ranks."""
        return self._is_plain and "backward" in self._words and not self._has(_KNOWS_RANKS)

    @property
    def save_of_all_ranks(self) -> str:
        """Where all ranks save a checkpoint to the same file, such as `train.py:70`; empty if nowhere."""
        places = [
            f"{place.file}:{call.lineno}"
            for call, place in self._saves
            if not self._depends_on_rank(*place.conditions, *call.args[1:])
            and self._runs_on_all_ranks(place.function, frozenset())
        ]
        return places[0] if places and self._connects_ranks else ""

    @property
    def save_without_load(self) -> str:
        """Where the program saves a checkpoint, if it never loads one; otherwise empty."""
        loads = any(_LOADS.fullmatch(ast.unparse(call.func)) for call, _ in self._calls)
        places = [f"{place.file}:{call.lineno}" for call, place in self._saves]
        return places[0] if places and self._is_plain and "backward" in self._words and not loads else ""

    @cached_property
    def _words(self) -> frozenset[str]:
        words = (word for tree in self.files.trees for word in _words(tree))
        return frozenset(words) | self.files.elsewhere

    def _has(self, pattern: str) -> bool:
        return any(re.search(pattern, word) for word in self._words)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether all of a program with PyTorch was read, and no framework trains for it."""
        packages = self.files.packages_elsewhere
        has_trainer = "transformers" in packages and self._has("TrainingArguments")
        return self.files.is_complete and packages.isdisjoint(_FRAMEWORKS) and not has_trainer

    @property
    def _connects_ranks(self) -> bool:
        return self._is_plain and "init_process_group" in self._words

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, _Place]]:
        """The nodes of the program that can be executed: not functions that nothing names."""
        found: list[tuple[ast.AST, _Place]] = []
        pending: list[tuple[ast.AST, _Place]] = [
            (tree, _Place(name)) for tree, name in zip(self.files.trees, self.files.names, strict=True)
        ]
        while pending:
            node, place = pending.pop()
            found.append((node, place))
            file, function, conditions = place
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if not function and not node.decorator_list and name not in self._words:
                        continue
                    function = function if name == "__init__" else name
                    conditions = tuple(node.decorator_list)
                case ast.ClassDef(name=name):
                    function = name
                case ast.If(test=test) | ast.IfExp(test=test):
                    if file != self.files.names[0] and "__name__" in _words(test):
                        continue
                    conditions += (test,)
                case ast.With(items=items):
                    conditions += tuple(
                        one.context_expr for one in items if isinstance(one.context_expr, ast.Call)
                    )
            body = getattr(node, "body", ())
            for one in body if isinstance(body, list) else ():
                if isinstance(one, ast.If) and isinstance(one.body[-1], _LEAVES):
                    conditions += (one.test,)  # of the statements after it
            pending += [(child, _Place(file, function, conditions)) for child in ast.iter_child_nodes(node)]
        return found

    @cached_property
    def _calls(self) -> list[tuple[ast.Call, _Place]]:
        return [(node, place) for node, place in self._nodes if isinstance(node, ast.Call)]

    @cached_property
    def _saves(self) -> list[tuple[ast.Call, _Place]]:
        calls = (one for one in self._calls if _name(one[0].func) == "save")
        saves = [one for one in calls if _SAVES.fullmatch(ast.unparse(one[0]))]
        return sorted(saves, key=lambda one: (one[1].file, one[0].lineno))

    def _runs_on_all_ranks(self, function: str, seen: frozenset[str]) -> bool:
        """Whether a function is called, or passed to another one, and not on one rank only."""
        if not function or function in seen:
            return True
        calls = [
            (call, place)
            for call, place in self._calls
            if function in (_name(call.func), *map(_name, call.args)) and place.function != function
        ]
        on_all = [
            not self._depends_on_rank(
                *place.conditions, *(one for one in call.args if not seen and _computes(one))
            )
            and self._runs_on_all_ranks(place.function, seen | {function})
            for call, place in calls
        ]
        # Other classes can have methods of the same name.
        is_method = any(isinstance(call.func, ast.Attribute) for call, _ in calls)
        return bool(calls) and (all(on_all) if is_method else any(on_all))

    def _depends_on_rank(self, *nodes: ast.AST) -> bool:
        return any(word in self._rank_names or _RANK.search(word) for node in nodes for word in _words(node))

    @cached_property
    def _rank_names(self) -> set[str]:
        """The names of variables and functions that depend on the rank, such as `is_saving = rank == 0`."""
        names: set[str] = set()
        for node, place in self._nodes * 3:  # names of names of names
            if isinstance(node, ast.Assign) and _computes(node.value):
                targets = {_name(target) for target in node.targets}
            elif isinstance(node, ast.Return) and node.value:
                targets = {place.function}
            else:
                continue
            causes = (
                (node.value, *place.conditions) if isinstance(node.value, ast.Constant) else (node.value,)
            )
            if any(word in names or _RANK.search(word) for one in causes for word in _words(one)):
                names |= targets
        return names


def _words(tree: ast.AST) -> Iterator[str]:
    """Yields the names and the strings without blanks in a part of the source code."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and len(word) < 60 and not re.search(r"\s", word):
                yield word


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _computes(value: ast.AST) -> bool:
    """Whether a value is a constant, or a flag or string that is computed from other values."""
    if isinstance(value, ast.Call):
        return _name(value.func) in ("join", "format", "str", "Path") or bool(_RANK.search(_name(value.func)))
    return isinstance(value, _FLAGS)
