"""Findings in files that nobody submits as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script

JOB = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --mem=1.5G\nsrun ./a\n"
EXAMPLE = "#!/bin/bash\n#SBATCH --time=01:00:00\nsrun ./a\n  --size 8\n"
PART = "#SBATCH --time=01:00:00\nsrun ./a\n"  # without a shebang


def severities(path: Path, text: str) -> dict[str, str]:
    path.write_text(text)
    return {one.check: one.severity for one in lint_script(text, path=path)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("job.sh", "error"),
        ("job.sh~", "note"),
        ("job.sh.bak", "note"),
        ("#job.sh#", "note"),
        ("job.old", "note"),
        ("job.template", "note"),
        ("job_template.sh", "note"),
        ("jobTemplate20.sh", "note"),
        ("template_matching.sh", "error"),
        ("register_to_template.sh", "error"),
        ("job.in", "error"),
        ("#1_job.sh", "error"),
        ("job.py", "error"),
    ],
)
def test_a_finding_in_a_backup_copy_or_a_template_is_a_note(tmp_path: Path, name: str, expected: str) -> None:
    assert severities(tmp_path / name, JOB)["SLURM015"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{EXAMPLE}./a /path/to/data\n", "note"),
        (f"{EXAMPLE}./a data # in /path/to/data\n", "error"),
        (f"{EXAMPLE}echo usage: job.sh /path/to/data\n", "error"),
        (f"{EXAMPLE}apptainer exec -B data:/path/to/data image.sif ./a\n", "error"),
        (f"{EXAMPLE}./a $path_to_data\n", "error"),
        (f"{EXAMPLE}# usage: bash scripts/job.sh 3\n", "note"),
        (f"{EXAMPLE}# To test it on a login node, run bash job.sh\n", "error"),
        (f"[user@login1 ~]$ cat job.sh\n{JOB}", "note"),
        (f"# A job\n```bash\n{JOB}```\n", "note"),
    ],
)
def test_a_finding_in_an_example_is_a_note(tmp_path: Path, text: str, expected: str) -> None:
    found = severities(tmp_path / "job.sh", text)
    assert ("error" in found.values()) == (expected == "error")
    assert {"SLURM001", "JOB024"} & {*found}


def test_what_a_test_compares_with_the_scripts_of_a_program_is_not_submitted(tmp_path: Path) -> None:
    (tmp_path / "tests" / "data").mkdir(parents=True)
    assert severities(tmp_path / "tests" / "data" / "job.sh", JOB)["SLURM015"] == "error"
    (tmp_path / "pyproject.toml").touch()
    assert severities(tmp_path / "tests" / "data" / "job.sh", JOB)["SLURM015"] == "note"


def test_who_submits_a_backup_copy_means_it(tmp_path: Path) -> None:
    (tmp_path / "job.bak").write_text(JOB)
    found = lint_script(JOB, path=tmp_path / "job.bak", is_submitted=True)
    assert {one.check: one.severity for one in found}["SLURM015"] == "error"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("for i in 1 2; do\n  bash ./part.sh $i\ndone\n", "note"),
        ("cat head part.sh > run/$i.sh\nsbatch run/$i.sh\n", "note"),
        ("cat part.sh | less\n", "error"),
        ("cat part.sh > /dev/null\n", "error"),
        ("# bash part.sh\n", "error"),
        ("echo usage: bash part.sh\n", "error"),
        ("bash -n part.sh\n", "error"),
        ("bash part.sh.old\n", "error"),
        ("bash part.sh\nsbatch part.sh\n", "error"),
    ],
)
def test_a_part_of_another_script_needs_no_shebang(tmp_path: Path, other: str, expected: str) -> None:
    (tmp_path / "all.sh").write_text(other)
    assert severities(tmp_path / "part.sh", PART)["SLURM001"] == expected


@pytest.mark.parametrize(("inserted", "expected"), [("```\n", "error"), ("```\n#SBATCH -n 2\n```\n", "note")])
def test_text_between_fences_of_markdown_has_notes(tmp_path: Path, inserted: str, expected: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n{inserted}salloc -n 2\n"
    assert severities(tmp_path / "job.sh", text)["JOB028"] == expected


@pytest.mark.parametrize(("request_", "check"), [("--nodes=4", "RANK013"), ("--ntasks=4", "SLURM012")])
def test_a_program_that_calls_a_launcher_may_use_all_that_is_requested(
    tmp_path: Path, request_: str, check: str
) -> None:
    text = f"#!/bin/bash\n#SBATCH {request_}\n#SBATCH --time=1:00:00\npython scaling.py\n"
    assert severities(tmp_path / "job.sh", text)[check] == "warning"
    (tmp_path / "scaling.py").write_text("# never with mpirun\n")
    assert severities(tmp_path / "job.sh", text)[check] == "warning"
    (tmp_path / "scaling.py").write_text("import sh\nsh.mpirun('-np', 96, './pic')\n")
    assert severities(tmp_path / "job.sh", text)[check] == "note"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "Submit it with `sbatch -c 4 --array=0-9 job.sh`.\n"),
        ("submit.sh", "for n in 1 2 4; do sbatch --array=0-9 --cpus-per-task=$n job.sh; done\n"),
        ("submit.py", "os.system('sbatch --array=0-'+last+' --cpus-per-task='+n+' job.sh '+l)\n"),
    ],
)
def test_options_that_sbatch_gets_on_the_command_line_are_not_missing(
    tmp_path: Path, name: str, text: str
) -> None:
    job = (
        "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --array=0-N%9\npython a.py --workers $SLURM_CPUS_PER_TASK\n"
    )
    assert severities(tmp_path / "job.sh", job).items() >= {"JOB022": "warning", "SLURM015": "error"}.items()
    (tmp_path / name).write_text(text)
    found = severities(tmp_path / "job.sh", job)
    assert "JOB022" not in found
    assert found["SLURM015"] == "note"


def test_a_file_that_another_one_writes_after_a_header_needs_no_shebang(tmp_path: Path) -> None:
    (tmp_path / "all.sh").write_text('for one in part.sh; do cat head >> $tmp; cat "$one" >> "$tmp"; done\n')
    assert severities(tmp_path / "part.sh", PART)["SLURM001"] == "note"
