"""Templates: one note for their placeholders, and findings on the other directives."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script

TEXT = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --account=<account>\n#SBATCH --nodes=$NODES\n"


def found_in(text: str, path: Path) -> list[tuple[str, str]]:
    return [(found.check, found.severity) for found in lint_script(text, path=path)]


@pytest.mark.parametrize(
    "name", ["job.sbatch.template", "job.sh.in", "job_template.sh", "templates/base/job.sh", "jobTemplate.sh"]
)
def test_a_file_whose_name_says_that_it_is_a_template_has_one_note(name: str, tmp_path: Path) -> None:
    assert found_in(TEXT, tmp_path / name) == [("JOB027", "note")]


def test_a_script_with_the_same_placeholders_has_errors(tmp_path: Path) -> None:
    assert found_in(TEXT, tmp_path / "job.sh") == [("JOB016", "error"), ("JOB008", "error")]


def test_a_template_has_findings_on_directives_without_placeholders(tmp_path: Path) -> None:
    text = TEXT + "#SBATCH --walltime=1\nexport MASTER_PORT=70000\nsrun <program> $MASTER_PORT\n"
    assert found_in(text, tmp_path / "job.in") == [
        ("JOB027", "note"),
        ("SLURM002", "error"),
        ("RANK008", "note"),
    ]


@pytest.mark.parametrize(
    ("program", "is_template"),
    [
        ("text = open('job.sh').read().replace('<account>', account)\n", True),
        ("sed s/NODES/2/ job.sh > new.sh\n", True),
        ("text = open('job.sh').read().replace('a', 'b')\n", False),
        ("text = open('other.sh').read().replace('<account>', account)\n", False),
    ],
)
def test_a_file_that_a_program_beside_it_fills_in_is_a_template(
    program: str, is_template: bool, tmp_path: Path
) -> None:
    (tmp_path / "start.py").write_text(program)
    assert (("JOB027", "note") in found_in(TEXT, tmp_path / "job.sh")) == is_template


@pytest.mark.parametrize("log", ["x_%A_%a.out", "%A_%a_OUT_%j.log", "%x_%A_%N_%u.out", "100%%_%J_%s_%t.out"])
def test_patterns_for_file_names_are_no_placeholders(log: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH -o {log}\n#SBATCH -e {log}.err\n"
    assert found_in(text, tmp_path / "job.sh") == []


def test_a_placeholder_between_number_signs_is_not_a_comment(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -t #WALLTIME#   # hours\n#SBATCH -N #NODES#   # nodes\n#SBATCH --exclusive\n"
    assert found_in(text, tmp_path / "job.sh") == [("JOB027", "note")]
