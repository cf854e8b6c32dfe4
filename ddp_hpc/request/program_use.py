"""What a program uses to save its state and to stop in time, as its source code shows."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass

from ddp_hpc.request.program_files import ProgramFiles

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
class ProgramUse:
    """What the files of a program use. `is_plain` is False if they can run code that was not read."""

    saves: bool
    stops: bool
    exits: bool
    records: bool
    is_plain: bool


def use_of(files: ProgramFiles) -> ProgramUse:
    """Returns what the files of a program use, taken together."""
    words: set[str] = set()
    texts: list[str] = []
    exits = False
    for node in (node for tree in files.trees for node in ast.walk(tree)):
        match node:
            case ast.Import(names=names):
                words |= {word for alias in names for word in alias.name.split(".")}
            case ast.ImportFrom(module=module, names=names):
                words |= {*(module or "").split("."), *(alias.name for alias in names)}
            case ast.Attribute(attr=word) | ast.Name(id=word):
                words.add(word)
            case ast.Constant(value=str(text)):
                texts.append(text)
            case ast.Constant(value=int(number)):
                exits |= number == _EXIT_REQUEUE
            case _:
                pass
    uses_us = "ddp_hpc" in words
    return ProgramUse(
        saves=uses_us and not words.isdisjoint(_SAVES),
        stops=uses_us and not words.isdisjoint(_STOPS),
        exits=exits or "EX_TEMPFAIL" in words,
        records=any("DDP_HPC_PROGRESS_FILE" in text for text in texts),
        is_plain=files.is_complete
        and files.packages_elsewhere <= _KNOWN_PACKAGES
        and words.isdisjoint(_DYNAMIC),
    )
