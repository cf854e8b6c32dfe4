"""A fake mesh, to test the sharded tensors of one rank without the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def two_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, of which the other never responds."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()
