"""torch against the driver, GPUs by nvidia-smi's words, NCCL's plugin. No GPU is needed."""

from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.doctor import gpus
from ddp_hpc.doctor.child import collect, start
from ddp_hpc.doctor.result import Finding, Here


def torch_on(cuda: str | None, **given: Any) -> Finding:
    """What is said of a torch built for `cuda` on a node with GPUs that torch does not see."""
    facts = {"has_nvidia_gpu": True, "driver": "12.4", "said": "", "hidden": None} | given
    return gpus.torch_finding("2.8.0", cuda, facts.pop("hip", None), facts.pop("num_devices", 0), **facts)


def test_torch_that_sees_its_gpus_is_well() -> None:
    assert torch_on("12.8", num_devices=4).what == "torch 2.8.0 for CUDA 12.8, driver for CUDA 12.4, 4 GPUs"


def test_torch_of_a_newer_cuda_than_the_driver_serves() -> None:
    found = torch_on("13.0")
    assert found.status == "fail"
    assert "the driver serves CUDA 12.4 at most" in found.what
    assert "built for CUDA 12" in found.remedy


def test_torch_for_cpus_on_a_gpu_node_fails_and_on_a_login_node_does_not() -> None:
    assert torch_on(None).status == "fail"
    assert torch_on(None, has_nvidia_gpu=False, driver=None).status == "ok"
    assert torch_on("12.8", has_nvidia_gpu=False, driver=None).status == "ok"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_environment_hides(hidden: str) -> None:
    found = torch_on("12.8", hidden=hidden)
    assert (found.status, found.remedy) == ("fail", "unset CUDA_VISIBLE_DEVICES")


def test_what_torch_said_is_passed_on() -> None:
    assert (
        "CUDA initialization: unknown error"
        in torch_on("12.4", said="CUDA initialization: unknown error").what
    )


def smi(*rows: str) -> Finding:
    return gpus.state_finding("\n".join(rows) + "\n")


GOOD = "NVIDIA A100-SXM4-40GB, 550.54, Default, Enabled, 0"


def test_good_gpus_are_counted_by_name() -> None:
    assert smi(GOOD, GOOD).what == "2 x NVIDIA A100-SXM4-40GB, driver 550.54"


@pytest.mark.parametrize(
    ("row", "status", "words"),
    [
        ("X, 1, Default, Enabled, 3", "fail", "GPU 1 had 3 memory errors"),
        ("X, 1, Prohibited, Enabled, 0", "fail", "compute mode Prohibited"),
        ("X, 1, Default, Disabled, [N/A]", "warn", "ECC is off"),
        ("X, 1, Default, [N/A], [N/A]", "ok", "2 x"),  # cards without ECC
        ("X, 1, Exclusive_Process, Enabled, 0", "ok", "one process a GPU"),
        ("No devices were found", "warn", "cannot be read"),
    ],
)
def test_gpus_that_are_not_well(row: str, status: str, words: str) -> None:
    found = smi(GOOD, row)
    assert found.status == status
    assert words in found.what


def stand_in(folder: Path, body: str) -> Here:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return Here({"PATH": str(folder)})


def test_an_nvidia_smi_that_fails_is_quoted(tmp_path: Path) -> None:
    here = stand_in(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = gpus.gpu_state(here)
    assert found.status == "fail"
    assert "Driver/library version mismatch" in found.what


def test_an_nvidia_smi_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_ASK_LIMIT_S", 0.2)
    found = gpus.gpu_state(stand_in(tmp_path, "exec /bin/sleep 30"))
    assert (found.status, "gives no answer" in found.what) == ("fail", True)


def test_an_nvidia_smi_that_prints_garbage_is_no_crash(tmp_path: Path) -> None:
    assert gpus.gpu_state(stand_in(tmp_path, r"printf '\377\376,\n'")).status == "warn"


def test_the_network_plugin_is_looked_for_in_the_library_path(tmp_path: Path) -> None:
    (tmp_path / "libnccl-net-ofi.so").touch()
    assert gpus.net_plugin(Here({})) is None
    here = Here({"LD_LIBRARY_PATH": f"::/none:{tmp_path}"})
    assert gpus.net_plugin(here) == tmp_path / "libnccl-net-ofi.so"


@pytest.mark.parametrize(
    ("num_nodes", "slingshot", "nccl_net", "status"),
    [
        (1, True, "", "ok"),
        (2, False, "", "ok"),  # NCCL speaks InfiniBand by itself
        (2, True, "", "warn"),
        (2, True, "AWS Libfabric", "fail"),
        (1, True, "AWS Libfabric", "fail"),  # NCCL ends the job even on one node
    ],
)
def test_a_missing_network_plugin(num_nodes: int, slingshot: bool, nccl_net: str, status: str) -> None:
    here = Here({"NCCL_NET": nccl_net} if nccl_net else {}, num_nodes=num_nodes)
    assert gpus.plugin_finding("2.27.3", None, here, slingshot).status == status
    assert gpus.plugin_finding("2.27.3", Path("/x/libnccl-net.so"), here, slingshot).status == "ok"


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None if name == module else object())


def test_a_missing_torch_is_a_finding_and_worse_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    assert gpus.torch_build(Here({})).status == "warn"
    assert gpus.torch_build(Here({"SLURM_JOB_ID": "1"})).status == "fail"
    assert gpus.nccl(Here({})).status == "warn"


def test_the_installed_torch_is_looked_at() -> None:
    found = collect(start(lambda: gpus.torch_build(Here({})), 60.0))
    assert found.what.startswith("torch 2.")
