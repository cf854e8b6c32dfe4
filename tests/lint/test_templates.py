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


@pytest.mark.parametrize(
    "directives",
    [
        "#SBATCH --time=01:00:00\n#SBATCH --nodes=NODES\n",
        "#SBATCH --time=01:00:00\n#SBATCH --nodes=NUM_NODES\n",
        "#SBATCH --time=01:00:00\n#SBATCH --array=1-N_JOBS%4\n",
        "#SBATCH --time=01:00:00\n#SBATCH --nodes=?NODES?\n",
        "#PBS -l walltime=WTIME,mem=15gb\ncd $PBS_O_WORKDIR\n",
    ],
)
def test_words_in_capital_letters_are_placeholders_of_templates(directives: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n{directives}./a.out\n"
    assert found_in(text, tmp_path / "job.template") == [("JOB027", "note")]
    assert ("JOB027", "note") not in found_in(text, tmp_path / "job.sh")


def test_types_of_mail_are_no_placeholders(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --mail-type=END,FAIL,TIME_LIMIT_90\n./a.out\n"
    assert found_in(text, tmp_path / "job.template") == []


def test_only_errors_of_other_directives_remain_errors_in_a_script_that_is_to_be_filled_in(
    tmp_path: Path,
) -> None:
    assert found_in(TEXT, tmp_path / "job.sh") == [("JOB016", "note"), ("JOB008", "error")]
    text = "#!/bin/bash\n#SBATCH --account=<account>\n#SBATCH --nodes=2\npython train.py\n"
    for select in ([], ["RANK013"]):
        found = {one.check: one.severity for one in lint_script(text, select=select)}
        assert found["RANK013"] == "note", "whichever checks are selected"
    submitted = {one.check: one.severity for one in lint_script(text, is_submitted=True)}
    assert (submitted["RANK013"], submitted["JOB016"]) == ("warning", "error")


@pytest.mark.parametrize(
    ("line", "check", "severity"),
    [
        ("#SBATCH --account=<account>", "JOB016", "error"),
        ("#SBATCH --nodes=NODES", "JOB016", "error"),
        ("#SBATCH --mail-user=your.name@example.org --mail-type=END", "JOB017", "warning"),
        ("#SBATCH --nodes=$nodes$", "JOB008", "error"),
        ("#SBATCH --job-name=$name$", "JOB017", "warning"),
        ("#SBATCH EMAIL_ADDRESS", "SLURM017", "error"),
        ("cd <directory>", "JOB003", "error"),
        ("#PBS -l select=1\n#PBS -N", "PBS023", "error"),
    ],
)
def test_a_placeholder_is_a_note_until_the_script_is_submitted(line: str, check: str, severity: str) -> None:
    text = f"#!/bin/bash\n{line}\n"
    for is_submitted, expected in ((False, "note"), (True, severity)):
        found = lint_script(text, select=[check], is_submitted=is_submitted)
        assert [one.severity for one in found] == [expected]


def test_a_template_has_findings_on_directives_without_placeholders(tmp_path: Path) -> None:
    text = TEXT + "#SBATCH --walltime=1\nexport MASTER_PORT=70000\nsrun <program> $MASTER_PORT\n"
    assert found_in(text, tmp_path / "job.in") == [
        ("JOB027", "note"),
        ("SLURM002", "error"),
        ("RANK008", "note"),
    ]


@pytest.mark.parametrize("log", ["x_%A_%a.out", "%A_%a_OUT_%j.log", "%x_%A_%N_%u.out", "100%%_%J_%s_%t.out"])
def test_patterns_for_file_names_are_no_placeholders(log: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH -o {log}\n#SBATCH -e {log}.err\n"
    assert found_in(text, tmp_path / "job.sh") == []


def test_a_placeholder_between_number_signs_is_not_a_comment(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -t #WALLTIME#   # hours\n#SBATCH -N #NODES#   # nodes\n#SBATCH --exclusive\n"
    assert found_in(text, tmp_path / "job.sh") == [("JOB027", "note")]


@pytest.mark.parametrize(
    ("name", "first", "severity"),
    [
        ("notes.txt", "# Options for GPUs:\n", "note"),
        ("homework.Rmd", "# Exercise 3\n", "note"),
        ("readme.slurm", "# How to run it:\n", "note"),
        ("submit_all.py", "# Submits all jobs.\n", "note"),
        ("job.txt", "#!/bin/bash\n", "error"),
        ("job.sh", "# Options for GPUs:\n", "error"),
    ],
)
def test_a_text_without_a_shebang_is_no_script(name: str, first: str, severity: str, tmp_path: Path) -> None:
    text = f"{first}#SBATCH --mem=8G --mem-per-cpu=1G\n"
    found = lint_script(text, path=tmp_path / name, select=["SLURM016"])
    assert [one.severity for one in found] == [severity]


def test_a_directory_that_exists_beside_the_script_is_no_missing_log_directory(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH -o slurm/logs/a.log\nmkdir -p slurm/logs\n./a\n"
    assert found_in(text, tmp_path / "slurm" / "a.sh") == [("SLURM020", "note")]
    (tmp_path / "slurm" / "logs").mkdir(parents=True)
    assert found_in(text, tmp_path / "slurm" / "a.sh") == []
