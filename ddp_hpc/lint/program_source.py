"""Mistakes of PyTorch programs with several ranks, as their source code shows them.

The code is parsed, never run. What cannot be judged counts as right.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ddp_hpc.request.program_files import ProgramFiles

# Packages that divide the data among ranks, or save for them.
_FRAMEWORKS = frozenset(
    (
        "accelerate", "catalyst", "colossalai", "composer", "deepspeed", "detectron2", "fairseq", "habitat",
        "habitat_baselines", "ignite", "keras", "lightning", "lightning_fabric", "lightning_lite", "megatron",
        "mmcv", "mmengine", "pytorch_lightning", "ray", "speechbrain", "submitit", "tensorflow", "trl",
    )
)  # fmt: skip
# Names that contain the rank, or distinguish one rank from the others.
_RANK = re.compile(
    r"(?i)rank|master|main_(?:proc|node)|is_main|primary|chief|leader|(?:proc|node|worker)_?i(?:d|dx|ndex)|"
    r"^(?:gpu|device)(?:_?id)?$"
)
# Words of programs that know of other ranks, or divide the data.
_KNOWS_RANKS = (
    r"(?i)rank|world_?size|distribut|slurm|\bp(?:mi|mix|als)_|ompi_|\bmpi|hvd|horovod|\bddp|fsdp|task_?id|"
    r"proc_?id|proc\w*_index|\bjax|hostname|getpid|fabric|spawn|multiprocess"
)
_CONNECTS_RANKS = (
    r"(?i)process_?group|init_?dist|accelerat|trainer|fabric|hvd|horovod|deepspeed|spawn|launch|(?<!co)mpi"
)
# Programs that search for parameters, of which each rank tries others.
_SEARCHES = r"(?i)optuna|hyperopt|^suggest_|^nni$|^uuid4?$"
_DIVIDES_DATA = r"(?i)sampler$|shard|partition|scatter_|replica|iterable|webdataset|^wds$|dali|ffcv|by_node"
_OWN_DEVICE = r"(?i)local_?(?:rank|id)|set_device|device_count|visible_device|^cuda:$|accelerator|^gpu"
_LOADS = re.compile(
    r"torch\.load|(?:.*[._])?(?:load|resume|restore|restart)_(?:\w*_)?(?:checkpoint|ckpt|model|weight|snapshot)"
    r"\w*|(?:.*\.)?(?:auto_?)?(?:resume|restore|restart)\w*"
)
_SAVES = re.compile(r"(?is)torch\.save\((?:\*|.*(?:state|model|check|ckpt|weight|saved|\bnet)).*")
_LOCAL_RANK_0 = re.compile(r"(?:\w+\.)*_?local_?rank == 0|not (?:\w+\.)*_?local_?rank")
_ON_NODE = re.compile("/(?:tmp|scratch|local|dev)")
# Files and functions that load a model for another purpose than training.
_TESTS = re.compile(r"(?:^|[/_ ])(?:test|eval(?:uate)?|infer(?:ence)?|predict)(?:[_./ ]|$)")
# Datasets for another purpose than training.
_TEST_DATA = re.compile(r"(?i)test|val|infer|predict")
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_FLAGS = (ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.JoinedStr, ast.BinOp)

# The file and the function of a node (the class for `__init__`), and the conditions of its execution.
_Place = tuple[str, str, tuple[ast.AST, ...]]


@dataclass(frozen=True, eq=False)
class ProgramSource:
    """The source code of a program, and of its modules that are available."""

    files: ProgramFiles

    @property
    def starts_ranks(self) -> bool:
        """Whether the program starts the processes of its ranks with torch.multiprocessing."""
        return self._connects_ranks and self._has("^spawn$")

    @property
    def shares_data(self) -> bool:
        """Whether each rank of a parallel program reads all of the data."""
        loaders = [call for call, _ in self._calls if _name(call.func) == "DataLoader"]
        arguments = {one.arg for call in loaders for one in call.keywords}
        # It is the third argument, and can be in **arguments, which have no name.
        shuffles = not arguments.isdisjoint(("shuffle", None)) or any(len(call.args) > 2 for call in loaders)
        operators = (ast.Add, ast.Mult, ast.Sub)
        parts = (n for n, _ in self._nodes if isinstance(getattr(n, "op", n), (ast.Slice, *operators)))
        by_rank = any("rank" in word.lower() for part in parts for word in _words(part))
        return self._connects_ranks and shuffles and not self._has(_DIVIDES_DATA) and not by_rank

    @property
    def shares_gpu(self) -> bool:
        """Whether all ranks of a program that trains use the first GPU that they see."""
        if not self._trains or not self._connects_ranks or self._has(_OWN_DEVICE):
            return False
        placed = [call for call, _ in self._calls if _name(call.func) in ("cuda", "to", "device")]
        arguments = [value for one in placed for value in (*one.args, *(word.value for word in one.keywords))]
        given = {getattr(one, "value", None) for one in arguments}
        on_gpu = not given.isdisjoint(("cuda", "cuda:0")) or any(_name(one.func) == "cuda" for one in placed)
        return on_gpu and not self._depends_on_rank(*arguments)

    @property
    def repeated_order(self) -> str:
        """Where a DistributedSampler is made that gives the same order in each epoch; empty if nowhere."""
        if not self._trains or not self._connects_ranks or self._has("^set_epoch$"):
            return ""
        made = (one for one in self._calls if _name(one[0].func) == "DistributedSampler")
        # One that is made in each epoch can be that of another dataset.
        shuffled = [one for one in made if one[0] not in self._in_loops and _shuffles(one[0])]
        heads = (part for loop in self._loops for part in _head(loop))
        # A loop over the data in another loop, which need not speak of epochs.
        bodies = (node for loop in self._loops for node in loop.body)
        inner = (part for body in bodies for node in ast.walk(body) for part in _head(node))
        if not (_names_any(heads, "epoch", "epochs") or _names_any(inner, "loader", "dl")):
            return ""
        return next((f"{file}:{call.lineno}" for call, (file, _, _) in reversed(shuffled)), "")

    @property
    def has_one_rank(self) -> bool:
        """Whether the program trains a model, and cannot know of other ranks."""
        has_agent = self._has("^wandb$") and self._has("^agent$")
        return self._trains and not (self._has(_KNOWS_RANKS) or self._has(_SEARCHES) or has_agent)

    @property
    def is_alone(self) -> bool:
        """Whether all of the program was read, and no part of it connects ranks."""
        return self.files.is_complete and not self._has(_CONNECTS_RANKS)

    @property
    def ignores_signals(self) -> bool:
        """Whether all of the program was read, and no part of it, nor a framework, handles signals."""
        return self._is_plain and not self._has("(?i)signal|preempt|requeue")

    @property
    def save_of_all_ranks(self) -> str:
        """Where all ranks save a checkpoint to the same file, such as `train.py:70`; empty if nowhere."""
        for call, (file, function, conditions) in self._saves if self._connects_ranks else ():
            is_judged = function in self._run_by_all and call not in self._in_other_classes
            if is_judged and not self._depends_on_rank(*conditions, *call.args[1:]):
                return f"{file}:{call.lineno}"
        return ""

    @property
    def save_of_each_node(self) -> str:
        """Where the first rank of each node saves a checkpoint to the same file; empty if nowhere."""
        is_local = self._has(r"^(?:LOCAL_RANK|SLURM_LOCALID)$") and not self._takes_global_for_local
        for call, (file, function, conditions) in self._saves if is_local and self._connects_ranks else ():
            others = [one for one in conditions if not _LOCAL_RANK_0.fullmatch(ast.unparse(one))]
            is_judged = function in self._run_by_all and call not in self._in_other_classes
            is_judged &= len(others) < len(conditions) and not any(map(_ON_NODE.match, _words(call)))
            if is_judged and not self._depends_on_rank(*others, *call.args[1:]):
                return f"{file}:{call.lineno}"
        return ""

    @property
    def save_without_load(self) -> str:
        """Where the program saves a checkpoint, if it never loads one; otherwise empty."""
        calls = (one for one, place in self._calls if not _TESTS.search(" ".join(place[:2])))
        loads = (ast.unparse(one) for one in calls if _LOADS.fullmatch(ast.unparse(one.func)))
        # torch.load also reads data.
        restores = any(_name(call.func) == "load_state_dict" for call, _ in self._calls)
        if not self._trains or any(restores or not re.search("data|image|feature", one) for one in loads):
            return ""
        names = {_name(node.func) for node in self._in_loops if isinstance(node, ast.Call)}
        # A program that only saves its result at the end has no checkpoints.
        saves = (one for one in self._saves if one[0] in self._in_loops or one[1][1] in names)
        return next((f"{file}:{call.lineno}" for call, (file, _, _) in saves), "")

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(word for tree in self.files.trees for word in _words(tree)) | self.files.elsewhere

    def _has(self, pattern: str) -> bool:
        return any(re.search(pattern, word) for word in self._words)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the program uses PyTorch without a framework, and all of it was read."""
        packages = self.files.packages_elsewhere
        has_trainer = "transformers" in packages and self._has("TrainingArguments")
        is_plain = "torch" in packages and packages.isdisjoint(_FRAMEWORKS) and not has_trainer
        return self.files.is_complete and is_plain

    @property
    def _trains(self) -> bool:
        return self._is_plain and any(_name(call.func) == "backward" for call, _ in self._calls)

    @property
    def _connects_ranks(self) -> bool:
        return self._is_plain and "init_process_group" in self._words

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, _Place]]:
        found: list[tuple[ast.AST, _Place]] = []
        pending: list[tuple[ast.AST, _Place]] = [
            (tree, (name, "", ())) for tree, name in zip(self.files.trees, self.files.names, strict=True)
        ]
        while pending:
            node, place = pending.pop()
            found.append((node, place))
            file, function, conditions = place
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    function = function if name == "__init__" else name
                    conditions = tuple(node.decorator_list)
                case ast.ClassDef(name=name):
                    function = name
                case ast.If(test=test) if "__name__" in _words(test) and file != self.files.names[0]:
                    continue
                case ast.If(test=test) | ast.IfExp(test=test):
                    conditions += (test,)
            children = list(ast.iter_child_nodes(node))
            # `if ...: return` is a condition of the statements after it.
            ends = (one for one in children if isinstance(one, ast.If) and isinstance(one.body[-1], _LEAVES))
            conditions += tuple(one.test for one in ends)
            pending += [(child, (file, function, conditions)) for child in children]
        return found

    @cached_property
    def _loops(self) -> list[ast.For | ast.While]:
        return [node for node, _ in self._nodes if isinstance(node, (ast.For, ast.While))]

    @cached_property
    def _in_loops(self) -> set[ast.AST]:
        return {node for loop in self._loops for node in ast.walk(loop)}

    @cached_property
    def _calls(self) -> list[tuple[ast.Call, _Place]]:
        """The calls outside of functions that nothing names."""
        used = {"", *self._words}
        return [(n, place) for n, place in self._nodes if isinstance(n, ast.Call) and place[1] in used]

    @cached_property
    def _saves(self) -> list[tuple[ast.Call, _Place]]:
        calls = (one for one in self._calls if _name(one[0].func) == "save")
        saves = [one for one in calls if _SAVES.fullmatch(ast.unparse(one[0]))]
        saves = [one for one in saves if self._memory_files.isdisjoint(map(_name, one[0].args))]
        return sorted(saves, key=lambda one: (one[1][0] != self.files.names[0], one[0].lineno))

    @property
    def _takes_global_for_local(self) -> bool:
        """Whether a variable with the name of a local rank may have the rank among all."""
        for node, _ in self._nodes:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            is_local = any(re.search("local_?rank$", _name(target)) for target in targets)
            if is_local and isinstance(node, ast.Assign):
                words = set(_words(node.value))
                if words & {"get_rank", "SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "rank"}:
                    return True
        return False

    @cached_property
    def _in_other_classes(self) -> set[ast.AST]:
        """The code in classes that nothing names, and in those of which several have the same name."""
        classes = [node for node, _ in self._nodes if isinstance(node, ast.ClassDef)]
        times = Counter(one.name for one in classes)
        others = (one for one in classes if one.name not in self._words or times[one.name] > 1)
        return {node for one in others for node in ast.walk(one)}

    @cached_property
    def _memory_files(self) -> set[str]:
        """The names of files in memory, such as `file = io.BytesIO()`."""
        assigned = (node for node, _ in self._nodes if isinstance(node, ast.Assign))
        made = (node for node in assigned if _name(getattr(node.value, "func", node)) == "BytesIO")
        return {_name(target) for node in made for target in node.targets}

    @cached_property
    def _run_by_all(self) -> set[str]:
        """The functions that all ranks call. Those that also a single rank calls are left out."""
        reached, of_one = {""}, set[str]()
        for call, (_, function, conditions) in self._calls * 8:  # chains of calls
            names = {_name(call.func), *(one.id for one in call.args if isinstance(one, ast.Name))}
            if self._depends_on_rank(*conditions, *(one for one in call.args if isinstance(one, _FLAGS))):
                of_one |= names
            elif function in reached:
                reached |= names
        return reached - of_one - set(dir(dict))  # many classes have methods with the names of those of dict

    def _depends_on_rank(self, *nodes: ast.AST) -> bool:
        return any(word in self._rank_names or _RANK.search(word) for node in nodes for word in _words(node))

    @cached_property
    def _rank_names(self) -> set[str]:
        """The names of variables and functions that depend on the rank, such as `is_saving = rank == 0`."""
        names: set[str] = set()
        for node, (_, function, conditions) in self._nodes * 3:  # names of names of names
            match node:
                case ast.Assign(targets=targets, value=value) if _computes(value):
                    new = {_name(target) for target in targets}
                case ast.Return(value=ast.expr() as value):
                    new = {function}
                case _:
                    continue
            causes = (value, *conditions) if isinstance(value, ast.Constant) else (value,)
            if any(word in names or _RANK.search(word) for one in causes for word in _words(one)):
                names |= new
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


def _head(node: ast.AST) -> list[ast.AST]:
    """The target and the iterable of a `for`, or the condition of a `while`; nothing of other code."""
    match node:
        case ast.For():
            return [node.target, node.iter]
        case ast.While():
            return [node.test]
    return []


def _names_any(nodes: Iterable[ast.AST], *ends: str) -> bool:
    return any(word.lower().endswith(ends) for node in nodes for word in _words(node))


def _shuffles(sampler: ast.Call) -> bool:
    """Whether a DistributedSampler of training data certainly shuffles, as it does by default."""
    given = {one.arg: getattr(one.value, "value", None) for one in sampler.keywords}
    is_other = any(_TEST_DATA.search(word) for word in _words(sampler))
    return not is_other and given.get("shuffle", True) is True and None not in given and len(sampler.args) < 4


def _computes(value: ast.AST) -> bool:
    """Whether a value is a constant, or a flag or string that is computed from other values."""
    if isinstance(value, ast.Call):
        return _name(value.func) in ("join", "format", "str", "Path") or bool(_RANK.search(_name(value.func)))
    return isinstance(value, _FLAGS)
