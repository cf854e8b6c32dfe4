"""The environments that launchers give their ranks, as recorded or as documented.

`README.md` beside this file tells the format and where each came from;
`record.py` records those again for which this machine has the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch. Rank R ran on node R // ranks_per_node; its local rank is what its launcher says.

    That need not be R % ranks_per_node: Open MPI 5, which maps by core, does not count in rank order.
    """

    name: str
    launcher: (
        str  # the row of `ddp_hpc.discovery.launcher_environment`, or slurm_batch_shell, which is no launcher
    )
    origin: str  # "recorded" or "composed"
    num_ranks: int
    ranks_per_node: int
    versions: str
    command: str
    node_file: tuple[str, ...] = ()  # the lines of PBS_NODEFILE, where the job had one

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.env"


def cases() -> list[Case]:
    """All launches, by name."""
    return [_read(path)[0] for path in sorted(FOLDER.glob("*.env"))]


def load(case: str, rank: int) -> dict[str, str]:
    """The whole environment of one rank of a launch.

    Raises:
        FileNotFoundError: for an unknown case.
        KeyError: for a rank that it does not have.
    """
    return _read(FOLDER / f"{case}.env")[1][rank]


def _read(path: Path) -> tuple[Case, dict[int, dict[str, str]]]:
    header: dict[str, str] = {}
    ranks: dict[int, dict[str, str]] = {}
    variables = header
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("[rank ") and line.endswith("]"):
            variables = ranks.setdefault(int(line[6:-1]), {})
        elif line.startswith("# ") and variables is header:
            key, colon, value = line[2:].partition(": ")
            if colon:
                header[key] = value
        elif line:
            name, equals, value = line.partition("=")
            if not equals or variables is header or name in variables:
                raise ValueError(f"{path.name}, line {number}: {line!r} is no NAME=value of one rank")
            variables[name] = value
    case = Case(
        name=path.stem,
        launcher=header["launcher"],
        origin=header["origin"].split()[0],
        num_ranks=int(header["ranks"]),
        ranks_per_node=int(header["ranks per node"]),
        versions=header["versions"],
        command=header["command"],
        node_file=tuple(header.get("node file", "").split()),
    )
    return case, ranks
