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
        ("template = Template(open('job.sh').read())\ntemplate.substitute(NODES=2)\n", True),
        ("export NODES=2\nenvsubst < job.sh > new.sh\n", True),
        ("values = {'<account>': 'a'}\nfor k in values: t = t.replace(k, values[k])\nopen('job.sh')\n", True),
        ("cp job.sh new.sh\nsed -i -e 's|<account>|a|' new.sh\n", True),
        ("sbatch <(sed s/NODES/2/ job.sh)\n", True),
        ("NODES=$(wc -l < hosts | awk '{print $1}')\nsbatch job.sh\n", False),
        ("NODES=2\nsed s/NODES/2/ other.sh > new.sh\nsbatch --nodes=$NODES job.sh\n", False),
        ("NODES=$(sed -n 1p hosts)\ncp job.sh /scratch\n", False),
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


def test_a_variable_of_one_letter_does_not_make_a_template(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --nodes=$N\n"
    (tmp_path / "submit_all.sh").write_text("N=$(awk 'END{print NR}' hosts)\nsed s/N/1/ job.sh\n")
    assert found_in(text, tmp_path / "job.sh") == [("JOB008", "error")]


def test_the_program_may_be_in_the_directory_above(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "start.py").write_text("text = open('scripts/job.sh').read().replace('<account>', account)\n")
    assert ("JOB027", "note") in found_in(TEXT, tmp_path / "scripts" / "job.sh")


@pytest.mark.parametrize(
    ("directive", "program", "severity"),
    [
        ("#SBATCH --mem=XXX", "sbatch --mem=4G job.sh", "note"),
        ("#SBATCH --mem=XXX", "sbatch job.sh", "error"),
        ("#SBATCH --mem(=XXX", "sbatch job.sh", "error"),
        ("#PBS -q <queue>", "qsub -q long job.sh", "note"),
        ("#PBS -q <queue>", "grep -q a job.sh && qsub job.sh", "error"),
    ],
)
def test_a_placeholder_is_a_note_if_a_program_submits_the_script_with_a_value(
    directive: str, program: str, severity: str, tmp_path: Path
) -> None:
    (tmp_path / "submit.sh").write_text(f"{program}\n", encoding="utf-8")
    found = found_in(f"#!/bin/bash\n{directive}\n./a\n", tmp_path / "job.sh")
    assert [of for check, of in found if check == "JOB016"] == [severity]


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
