"""Findings in files that nobody submits as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script

JOB = "#SBATCH --time=01:00:00\npython train.py\n"  # without a shebang
FILLED_IN = "#!/bin/bash\n#SBATCH --time=01:00:00\nsrun -n NUMTASKS ./flow\n"


def severities(path: Path, text: str) -> dict[str, str]:
    path.write_text(text)
    return {one.check: one.severity for one in lint_script(text, path=path)}


@pytest.mark.parametrize("name", ["job.sh~", "job.sh.bak", "job.old", "job.template", "job.R", "notes.txt"])
def test_a_finding_in_a_file_that_nobody_submits_is_a_note(tmp_path: Path, name: str) -> None:
    assert severities(tmp_path / "job.sh", JOB)["SLURM001"] == "error"
    assert severities(tmp_path / name, JOB)["SLURM001"] == "note"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("bash ./job.sh 3\n", "note"),
        ('python run.py && sh -x "$HERE/job.sh"\n', "note"),
        ("cat head job.sh > run/$i.sh\nsbatch run/$i.sh\n", "note"),
        ("sed s/A/$i/ job.sh | sbatch\n", "note"),
        ("cat job.sh\n", "error"),
        ("# bash job.sh\n", "error"),
        ("bash job.sh.old\n", "error"),
        ("bash job.sh\nsbatch job.sh\n", "error"),
    ],
)
def test_the_directives_of_a_script_that_another_one_starts_have_notes(
    tmp_path: Path, other: str, expected: str
) -> None:
    (tmp_path / "all.sh").write_text(other)
    assert severities(tmp_path / "job.sh", JOB)["SLURM001"] == expected


def test_the_commands_of_a_script_that_another_one_starts_are_checked(tmp_path: Path) -> None:
    (tmp_path / "all.sh").write_text("bash job.sh\n")
    assert severities(tmp_path / "job.sh", "#!/bin/bash\n#SBATCH --time=1\nfi\n")["JOB003"] == "error"


def test_a_script_whose_readme_submits_it_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "all.sh").write_text("bash job.sh\n")
    (tmp_path / "README.md").write_text("Run `sbatch job.sh`.\n")
    assert severities(tmp_path / "job.sh", JOB)["SLURM001"] == "error"


def test_a_word_that_a_program_replaces_makes_a_template(tmp_path: Path) -> None:
    assert severities(tmp_path / "go.sh", FILLED_IN)["RANK031"] == "error"
    (tmp_path / "compile.sh").write_text("cp go.sh run/\nsed -i s/NUMTASKS/64/ run/go.sh\n")
    found = severities(tmp_path / "go.sh", FILLED_IN)
    assert found["JOB027"] == "note"
    assert "error" not in found.values()


def test_perl_accepts_lines_that_end_in_cr_lf(tmp_path: Path) -> None:
    text = "#!/usr/bin/perl\nprint <<EOF;\n#PBS -l nodes=1\nEOF\n".replace("\n", "\r\n")
    assert "JOB002" not in severities(tmp_path / "generate", text)
    assert severities(tmp_path / "job", text.replace("perl", "bash"))["JOB002"] == "error"


def test_a_program_that_calls_a_launcher_may_use_all_nodes(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --time=1:00:00\npython scaling.py\n"
    assert severities(tmp_path / "job.sh", text)["RANK013"] == "warning"
    (tmp_path / "scaling.py").write_text("import sh\nsh.mpirun('-np', 96, './pic')\n")
    assert severities(tmp_path / "job.sh", text)["RANK013"] == "note"
