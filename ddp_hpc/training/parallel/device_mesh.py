"""Arranges the ranks in a grid: some dimensions divide the samples, others the model.

    pp    stages of a pipeline, one after another
    dp    replicas, each with its own samples
    fsdp  like dp, but parameters, gradients and optimizer state are sharded
    tp    the matrices of each layer are split over ranks; this dimension is the innermost, because it
          communicates most and should stay within a node

`--strategy X` is the grid in which dimension X contains all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.mesh_sizes import parse_mesh
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.process_group.group import Group

_OF_STRATEGY = {"fsdp": "fsdp", "tp": "tp", "pp": "pp"}


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, with the position of this rank in it."""

    sizes: dict[str, int]
    """Size of each dimension, outermost first. Size 1 occurs only in a group of one rank."""
    at: dict[str, int]
    """This rank's index along each of these dimensions."""
    devices: DeviceMesh | None

    @property
    def is_single(self) -> bool:
        """Whether there is only one rank, without a process group."""
        return not self.sizes

    def has(self, name: str) -> bool:
        """Returns whether the ranks are divided along a dimension."""
        return name in self.sizes

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return bool(self.sizes.keys() & {"pp", "fsdp", "tp"})

    @property
    def data_size(self) -> int:
        """The number of shards into which the samples of a step are divided."""
        return prod(self.sizes.get(name, 1) for name in ("dp", "fsdp"))

    @property
    def data_rank(self) -> int:
        """The index of the shard of each step's samples that this rank uses."""
        return self.at.get("dp", 0) * self.sizes.get("fsdp", 1) + self.at.get("fsdp", 0)

    @property
    def layout(self) -> str:
        """Describes which ranks share samples: `pp=1,data=2,tp=2`."""
        return f"pp={self.sizes.get('pp', 1)},data={self.data_size},tp={self.sizes.get('tp', 1)}"

    @property
    def counts_loss(self) -> bool:
        """Whether this rank reports the losses of its samples. If ranks share samples, only one reports."""
        return self.at.get("tp", 0) == 0 and self.at.get("pp", 0) == self.sizes.get("pp", 1) - 1

    def sub(self, *names: str) -> DeviceMesh:
        """Returns the submesh along these dimensions that contains this rank."""
        assert self.devices is not None
        return self.devices[names if len(names) > 1 else names[0]]

    def __str__(self) -> str:
        """Formats the grid as for --mesh, for example `dp=2,tp=2`."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())


def find_mesh(config: ParallelConfig, group: Group) -> Mesh:
    """Returns the grid that --mesh or --strategy requests. Collective: every rank must call this.

    Raises:
        RequestError: the mesh is invalid, or dataparallel was started with several ranks.
    """
    world_size = group.world.world_size
    if config.strategy == "dataparallel" and world_size > 1:
        raise RequestError(
            f"--strategy dataparallel uses one process for all GPUs of a node, but {world_size} processes "
            "were started. Start one process, or use --strategy ddp, which is faster"
        )
    if world_size == 1 and group.backend != "none" and config.strategy in ("tp", "pp"):
        raise RequestError(
            f"--single-rank-group cannot be used with --strategy {config.strategy}, which needs several ranks"
        )
    sizes = {} if group.backend == "none" else {_OF_STRATEGY.get(config.strategy, "dp"): world_size}
    if config.mesh is not None:
        sizes = parse_mesh(config.mesh, world_size)
    if not sizes:
        return Mesh({}, {}, None)
    devices = init_device_mesh(group.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    places = devices.get_coordinate()
    assert places is not None
    return Mesh(sizes, dict(zip(sizes, places, strict=True)), devices)
