"""The arguments with which a process group on GPUs would be created, on a machine without GPUs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.training.process_group import group as group_module

CUDA = torch.device("cuda", 0)


class Recorded(Exception):
    pass


def arguments_of_group(monkeypatch, config, backend, interface="", **options):
    """Returns the arguments of `init_process_group` in a job of one rank; no group is created."""
    found = {}

    def record(*args, **given):
        found.update(given, backend=args[0])
        raise Recorded

    monkeypatch.setattr(dist, "init_process_group", record)
    for name, value in {
        "pick_device": CUDA,
        "device_kind": "cuda",
        "choose_backend": backend,
        "check_placement": (),
        "group_store": None,
        "turn_on_flight_recorder": None,
        "_set_threads": (1, ""),
    }.items():
        monkeypatch.setattr(group_module, name, lambda *_, value=value: value)
    world = World(rank=0, world_size=1, local_rank=0, local_size=1, hostname="n1", launcher="hydra")
    endpoint = SimpleNamespace(interface=interface, host="n1", port=1, why="", note="")
    link = SimpleNamespace(comm=SingleComm(), endpoint=endpoint)
    with pytest.raises(Recorded), group_module.connected_group(world, link, config, str, **options):
        pass
    return found
