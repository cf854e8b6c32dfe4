"""CUDA_VISIBLE_DEVICES with the UUIDs of another node, which mpiexec has passed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.discovery.visible_gpus import correct_visible_gpus

HERE = ["GPU-0a1b2c3d-1111-2222-3333-444455556666", "GPU-9f8e7d6c-1111-2222-3333-444455556666"]
THERE = ["GPU-77777777-1111-2222-3333-444455556666", "GPU-88888888-1111-2222-3333-444455556666"]


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The files of NVIDIA's kernel driver on a node with two GPUs."""
    for number, uuid in enumerate(HERE):
        folder = tmp_path / f"0000:{number:02x}:00.0"
        folder.mkdir()
        text = f"Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 218\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        (folder / "information").write_text(text)
    return tmp_path


def test_the_uuids_of_another_node_are_not_used(driver: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(THERE), "HOME": "/h"}
    assert "none of which belongs to this node" in correct_visible_gpus(environ, driver)
    assert environ == {"HOME": "/h"}


@pytest.mark.parametrize(
    "value",
    [
        *(",".join(HERE), HERE[1], "GPU-0a1b2c3d", f"{HERE[0]},{THERE[0]}"),
        *("0,1", "", "NoDevFiles", "MIG-77777777-1111-2222-3333-444455556666", "GPU-", f"0,{THERE[0]}"),
    ],
)
def test_other_values_are_kept(value: str, driver: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value}
    assert correct_visible_gpus(environ, driver) == ""
    assert environ == {"CUDA_VISIBLE_DEVICES": value}


def test_a_job_with_a_part_of_each_node_is_refused(driver: Path) -> None:
    with pytest.raises(LaunchError, match=r"names 1 GPUs?, none of which belongs to this node, which has 2"):
        correct_visible_gpus({"CUDA_VISIBLE_DEVICES": THERE[0]}, driver)


def test_without_nvidias_driver_and_without_the_variable_nothing_happens(
    tmp_path: Path, driver: Path
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(THERE)}
    assert correct_visible_gpus(environ, tmp_path / "absent") == ""
    assert correct_visible_gpus({}, driver) == ""
