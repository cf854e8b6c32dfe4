"""How a program is resumed in another job, from its command, its options and its source code.

The source code is read, never run. `ddp_hpc.job` resumes a program that saves snapshots or checkpoints in one
of the ways that docs/how-to/any-program.md describes. If nothing in a program can do that, its run ends with
the walltime of its job, which the user must know before the job waits in a queue.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddp_hpc.request.program import Program, program_of
from ddp_hpc.units import format_walltime

Way = Literal["snapshots", "checkpoints", "exit 75", "signal", "unknown", "never"]

HOW_TO_RESUME = (
    "if it saves checkpoints and continues from them, add --requeue on-signal --progress 'CHECKPOINTS*'; see "
    "docs/how-to/any-program.md"
)
_MAX_BYTES = 256 * 1024
_MAX_FILES = 50
_EXIT_REQUEUE = 75
# The parts of `import ddp_hpc` that save the state of a run, or that end it in time, with exit code 75.
_SAVES, _STOPS = frozenset(("snapshots",)), frozenset(("deadline", "integrations"))
_DYNAMIC = frozenset(("import_module", "__import__", "exec", "runpy", "execv", "execve", "execvp"))
# Packages which cannot resume a program by themselves. Any other package could use ddp_hpc.
_KNOWN_PACKAGES = sys.stdlib_module_names | frozenset(
    (
        "accelerate", "apex", "bitsandbytes", "click", "cupy", "cv2", "datasets", "ddp_hpc",
        "deepspeed", "einops", "evaluate", "flash_attn", "h5py", "huggingface_hub", "hydra", "jax",
        "joblib", "lightning", "matplotlib", "mlflow", "mpi4py", "numba", "numpy", "omegaconf",
        "packaging", "pandas", "peft", "PIL", "psutil", "pyarrow", "pydantic", "pytorch_lightning",
        "requests", "rich", "safetensors", "scipy", "seaborn", "sentencepiece", "skimage",
        "sklearn", "tensorboard", "tensorboardX", "tensorflow", "tiktoken", "timm", "tokenizers",
        "toml", "torch", "torch_geometric", "torchaudio", "torchdata", "torchmetrics", "torchtext",
        "torchvision", "tqdm", "transformer_engine", "transformers", "triton", "trl", "wandb",
        "webdataset", "xarray", "yaml", "zarr",
    )
)  # fmt: skip
# Packages in which ranks do not connect, except with `torch.distributed`.
_WITHOUT_CONNECTIONS = frozenset(
    (
        "click", "h5py", "matplotlib", "numba", "numpy", "pandas", "psutil", "safetensors", "scipy",
        "torch", "torchvision", "tqdm", "yaml",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Resumption:
    """How a program is resumed.

    `way` is "snapshots" or "checkpoints" if the program uses ddp_hpc to save its state or to stop in time,
    "exit 75" if it can exit with this code, "signal" with --requeue on-signal, "never" if another job
    cannot resume it, and "unknown" if the program could not be read. `why` says why it is not resumed.
    """

    way: Way
    why: str = ""

    def warning(self, walltime_s: float | None) -> str:
        """Returns that the program will not be resumed, without the advice; empty if it may be."""
        if self.way != "never":
            return ""
        after = f"after {format_walltime(int(walltime_s))}" if walltime_s else "after its walltime"
        return f"this program will not be resumed {after}: {self.why}"


def resumption_of(
    command: Sequence[str], directory: Path | None, *, on_signal: bool, has_progress: bool
) -> Resumption:
    """Returns how the program of a command, which is started in `directory`, is resumed.

    `on_signal` means --requeue on-signal, and `has_progress` that --progress names checkpoints.
    """
    program = program_of(command)
    if program is not None and program.is_trainer:
        return Resumption("snapshots")
    if on_signal and has_progress:
        return Resumption("signal")
    if program is None or directory is None:
        return Resumption("unknown")
    use = _Use()
    is_read = use.add_program(program, directory)
    if use.saves or use.stops:
        return Resumption("snapshots" if use.saves else "checkpoints")
    can_stop, records = on_signal or use.exits, has_progress or use.records
    if can_stop and records:
        return Resumption("signal" if on_signal else "exit 75")
    if not is_read:
        return Resumption("unknown")
    if can_stop:
        return Resumption("never", f"{program.name} does not record its checkpoints in DDP_HPC_PROGRESS_FILE")
    return Resumption(
        "never",
        f"{program.name} neither uses ddp_hpc to save or to stop in time, nor exits with code 75",
    )


def connects_only_with_mpi(command: Sequence[str], directory: Path) -> bool:
    """Returns whether the ranks of a program connect with mpi4py, and certainly in no other way."""
    program, use = program_of(command), _Use()
    if program is None or not use.add_program(program, directory):
        return False
    others = use.packages - sys.stdlib_module_names - _WITHOUT_CONNECTIONS
    return others == {"mpi4py"} and not use.has_process_group


@dataclass
class _Use:
    """What the files of a program use."""

    saves: bool = False
    stops: bool = False
    exits: bool = False
    records: bool = False
    has_process_group: bool = False
    packages: set[str] = field(default_factory=set)
    _seen: set[Path] = field(default_factory=set)

    def add_program(self, program: Program, directory: Path) -> bool:
        """Reads a program and the modules that it imports; returns whether all of them could be read."""
        if program.kind == "module":
            names = (program.name, f"{program.name}.__main__")
            found = [path for name in names if (path := _file_of(name, directory))]
            return bool(found) and all(self._add(path, directory) for path in found)
        path = directory / program.name
        return program.kind == "file" and "$" not in program.name and self._add(path, path.parent)

    def _add(self, path: Path, root: Path) -> bool:
        if path in self._seen:
            return True
        self._seen.add(path)
        tree = _parsed(path) if len(self._seen) <= _MAX_FILES else None
        if tree is None:
            return False
        is_read = self._look(tree)
        for name in _imports(tree, path, root):
            local = _file_of(name, root)
            if local is not None:
                is_read &= self._add(local, root)
            elif _file_of(_parent(name), root) is None:
                package = name.partition(".")[0]
                self.packages.add(package)
                is_read &= package in _KNOWN_PACKAGES
        return is_read

    def _look(self, tree: ast.Module) -> bool:
        """Notes what a file uses; returns False if it can run code that is not in the files."""
        words: set[str] = set()
        is_plain, imports_us = True, False
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    dotted = {word for one in names for word in one.name.split(".")}
                    imports_us |= "ddp_hpc" in dotted
                    words |= dotted
                case ast.ImportFrom(module=module, names=names):
                    imports_us |= (module or "").partition(".")[0] == "ddp_hpc"
                    words |= {*(module or "").split("."), *(one.name for one in names)}
                case ast.Attribute(attr=word) | ast.Name(id=word):
                    words.add(word)
                    is_plain &= word not in _DYNAMIC
                case ast.Constant(value=str(text)):
                    self.records |= "DDP_HPC_PROGRESS_FILE" in text
                case ast.Constant(value=int(number)):
                    self.exits |= number == _EXIT_REQUEUE
                case _:
                    pass
        self.exits |= "EX_TEMPFAIL" in words
        self.has_process_group |= "distributed" in words
        self.saves |= imports_us and not words.isdisjoint(_SAVES)
        self.stops |= imports_us and not words.isdisjoint(_STOPS)
        return is_plain


def _parsed(path: Path) -> ast.Module | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.Module, path: Path, root: Path) -> Iterator[str]:
    """Yields the dotted names of the modules that a file imports, as seen from the directory `root`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ""
            if node.level:
                above = path.parents[min(node.level, len(path.parents)) - 1]
                package = ".".join(above.relative_to(root).parts) if above.is_relative_to(root) else ""
            module = ".".join(filter(None, (package, node.module or "")))
            if module:
                yield module
            yield from (
                name for one in node.names if _file_of(name := f"{module}.{one.name}".lstrip("."), root)
            )


def _file_of(module: str, root: Path) -> Path | None:
    """Returns the file of a module in `root`; None if it is not there."""
    place = root.joinpath(*module.split("."))
    for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if module and path.is_file():
            return path
    return None


def _parent(module: str) -> str:
    return module.rpartition(".")[0]
