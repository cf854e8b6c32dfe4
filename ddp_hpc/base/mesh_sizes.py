"""The sizes of the dimensions in --mesh; see `ddp_hpc.training.parallel.device_mesh` for their meaning."""

from __future__ import annotations

from math import prod

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.option_names import named

DIMENSIONS = ("pp", "dp", "fsdp", "tp")


def parse_mesh(text: str, world_size: int) -> dict[str, int]:
    """Parses `dp=2,tp=2`. Returns the sizes above 1 in the order of the grid.

    If neither dp nor fsdp is given, dp contains the remaining ranks.

    Raises:
        RequestError: an unknown dimension, an invalid size, or a product other than `world_size`.
    """
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = entry.strip().partition("=")
        if name not in DIMENSIONS:
            raise RequestError(
                f"{named('mesh')} {text}: unknown dimension {name!r}{nearest(name, DIMENSIONS)}; "
                f"choose from {', '.join(DIMENSIONS)}, as in dp=2,tp=2"
            )
        if name in sizes:
            raise RequestError(f"{named('mesh')} {text}: {name} is given twice; give each dimension once")
        if not size.isascii() or not size.isdigit() or not int(size[:9]) >= 1:
            raise RequestError(f"{named('mesh')} {text}: {name} must be a number of ranks (got {size!r})")
        sizes[name] = int(size[:9])
    product = prod(sizes.values())
    if not sizes.keys() & {"dp", "fsdp"} and world_size % product == 0:
        sizes["dp"] = world_size // product
        product = world_size
    if product != world_size:
        raise RequestError(
            f"{named('mesh')} {text} needs {product} ranks, but {world_size} "
            f"{'was' if world_size == 1 else 'were'} "
            "started. The product of the sizes must be the number of ranks"
        )
    return {name: sizes[name] for name in DIMENSIONS if sizes.get(name, 1) > 1}
