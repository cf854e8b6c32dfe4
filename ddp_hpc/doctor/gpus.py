"""torch's build against the driver, the GPUs' own state, and NCCL. torch is imported in the check alone."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.doctor.result import Finding, Here, fail, first_line, ok, warn
from ddp_hpc.world.interfaces import outward_interfaces

_QUERY = "name,driver_version,compute_mode,ecc.mode.current,ecc.errors.uncorrected.volatile.total"
_ASK_LIMIT_S = 30.0
_INSTALL = "pip install 'ddp-hpc[train]', or load the site's module"


def torch_build(here: Here) -> Finding:
    """torch, what it was built for, and whether this node's driver serves that."""
    if find_spec("torch") is None:
        return (fail if here.in_job else warn)("torch is not installed in this Python", _INSTALL)
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that cannot be loaded is an OSError
        return fail(
            f"torch cannot be imported ({first_line(error)})", "install torch anew in this environment"
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch_finding(
        str(torch.__version__),
        torch.version.cuda,
        torch.version.hip,
        num_devices,
        has_nvidia_gpu=nvidia_gpu_is_here(),
        driver=driver_cuda(),
        said=first_line(said[0].message) if said else "",
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
    said: str,
    hidden: str | None,
) -> Finding:
    """What torch's build and the driver make of each other.

    Args:
        version: torch's.
        cuda: the CUDA torch was built with, if any.
        hip: the ROCm torch was built with, if any.
        num_devices: GPUs torch can use.
        has_nvidia_gpu: the driver shows one.
        driver: the newest CUDA that the driver serves; None without a driver.
        said: torch's warning about its GPUs.
        hidden: CUDA_VISIBLE_DEVICES.
    """
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    what = f"torch {version} for {built}"
    if num_devices:
        served = f", driver for CUDA {driver}" if driver else ""
        return ok(f"{what}{served}, {num_devices} GPUs")
    if not has_nvidia_gpu:
        return ok(f"{what}, no NVIDIA GPU on this node" if not hip else f"{what}, no GPU in use")
    if cuda is None:
        return fail(f"{what}, but this node has NVIDIA GPUs", "install a torch that was built for CUDA")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return fail(f"{what}; CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if driver and int(driver.partition(".")[0]) < int(cuda.partition(".")[0]):
        return fail(
            f"{what}, but the driver serves CUDA {driver} at most",
            f"install a torch built for CUDA {driver.partition('.')[0]}, or load a compatible driver",
        )
    return fail(f"{what} finds none of this node's GPUs ({said or 'torch gives no reason'})", _INSTALL)


def nvidia_gpu_is_here() -> bool:
    """True where the NVIDIA driver shows a GPU, whatever torch thinks."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def driver_cuda() -> str | None:
    """The newest CUDA that the driver serves, such as `12.4`; None where there is no driver."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpu_state(here: Here) -> Finding:
    """The GPUs by nvidia-smi: memory errors and the compute mode."""
    program = shutil.which("nvidia-smi", path=here.environ.get("PATH", os.defpath))
    if program is None:
        if nvidia_gpu_is_here():
            return warn("this node has NVIDIA GPUs, but no nvidia-smi to ask", "put nvidia-smi on the PATH")
        return ok("no NVIDIA GPU on this node")
    argv = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_ASK_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(f"nvidia-smi gives no answer ({first_line(error)})", "tell the site: drain this node")
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = first_line(text or done.stderr.decode("utf-8", "replace"))
        return fail(f"nvidia-smi failed ({said})", "tell the site: the driver of this node is not well")
    return state_finding(text)


def state_finding(text: str) -> Finding:
    """What nvidia-smi's lines of name, driver, compute mode, ECC mode and errors say."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != 5 for row in rows):
        return warn(f"nvidia-smi's answer cannot be read ({first_line(text)})", "run nvidia-smi by hand")
    names = dict.fromkeys(row[0] for row in rows)
    what = f"{len(rows)} x {' and '.join(names)}, driver {rows[0][1]}"
    for index, (_, _, mode, _, errors) in enumerate(rows):
        if errors.isdecimal() and int(errors):
            return fail(
                f"{what}: GPU {index} had {errors} memory errors that ECC could not mend",
                "tell the site, and leave this node out (sbatch --exclude, or another one by PBS)",
            )
        if mode == "Prohibited":
            return fail(f"{what}: GPU {index} takes no work (compute mode Prohibited)", "tell the site")
    if any(row[3] == "Disabled" for row in rows):
        return warn(f"{what}: ECC is off", "memory errors pass unseen; ask the site")
    exclusive = ", one process a GPU" if any(row[2] == "Exclusive_Process" for row in rows) else ""
    return ok(f"{what}{exclusive}")


def nccl(here: Here) -> Finding:
    """NCCL's version, and its network plugin where several nodes meet over a fabric that needs one."""
    if find_spec("torch") is None:
        return warn("not looked at: torch is not installed", _INSTALL)
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        text = "this torch has no NCCL; gloo serves CPUs"
        return fail(text, "install a torch that was built for CUDA") if nvidia_gpu_is_here() else ok(text)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    slingshot = any(name.startswith("hsn") for name in outward_interfaces())
    return plugin_finding(version, net_plugin(here), here, slingshot)


def net_plugin(here: Here) -> Path | None:
    """The first libnccl-net*.so in the folders of LD_LIBRARY_PATH."""
    for folder in here.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (found := sorted(Path(folder).glob("libnccl-net*.so"))):
            return found[0]
    return None


def plugin_finding(version: str, plugin: Path | None, here: Here, slingshot: bool) -> Finding:
    """What a missing network plugin means for this number of nodes."""
    what = f"NCCL {version}"
    if plugin is not None:
        return ok(f"{what} with {plugin}")
    # The plugin's own name for itself: NCCL ends the job where NCCL_NET names what it cannot find.
    if "libfabric" in here.environ.get("NCCL_NET", "").lower():
        return fail(
            f"{what}, NCCL_NET={here.environ['NCCL_NET']}, and no libnccl-net*.so on LD_LIBRARY_PATH",
            "put the plugin's folder on LD_LIBRARY_PATH, or unset NCCL_NET on one node",
        )
    if here.num_nodes > 1 and slingshot:
        return warn(
            f"{what} without a network plugin: over Slingshot (hsn*) it uses TCP, several times slower",
            "put the folder of the site's libnccl-net.so on LD_LIBRARY_PATH",
        )
    return ok(f"{what}, no network plugin" + (" needed on one node" if here.num_nodes == 1 else ""))
