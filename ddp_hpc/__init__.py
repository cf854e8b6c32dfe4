"""PyTorch jobs on PBS and Slurm machines. Importing this package loads no other module."""

# Type checkers assume that this name is true. Importing it from `typing` would make this package slower to
# import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddp_hpc.base.errors import DdpHpcError, RequestError
    from ddp_hpc.base.version import __version__ as __version__
    from ddp_hpc.library.batch import Batch
    from ddp_hpc.library.connected_world import ConnectedWorld, distributed
    from ddp_hpc.library.dataset import FileDataset, dataset
    from ddp_hpc.library.deadline import JobDeadline, deadline
    from ddp_hpc.library.snapshots import Snapshots, snapshots
    from ddp_hpc.library.tracing import tracing
    from ddp_hpc.library.wrap import wrap
    from ddp_hpc.training.tasks.task import Task

__all__ = [
    "Batch",
    "ConnectedWorld",
    "DdpHpcError",
    "FileDataset",
    "JobDeadline",
    "RequestError",
    "Snapshots",
    "Task",
    "dataset",
    "deadline",
    "distributed",
    "snapshots",
    "tracing",
    "wrap",
]

_MODULES = {
    "__version__": "base.version",
    "Batch": "library.batch",
    "ConnectedWorld": "library.connected_world",
    "DdpHpcError": "base.errors",
    "FileDataset": "library.dataset",
    "JobDeadline": "library.deadline",
    "RequestError": "base.errors",
    "Snapshots": "library.snapshots",
    "Task": "training.tasks.task",
    "dataset": "library.dataset",
    "deadline": "library.deadline",
    "distributed": "library.connected_world",
    "snapshots": "library.snapshots",
    "tracing": "library.tracing",
    "wrap": "library.wrap",
}


def __getattr__(name: str) -> object:
    """Imports a public name from its module when a script first uses it (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("torch", "numpy", "h5py", "safetensors"):
            command = importlib.import_module(f"{__name__}.base.pip_extras").install_command("train")
            raise ModuleNotFoundError(
                f"ddp_hpc.{name} needs {error.name}, which is not installed: {command}",
                name=error.name,
            ) from None
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
