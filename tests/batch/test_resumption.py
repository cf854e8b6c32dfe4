"""How a program is resumed is read from its source, and the name of a job from its command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.request.program import Program, default_name, program_of
from ddp_hpc.request.resumption import resumption_of
from ddp_hpc.sites.site import load_site

PLAIN = "import torch\nfor step in range(600):\n    torch.rand(1)\n"
PROGRAMS = [
    ("nothing", PLAIN, "never"),
    ("a comment", "# ddp_hpc.deadline() and exit(75)\n" + PLAIN, "never"),
    ("only a connection", "import ddp_hpc\nwith ddp_hpc.distributed() as world: train(world)\n", "never"),
    ("snapshots", "import ddp_hpc as d\nwith d.snapshots(model=m): pass\n", "snapshots"),
    ("deadline", "from ddp_hpc import deadline\ndeadline()\n", "checkpoints"),
    ("a callback", "from ddp_hpc.integrations.lightning import Callback\n", "checkpoints"),
    ("75", "import os, sys\nopen(os.environ['DDP_HPC_PROGRESS_FILE'], 'w')\nsys.exit(75)\n", "exit 75"),
    ("EX_TEMPFAIL", "import os\nx = 'DDP_HPC_PROGRESS_FILE'\nos._exit(os.EX_TEMPFAIL)\n", "exit 75"),
    ("75 without progress", "import sys\nsys.exit(75)\n", "never"),
    ("another package", "import my_company.training\n", "unknown"),
    ("a module by its name", "import importlib\nimportlib.import_module(name).main()\n", "unknown"),
    ("Python 2", "print 'no'\n", "unknown"),
]


def way(command: str, directory: Path | None, *, on_signal: bool = False, has_progress: bool = False) -> str:
    return resumption_of(command.split(), directory, on_signal=on_signal, has_progress=has_progress).way


@pytest.mark.parametrize(
    ("text", "expected"), [one[1:] for one in PROGRAMS], ids=[one[0] for one in PROGRAMS]
)
def test_the_source_shows_how_the_program_is_resumed(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    assert way("python -u train.py --lr 1", tmp_path) == expected


def test_modules_of_the_same_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/loop.py").write_text("from . import end\n")
    (tmp_path / "pkg/end.py").write_text("import ddp_hpc\nddp_hpc.deadline()\n")
    (tmp_path / "train.py").write_text("from pkg.loop import fit\n")
    assert [way(f"python {one}", tmp_path) for one in ("train.py", "-m pkg.loop")] == ["checkpoints"] * 2
    (tmp_path / "pkg/end.py").write_text(PLAIN)
    assert [way(f"python {one}", tmp_path) for one in ("train.py", "-m pkg.loop")] == ["never"] * 2


def test_the_options_of_the_supervisor_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    found = {
        (signal, progress): way("python train.py", tmp_path, on_signal=signal, has_progress=progress)
        for signal in (False, True)
        for progress in (False, True)
    }
    assert found == {
        (False, False): "never",
        (False, True): "never",
        (True, False): "never",
        (True, True): "signal",
    }


@pytest.mark.parametrize("command", ["python missing.py", "./a.out", "bash run.sh", "python -c pass"])
def test_nothing_is_claimed_about_a_program_that_cannot_be_read(command: str, tmp_path: Path) -> None:
    assert way(command, tmp_path) == "unknown"


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs"])
def test_the_script_and_lint_say_that_a_program_is_not_resumed(profile: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    said = (
        "his program will not be resumed after 02:00:00, nor started again after a failure: train.py neither"
    )
    job = Job(walltime_s=7200, command=("python", "train.py"))
    text = render(job, load_site(profile), tmp_path)
    assert f"# T{said}" in text
    assert "resubmits" not in text
    [found] = [one for one in lint_script(text, directory=tmp_path) if one.check == "JOB020"]
    assert found.what.startswith(f"t{said}")
    assert "--requeue on-signal --progress" in found.remedy

    own = Job(walltime_s=7200, command=job.command, requeue="on-signal", progress=("ck*",))
    text = render(own, load_site(profile), tmp_path)
    assert "will not be resumed" not in text
    assert "ddp_hpc.job resubmits" in text
    assert not [one for one in lint_script(text, directory=tmp_path) if one.check == "JOB020"]


def test_a_program_that_records_checkpoints_is_started_again_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    found = resumption_of(["python", "train.py"], tmp_path, on_signal=False, has_progress=True)
    assert found.warning(7200).startswith("this program will not be resumed after 02:00:00: train.py neither")
    assert "add --requeue on-signal; see" in found.how_to_resume, "--progress was given"


@pytest.mark.parametrize(
    ("command", "program", "name"),
    [
        ("python -m ddp_hpc.train --epochs 1", Program("module", "ddp_hpc.train"), "ddp"),
        ("ddp-hpc train", Program("module", "ddp_hpc.train"), "ddp"),
        ("python3.11 -u -X dev a/my_train.py -m x", Program("file", "a/my_train.py"), "my_train"),
        ("ddp-hpc exec -- python train.py", Program("file", "train.py"), "train"),
        ("torchrun --nproc-per-node 4 train.py", Program("file", "train.py"), "train"),
        ("torchrun_script.sh -m pkg.fit", Program("module", "pkg.fit"), "fit"),
        ("python -m torch.distributed.run --standalone train.py", Program("file", "train.py"), "train"),
        ("apptainer exec i.sif python train.py", Program("file", "train.py"), "train"),
        ("bash ./run.sh python x.py", Program("other", "./run.sh"), "run"),
        ("./3d.py", Program("file", "./3d.py"), "ddp"),
        ("python very-long-name-of-it.py", Program("file", "very-long-name-of-it.py"), "very-long-name"),
        ("bash -c true", None, "ddp"),
        ("bash -lc 'exec python train.py \"$@\" > log'", Program("file", "train.py"), "train"),
        ("bash -c 'python prepare.py && python train.py'", None, "ddp"),
        ("python -Bum pkg.fit", Program("module", "pkg.fit"), "fit"),
        ("python -Werror -Xdev train.py", Program("file", "train.py"), "train"),
        ("python - train.py", None, "ddp"),
        ("torchrun --conf=a.py train.py", Program("file", "train.py"), "train"),
        ("env A=b.py python train.py", Program("file", "train.py"), "train"),
        ("numactl -m 0 python train.py", Program("file", "train.py"), "train"),
        ("accelerate launch -m pkg.fit", Program("module", "pkg.fit"), "fit"),
        ("srun -m block ddp-hpc exec -- python train.py", Program("file", "train.py"), "train"),
    ],
)  # fmt: skip
def test_the_name_of_a_job_is_that_of_its_program(command: str, program: Program | None, name: str) -> None:
    words = shlex.split(command)
    started = program_of(words)
    assert (started and started._replace(python=""), default_name(words)) == (program, name)


def test_a_command_that_never_starts_a_program_has_none() -> None:
    for words in (["env"], ["ddp-hpc", "exec"], ["python", "-m", "torch.distributed.run"]):
        assert program_of(words * 5000) is None
