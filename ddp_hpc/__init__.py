"""PyTorch jobs on PBS and Slurm machines. Importing this package costs nothing and changes nothing."""

__version__ = "0.1.0"

# What type checkers take it for. The true one would be an import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddp_hpc.errors import DdpHpcError, RequestError
    from ddp_hpc.library.loader import Batch
    from ddp_hpc.library.saving import Snapshots, snapshots
    from ddp_hpc.library.sharing import wrap
    from ddp_hpc.library.tracing import tracing
    from ddp_hpc.library.world import ConnectedWorld, distributed
    from ddp_hpc.training.task import Task

__all__ = [
    "Batch",
    "ConnectedWorld",
    "DdpHpcError",
    "RequestError",
    "Snapshots",
    "Task",
    "distributed",
    "snapshots",
    "tracing",
    "wrap",
]

_MODULES = {
    "Batch": "library.loader",
    "ConnectedWorld": "library.world",
    "DdpHpcError": "errors",
    "RequestError": "errors",
    "Snapshots": "library.saving",
    "Task": "training.task",
    "distributed": "library.world",
    "snapshots": "library.saving",
    "tracing": "library.tracing",
    "wrap": "library.sharing",
}


def __getattr__(name: str) -> object:
    """Imports what a script uses, when it does (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("torch", "numpy", "h5py", "safetensors"):
            raise ModuleNotFoundError(
                f"ddp_hpc.{name} needs {error.name}, which is not installed: pip install 'ddp-hpc[train]'",
                name=error.name,
            ) from None
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
