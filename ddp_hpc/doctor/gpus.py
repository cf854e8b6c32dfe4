"""Checks of torch's build and the GPU driver, of the state of the GPUs, and of NCCL."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.discovery.network_interfaces import outward_interfaces
from ddp_hpc.doctor.check_result import Here, Result, fail, first_line, ok, warn

_QUERY = "name,driver_version,compute_mode,ecc.mode.current,ecc.errors.uncorrected.volatile.total"
_NVIDIA_SMI_LIMIT_S = 30.0
_INSTALL = f"{install_command('train')}, or load the site's module"


def torch_build(here: Here) -> Result:
    """Checks whether torch is installed and whether this node's driver supports its build."""
    if find_spec("torch") is None:
        return (fail if here.in_job else warn)("torch is not installed in this Python environment", _INSTALL)
    try:
        import torch
    except (ImportError, OSError) as error:  # a CUDA library that cannot be loaded raises OSError
        return fail(f"torch cannot be imported ({first_line(error)})", "reinstall torch in this environment")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch_finding(
        str(torch.__version__),
        torch.version.cuda,
        torch.version.hip,
        num_devices,
        has_nvidia_gpu=nvidia_gpu_is_here(),
        driver=driver_cuda(),
        warning=first_line(caught[0].message) if caught else "",
        hidden=here.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def torch_finding(
    version: str,
    cuda: str | None,
    hip: str | None,
    num_devices: int,
    *,
    has_nvidia_gpu: bool,
    driver: str | None,
    warning: str,
    hidden: str | None,
) -> Result:
    """Returns the finding on whether torch's build matches the driver.

    Args:
        version: the version of torch.
        cuda: the CUDA version that torch was built with, if any.
        hip: the ROCm version that torch was built with, if any.
        num_devices: the number of GPUs that torch can use.
        has_nvidia_gpu: whether the driver reports a GPU.
        driver: the newest CUDA version that the driver supports; None without a driver.
        warning: torch's warning about its GPUs.
        hidden: the value of CUDA_VISIBLE_DEVICES.
    """
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    what = f"torch {version} for {built}"
    if num_devices:
        supported = f", driver for CUDA {driver}" if driver else ""
        return ok(f"{what}{supported}, {num_devices} GPUs")
    if not has_nvidia_gpu:
        return ok(f"{what}, no NVIDIA GPU on this node" if not hip else f"{what}, no GPU in use")
    if cuda is None:
        return fail(f"{what}, but this node has NVIDIA GPUs", "install a torch built for CUDA")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return fail(f"{what}; CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if driver and int(driver.partition(".")[0]) < int(cuda.partition(".")[0]):
        return fail(
            f"{what}, but the driver supports only CUDA {driver}",
            f"install a torch built for CUDA {driver.partition('.')[0]}, or load a compatible driver",
        )
    return fail(f"{what} finds none of this node's GPUs ({warning or 'torch reports no reason'})", _INSTALL)


def num_devices() -> int | None:
    """Returns the number of GPUs that torch can use in this process; None without a torch built for GPUs."""
    try:
        import torch
    except (ImportError, OSError):  # a CUDA library that cannot be loaded raises OSError
        return None
    if not (torch.version.cuda or torch.version.hip or torch.version.xpu):
        return None
    return max(torch.cuda.device_count(), torch.xpu.device_count())


def nvidia_gpu_is_here() -> bool:
    """Returns whether the NVIDIA driver reports a GPU, independently of torch."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def driver_cuda() -> str | None:
    """Returns the newest CUDA version that the driver supports, such as `12.4`; None without a driver."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpu_state(here: Here, limit_s: float = _NVIDIA_SMI_LIMIT_S) -> Result:
    """Checks memory errors and compute mode of the GPUs with nvidia-smi."""
    program = shutil.which("nvidia-smi", path=here.environ.get("PATH", os.defpath))
    if program is None:
        if not nvidia_gpu_is_here():
            return ok("no NVIDIA GPU on this node")
        return warn("this node has NVIDIA GPUs, but nvidia-smi was not found", "add nvidia-smi to the PATH")
    argv = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(f"nvidia-smi does not respond ({first_line(error)})", "ask the site to drain this node")
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        reason = first_line(text or done.stderr.decode("utf-8", "replace"))
        return fail(f"nvidia-smi failed ({reason})", "report the driver problem of this node to the site")
    return state_finding(text)


def state_finding(text: str) -> Result:
    """Returns the finding for nvidia-smi's output: one line per GPU with the fields of `_QUERY`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != 5 for row in rows):
        return warn(f"unexpected output of nvidia-smi ({first_line(text)})", "run nvidia-smi by hand")
    names = dict.fromkeys(row[0] for row in rows)
    what = f"{len(rows)} x {' and '.join(names)}, driver {rows[0][1]}"
    for index, (_, _, mode, _, errors) in enumerate(rows):
        if errors.isdecimal() and int(errors):
            return fail(
                f"{what}: GPU {index} had {errors} memory errors that ECC could not correct",
                "report it to the site, and exclude this node (sbatch --exclude; with PBS, request another)",
            )
        if mode == "Prohibited":
            return fail(
                f"{what}: GPU {index} accepts no work (compute mode Prohibited)", "report it to the site"
            )
    if any(row[3] == "Disabled" for row in rows):
        return warn(f"{what}: ECC is off, so memory errors are not detected", "ask the site to enable ECC")
    exclusive = ", one process per GPU" if any(row[2] == "Exclusive_Process" for row in rows) else ""
    return ok(f"{what}{exclusive}")


def nccl(here: Here) -> Result:
    """Checks NCCL's version, and its network plugin if the fabric between several nodes needs one."""
    if find_spec("torch") is None:
        return warn("not checked: torch is not installed", _INSTALL)
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        text = "this torch has no NCCL; gloo is used on CPUs"
        return fail(text, "install a torch built for CUDA") if nvidia_gpu_is_here() else ok(text)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    slingshot = any(name.startswith("hsn") for name in outward_interfaces())
    return plugin_finding(version, net_plugin(here), here, slingshot)


def net_plugin(here: Here) -> Path | None:
    """Returns the first network plugin of NCCL, or of RCCL on ROCm, in LD_LIBRARY_PATH."""
    for directory in filter(None, here.environ.get("LD_LIBRARY_PATH", "").split(":")):
        for pattern in ("libnccl-net*.so", "librccl-net*.so"):
            if plugins := sorted(Path(directory).glob(pattern)):
                return plugins[0]
    return None


def plugin_finding(version: str, plugin: Path | None, here: Here, slingshot: bool) -> Result:
    """Returns the finding on NCCL's network plugin, which some fabrics need for jobs on several nodes."""
    what = f"NCCL {version}"
    if plugin is not None:
        return ok(f"{what} with {plugin}")
    # NCCL plugins for libfabric use this name. NCCL aborts if it does not find the plugin named by NCCL_NET.
    if "libfabric" in here.environ.get("NCCL_NET", "").lower():
        return fail(
            f"{what}, NCCL_NET={here.environ['NCCL_NET']}, and no libnccl-net*.so on LD_LIBRARY_PATH",
            "add the plugin's directory to LD_LIBRARY_PATH, or unset NCCL_NET for jobs on one node",
        )
    if here.num_nodes > 1 and slingshot:
        return warn(
            f"{what} without a network plugin uses TCP over Slingshot (hsn*), which is several times slower",
            "add the directory of the site's libnccl-net.so to LD_LIBRARY_PATH",
        )
    return ok(f"{what}, no network plugin" + (" needed on one node" if here.num_nodes == 1 else ""))
