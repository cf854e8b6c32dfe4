"""How a program is resumed in another job, from its command, its options and its source code.

The source code is read, never run. `ddp_hpc.job` resumes a program that saves snapshots or checkpoints in one
of the ways that docs/how-to/any-program.md describes. If nothing in a program can do that, its run ends with
the walltime of its job, which the user must know before the job waits in a queue.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_hpc.base.units import format_walltime
from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import files_of

Way = Literal["snapshots", "checkpoints", "exit 75", "signal", "unknown", "never"]

HOW_TO_RESUME = (
    "if it saves checkpoints and continues from them, add --requeue on-signal --progress 'CHECKPOINTS*'; see "
    "docs/how-to/any-program.md"
)
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
    files = files_of(program, directory)
    use = _use(files.trees)
    is_read = files.is_complete and use.is_plain and files.packages_elsewhere <= _KNOWN_PACKAGES
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


@dataclass(frozen=True)
class _Use:
    """What the files of a program use. `is_plain` is False if they can run code that is not in the files."""

    saves: bool
    stops: bool
    exits: bool
    records: bool
    is_plain: bool


def _use(trees: Sequence[ast.Module]) -> _Use:
    each = [_use_of_file(tree) for tree in trees]
    return _Use(
        saves=any(one.saves for one in each),
        stops=any(one.stops for one in each),
        exits=any(one.exits for one in each),
        records=any(one.records for one in each),
        is_plain=all(one.is_plain for one in each),
    )


def _use_of_file(tree: ast.Module) -> _Use:
    words: set[str] = set()
    is_plain, imports_us, exits, records = True, False, False, False
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
                records |= "DDP_HPC_PROGRESS_FILE" in text
            case ast.Constant(value=int(number)):
                exits |= number == _EXIT_REQUEUE
            case _:
                pass
    return _Use(
        saves=imports_us and not words.isdisjoint(_SAVES),
        stops=imports_us and not words.isdisjoint(_STOPS),
        exits=exits or "EX_TEMPFAIL" in words,
        records=records,
        is_plain=is_plain,
    )
