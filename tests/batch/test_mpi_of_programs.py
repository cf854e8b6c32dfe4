"""For which programs the supervisor looks for an --mpi option of srun: those whose source imports mpi4py."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ddp_hpc.launch import srun_mpi

USES_MPI = "from mpi4py import MPI\n"
MPICH = "MPICH Version: 4.3.1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The programs that were asked; the machine has MPICH, and srun's default is --mpi=none."""
    programs: list[str] = []

    def answer(argv: Sequence[str], _environ: Mapping[str, str]) -> str:
        programs.append(argv[0])
        return {"scontrol": "MpiDefault = none", "srun": "none\npmi2"}.get(argv[0], MPICH)

    monkeypatch.setattr(srun_mpi, "_answer", answer)
    monkeypatch.chdir(tmp_path)
    return programs


def option(command: str) -> str:
    return srun_mpi.mpi_option(["srun", "--nodes=2", *shlex.split(command)], {})


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("python -u train.py", "python"),
        ("/env/bin/python3.11 -X faulthandler train.py --data x.py", "/env/bin/python3.11"),
        ("ddp-hpc exec -- ./python -um pkg.mod", "./python"),
        ("env A=B python train.py", "python"),
        ("bash -c 'python train.py'", "python"),
        ("./train.py", "python"),
    ],
)
def test_the_python_of_the_program_is_asked_for_its_mpi(
    command: str, python: str, asked: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/mod.py"):
        (tmp_path / name).write_text(USES_MPI)
    assert option(command) == "--mpi=pmi2"
    assert asked == [python, "scontrol", "srun"]


@pytest.mark.parametrize(
    "text",
    [
        "import numpy, mpi4py as m\n",
        "from mpi4py.MPI import COMM_WORLD\n",
        "def main():\n    import mpi4py.MPI\n",
        "import helper\n",
        "from pkg.parts import helper\n",
        "# -*- coding: latin-1 -*-\n# \xe9\nfrom mpi4py import MPI\n",
    ],
)
def test_imports_are_found_in_the_program_and_in_the_modules_of_its_directory(
    text: str, asked: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pkg/parts").mkdir(parents=True)
    (tmp_path / "pkg/__init__.py").write_text(USES_MPI)
    for name in ("helper.py", "pkg/parts/helper.py"):
        (tmp_path / name).write_text("from mpi4py import MPI\nimport train\n")
    (tmp_path / "train.py").write_text(text, encoding="latin-1")
    assert option("python train.py") == "--mpi=pmi2"
    assert asked


def large(path: Path) -> None:
    with path.open("w") as file:
        file.write(USES_MPI)
        file.truncate(50 * 1024 * 1024)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a syntax error": lambda path: path.write_text(USES_MPI + "print 'no'\n"),
    "not UTF-8": lambda path: path.write_bytes(USES_MPI.encode() + b"x = '\xff'\n"),
    "50 MB": large,
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a symbolic link to itself": lambda path: path.symlink_to(path),
    "only a comment and a text": lambda path: path.write_text('"""\nimport mpi4py\n"""\n# import mpi4py\n'),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_nothing_is_chosen_for_what_cannot_be_read(
    make: Callable[[Path], object], asked: list[str], tmp_path: Path
) -> None:
    make(tmp_path / "train.py")
    assert option("python train.py") == ""
    assert asked == []


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 train.py",
        "accelerate launch train.py",
        "python -m torch.distributed.run train.py",
    ],
)
def test_nothing_is_chosen_for_ranks_that_would_share_a_connection(
    command: str, asked: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(USES_MPI)
    assert (option(command), asked) == ("", [])


def test_ddp_hpc_itself_is_not_a_program_that_needs_mpi(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(srun_mpi.__file__).parents[2])
    assert (option("python -m ddp_hpc.train"), asked) == ("", [])
