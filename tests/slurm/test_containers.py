"""--container on a real Slurm: with Charliecloud where it is installed, and with a stand-in for Apptainer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .nodes import SYSTEM_PATH
from .test_arrays import submit_with
from .test_training import BIN, ENVIRONMENT, PROJECT

pytestmark = [pytest.mark.slurm, pytest.mark.check]

TRAINS = PROJECT / "tests" / "mpi" / "trains.py"
STAND_IN = PROJECT / "tests" / "fakes" / "containers" / "apptainer.py"


def _lacks_charliecloud() -> bool:
    if shutil.which("ch-run", path=SYSTEM_PATH) is None:
        return True
    return subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode != 0


NEEDS_CHARLIECLOUD = pytest.mark.skipif(
    _lacks_charliecloud(),
    reason="needs Charliecloud (apt-get install charliecloud-runtime) and user namespaces",
)


def submit(cluster: Cluster, folder: Path, profile: str, *options: str) -> str:
    """Submits PROGRAM for two nodes with two ranks each, and returns the output of the job."""
    (folder / "own.toml").write_text(f'extends = "generic_slurm"\n[container]\n{profile}\n')
    program = folder / "program.py"
    # One write, since the ranks of torchrun share a pipe.
    program.write_text(
        "import os, runpy, sys\n"
        "sys.stdout.write(f\"in {os.environ.get('APPTAINER_CONTAINER')} {os.stat('/').st_ino}\\n\")\n"
        f"runpy.run_path({str(TRAINS)!r})\n"
    )
    script = folder / "job.sbatch"
    argv = [
        str(BIN / "python"),
        "-m",
        "ddp_hpc",
        "render",
        "--profile",
        "own.toml",
        "--name",
        "ddp",
        "--nodes",
        "2",
    ]
    argv += ["--ranks-per-node", "2", "--walltime", "00:05:00", *options, "-o", str(script)]
    done = cluster.run([*argv, "--", "python", program.name], env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    job = submit_with(cluster, script)
    end = cluster.wait(job, timeout=150)
    output = (folder / f"ddp-{job}.out").read_text()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output
    return output


def ranks(output: str) -> list[tuple[int, int]]:
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted((each["rank"], each["size"]) for each in told)


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """The key `command` of a profile whose Apptainer is the stand-in, with an image in `image.sif`."""
    command = tmp_path / "apptainer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    command.chmod(0o755)
    bin_of_image = tmp_path / "image.sif" / "bin"
    bin_of_image.mkdir(parents=True)
    (bin_of_image / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (bin_of_image / "python").chmod(0o755)
    return f'command = ["{command}", "exec", "--nv", "{{image}}"]'


@pytest.mark.parametrize("options", [(), ("--launcher", "torchrun")], ids=" ".join)
def test_the_ranks_in_containers_are_one_world(
    cluster: Cluster, tmp_path: Path, stand_in: str, options: tuple[str, ...]
) -> None:
    output = submit(cluster, tmp_path, stand_in, "--container", "image.sif", *options)
    assert ranks(output) == [(rank, 4) for rank in range(4)], output
    assert output.count(f"in {tmp_path}/image.sif ") == 4


@NEEDS_CHARLIECLOUD
def test_the_ranks_in_containers_of_charliecloud_are_one_world(cluster: Cluster, tmp_path: Path) -> None:
    image = tmp_path / "image"
    # The image consists of directories of this machine.
    top = {f"/{Path(path).resolve().parts[1]}" for path in (sys.base_prefix, sys.prefix, PROJECT, tmp_path)}
    mounts = sorted({"/bin", "/lib", "/lib64", "/usr"} | top - {"/tmp"})
    for mount in [*mounts, "/dev", "/etc", "/home", "/proc", "/sys", "/tmp"]:
        (image / mount[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (image / "etc" / name).touch()
    words = ["ch-run", *(word for mount in mounts for word in ("-b", f"{mount}:{mount}"))]
    words += ["-c", "{directory}", "{image}", "--"]
    output = submit(cluster, tmp_path, f"command = {json.dumps(words)}", "--container", str(image))
    assert ranks(output) == [(rank, 4) for rank in range(4)], output
    roots = {line.split()[2] for line in output.splitlines() if line.startswith("in ")}
    assert str(Path("/").stat().st_ino) not in roots
