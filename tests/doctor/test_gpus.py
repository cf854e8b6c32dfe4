"""Checks of torch and driver, of nvidia-smi's output, and of NCCL's plugin, which need no GPU."""

from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.doctor import gpus
from ddp_hpc.doctor.check_result import Here, Result
from ddp_hpc.doctor.run_in_child import collect, start


def torch_on(cuda: str | None, **given: Any) -> Result:
    """Returns the finding for torch built for `cuda` on a node with GPUs that torch does not find."""
    facts = {"has_nvidia_gpu": True, "driver": "12.4", "warning": "", "hidden": None} | given
    return gpus.torch_finding("2.8.0", cuda, facts.pop("hip", None), facts.pop("num_devices", 0), **facts)


def test_torch_that_finds_the_gpus_is_ok() -> None:
    assert torch_on("12.8", num_devices=4).what == "torch 2.8.0 for CUDA 12.8, driver for CUDA 12.4, 4 GPUs"


def test_torch_of_a_newer_cuda_than_the_driver_supports() -> None:
    found = torch_on("13.0")
    assert found.status == "fail"
    assert "the driver supports only CUDA 12.4" in found.what
    assert "built for CUDA 12" in found.remedy


def test_torch_for_cpus_is_a_failure_only_on_a_gpu_node() -> None:
    assert torch_on(None).status == "fail"
    assert torch_on(None, has_nvidia_gpu=False, driver=None).status == "ok"
    assert torch_on("12.8", has_nvidia_gpu=False, driver=None).status == "ok"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_environment_hides(hidden: str) -> None:
    found = torch_on("12.8", hidden=hidden)
    assert (found.status, found.remedy) == ("fail", "unset CUDA_VISIBLE_DEVICES")


def smi(*rows: str) -> Result:
    return gpus.state_finding("\n".join(rows) + "\n")


GOOD = "NVIDIA A100-SXM4-40GB, 550.54, Default, Enabled, 0"


def test_gpus_without_problems_are_counted_by_name() -> None:
    assert smi(GOOD, GOOD).what == "2 x NVIDIA A100-SXM4-40GB, driver 550.54"


@pytest.mark.parametrize(
    ("row", "status", "text"),
    [
        ("X, 1, Default, Enabled, 3", "fail", "GPU 1 had 3 memory errors"),
        ("X, 1, Prohibited, Enabled, 0", "fail", "compute mode Prohibited"),
        ("X, 1, Default, Disabled, [N/A]", "warn", "ECC is off"),
        ("X, 1, Default, [N/A], [N/A]", "ok", "2 x"),  # cards without ECC
        ("X, 1, Exclusive_Process, Enabled, 0", "ok", "one process per GPU"),
        ("No devices were found", "warn", "unexpected output"),
    ],
)
def test_gpus_with_problems(row: str, status: str, text: str) -> None:
    found = smi(GOOD, row)
    assert found.status == status
    assert text in found.what


def stand_in(directory: Path, body: str) -> Here:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return Here({"PATH": str(directory)})


def test_an_nvidia_smi_that_fails_is_quoted(tmp_path: Path) -> None:
    here = stand_in(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = gpus.gpu_state(here)
    assert found.status == "fail"
    assert "Driver/library version mismatch" in found.what


def test_an_nvidia_smi_that_hangs_fails(tmp_path: Path) -> None:
    found = gpus.gpu_state(stand_in(tmp_path, "exec /bin/sleep 30"), limit_s=0.2)
    assert (found.status, "does not respond" in found.what) == ("fail", True)


# RCCL, on AMD GPUs, looks for the second name: "NET/Plugin: Could not find: librccl-net.so".
@pytest.mark.parametrize("name", ["libnccl-net-ofi.so", "librccl-net.so"])
def test_the_network_plugin_is_searched_in_the_library_path(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert gpus.net_plugin(Here({})) is None
    here = Here({"LD_LIBRARY_PATH": f"::/none:{tmp_path}"})
    assert gpus.net_plugin(here) == tmp_path / name


@pytest.mark.parametrize(
    ("num_nodes", "slingshot", "nccl_net", "status"),
    [
        (1, True, "", "ok"),
        (2, False, "", "ok"),  # NCCL supports InfiniBand without a plugin
        (2, True, "", "warn"),
        (2, True, "AWS Libfabric", "fail"),
        (1, True, "AWS Libfabric", "fail"),  # NCCL aborts even on one node
    ],
)
def test_a_missing_network_plugin(num_nodes: int, slingshot: bool, nccl_net: str, status: str) -> None:
    here = Here({"NCCL_NET": nccl_net} if nccl_net else {}, num_nodes=num_nodes)
    assert gpus.plugin_finding("2.27.3", None, here, slingshot).status == status
    assert gpus.plugin_finding("2.27.3", Path("/x/libnccl-net.so"), here, slingshot).status == "ok"


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None if name == module else object())


def test_a_missing_torch_is_a_warning_and_a_failure_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    assert gpus.torch_build(Here({})).status == "warn"
    assert gpus.torch_build(Here({"SLURM_JOB_ID": "1"})).status == "fail"
    assert gpus.nccl(Here({})).status == "warn"


def test_the_installed_torch_is_checked() -> None:
    found = collect(start(lambda: gpus.torch_build(Here({})), 60.0))
    assert found.what.startswith("torch 2.")
