"""Checks of the arguments of Python programs, compared with what the programs themselves say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import LintFinding, lint_script

S = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --nodes=1\n"
PROGRAM = """
import argparse

def parse():
    parser = argparse.ArgumentParser(description="a program")
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--model", choices=["small", "large"])
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction)
    parser.add_argument("--layers", type=int, nargs="+")
    group = parser.add_argument_group("output")
    group.add_argument("--out", required=True)
    group.add_argument("--output-format")
    return parser.parse_args()

if __name__ == "__main__":
    parse()
"""


def findings(tmp_path: Path, program: str, command: str) -> list[LintFinding]:
    (tmp_path / "train.py").write_text(program)
    found = lint_script(f"{S}{command}\n", directory=tmp_path)
    return [one for one in found if one.check == "JOB043"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--out a",
        "--out=a --batch-size=16 --lr 1e-3",
        "--out a --batch 16",
        "--out a -b16 --debug --no-amp",
        "--out a --layers 1 2 3 --model large",
        "--out a --lr -0.1",
        "--help",
        "",
        "--out a --batch_size 16",
        "--out a --batchsize=16",
        "--out a --b 16",
        "--out a --o 16",
        "--out a --debug=True",
        "--out a --debug True",
        "--out a --debug=1",
        "--out a --model medium",
        "--out a --batch-size 0.5",
        "--out a --lr fast",
        "--out",
        "--out a --layers",
        "--out a --no-debug",
        "--out a -x",
        "--out a one two",
        "--lr 0.1",
    ],
)
def test_arguments_are_rejected_if_the_program_rejects_them(tmp_path: Path, arguments: str) -> None:
    found = findings(tmp_path, PROGRAM, f"python train.py {arguments}")
    ran = subprocess.run(
        [sys.executable, "train.py", *arguments.split()], cwd=tmp_path, check=False, capture_output=True
    )
    assert [one.severity for one in found] == (["error"] if ran.returncode == 2 else [])


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (
            "--out a --batch_size 1",
            "train.py has no option --batch_size",
            "did you mean --batch-size?",
        ),
        ("--out a --queue gpu", "train.py has no option --queue", "omit it, or use an option"),
        (
            "--out a --debug True",
            "train.py takes no value after --debug, such as True",
            "write --debug alone, or omit it",
        ),
        ("--out a --debug=1", "train.py takes no value after --debug, such as 1", "write --debug alone"),
        ('--out a "b c"', "train.py takes no argument b c here", "write it as the value"),
        ("--lr 0.1", "train.py requires --out", "add it"),
        (
            "--out a --model xl",
            "train.py rejects its arguments: argument --model: invalid choice: 'xl'",
            "see its --help",
        ),
    ],
)
def test_the_message_says_what_the_program_accepts(
    tmp_path: Path, arguments: str, what: str, remedy: str
) -> None:
    found = findings(tmp_path, PROGRAM, f"srun python -u train.py {arguments}")
    assert [(one.what[: len(what)], one.remedy[: len(remedy)]) for one in found] == [(what, remedy)]


@pytest.mark.parametrize(
    ("arguments", "is_found"),
    [
        ("--out $OUT --lr $LR", False),
        ("$OPTIONS", False),
        ('--out "$OUT" --batch-size ${SIZE}', False),
        ("--out a --layers $LAYERS", False),
        ("--out a --debug $EXTRA", False),
        ("--out runs/{a,b} *.csv", False),
        ("--out a --model <model>", False),
        ("--out a --model MODEL_NAME", False),
        ("--outdir $OUT", True),
        ("$OPTIONS --batchsize 16", True),
        ("--out $OUT --model xl", True),
        ("$OPTIONS --model xl", False),
    ],
)
def test_variables_may_contain_any_arguments(tmp_path: Path, arguments: str, is_found: bool) -> None:
    assert bool(findings(tmp_path, PROGRAM, f"python train.py {arguments}")) == is_found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return parser.parse_args()", "return parser.parse_known_args()"),
        ("return parser.parse_args()", "add_more(parser)\n    return parser.parse_args()"),
        ("return parser.parse_args()", "add_more(group)\n    return parser.parse_args()"),
        (
            "return parser.parse_args()",
            'add = parser.add_argument\n    add("--x")\n    return parser.parse_args()',
        ),
        ("return parser.parse_args()", "parser.error = print\n    return parser.parse_args()"),
        (
            "return parser.parse_args()",
            "try:\n        return parser.parse_args()\n    except SystemExit:\n        pass",
        ),
        ("return parser.parse_args()", "return parser.parse_args() if X else None"),
        ("    parse()", "    if DEBUG:\n        parse()"),
        ("parser = argparse", "parser = X or argparse"),
        ("parser = argparse", "parser: object = argparse"),
        ('add_argument("--lr", type=float)', 'add_argument("data", nargs="?")'),
        ("return parser.parse_args()", "parsers = [parser]\n    return parser.parse_args()"),
        ("return parser.parse_args()", "return parser.parse_args(sys.argv[2:])"),
        ("return parser.parse_args()", "return parser.parse_args([])"),
        ("return parser.parse_args()", "return parser"),
        ("import argparse\n", "import configargparse as argparse\n"),
        ("import argparse\n", "import argparse, sys\nname = sys.argv[1]\n"),
        ("import argparse\n", "import argparse\nclass P(argparse.ArgumentParser):\n    pass\n"),
        ('description="a program"', "parents=[base]"),
        ("def parse():", "other = argparse.ArgumentParser()\ndef parse():"),
        ('    group.add_argument("--output-format")', "    for n in NAMES:\n        group.add_argument(n)"),
        ('    group.add_argument("--output-format")', '    group.add_argument("--output-format", **more)'),
        ('    group.add_argument("--output-format")', '    group.add_argument("--of", action=Own)'),
        (
            '    group.add_argument("--output-format")',
            '    group.add_argument("--of", nargs=argparse.REMAINDER)',
        ),
        ('    group.add_argument("--output-format")', "    parser.add_subparsers()"),
    ],
)
def test_a_parser_that_may_have_other_arguments_accepts_everything(
    tmp_path: Path, old: str, new: str
) -> None:
    program = PROGRAM.replace(old, new)
    assert program != PROGRAM
    assert findings(tmp_path, program, "python train.py --unknown 1") == []


@pytest.mark.parametrize("end", ["\\", "\\ ", "<model>"])
def test_a_command_that_is_not_whole_is_not_judged(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    text = f"{S}python train.py --lr 0.1 {end}"
    assert [one for one in lint_script(text, directory=tmp_path) if one.check == "JOB043"] == []


@pytest.mark.parametrize(
    "program",
    [
        "from options import parse\nargs = parse()\n",
        "from options import parser\nparser.add_argument('--own')\nparser.parse_args()\n",
        f"import options\n{PROGRAM}",
    ],
)
def test_a_parser_in_several_files_accepts_everything(tmp_path: Path, program: str) -> None:
    (tmp_path / "options.py").write_text(PROGRAM)
    assert findings(tmp_path, program, "python train.py --unknown 1") == []


@pytest.mark.parametrize(
    ("arguments", "is_found"), [("a.csv", False), ("", True), ("a.csv b.csv", True), ("$DATA b.csv", False)]
)
def test_arguments_without_an_option_are_counted(tmp_path: Path, arguments: str, is_found: bool) -> None:
    program = PROGRAM.replace("    group = ", '    parser.add_argument("data")\n    group = ')
    assert bool(findings(tmp_path, program, f"python train.py --out a {arguments}")) == is_found


def test_an_argument_in_a_condition_is_not_required(tmp_path: Path) -> None:
    program = PROGRAM.replace("    group.add", "    if True:\n        group.add", 1)
    assert findings(tmp_path, program, "python train.py --lr 0.1") == []


@pytest.mark.parametrize(
    ("start", "option", "severity"),
    [
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py --out a", "--other", ["error"]),
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py --out a", "--local_rank", ["note"]),
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py --out a", "--local-rank", []),
        ("python -m torch.distributed.launch --use_env train.py --out a", "--other", []),
        ("torchrun --nproc_per_node=2 train.py --out a", "--other", []),
        ("deepspeed --num_gpus=2 train.py --out a", "--other", ["error"]),
        ("deepspeed --num_gpus=2 train.py --out a", "--local_rank", []),
    ],
)
def test_some_launchers_give_the_program_its_local_rank(
    tmp_path: Path, start: str, option: str, severity: list[str]
) -> None:
    program = PROGRAM.replace('"--output-format"', f'"{option}"')
    assert [one.severity for one in findings(tmp_path, program, start)] == severity


@pytest.mark.parametrize(
    ("before", "is_found"),
    [
        ("cd $SLURM_SUBMIT_DIR", True),
        ("cd .", True),
        ('cd "${PBS_O_WORKDIR:?is not set}"', True),
        ("cd /scratch/me/project", True),
        ("cd /scratch/me/other", False),
        ("cd src", False),
        ("cd src\ncd $SLURM_SUBMIT_DIR", True),
        ("  cd src", False),
        ("popd", False),
    ],
)
def test_the_program_of_another_directory_may_be_another_one(
    tmp_path: Path, before: str, is_found: bool
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    found = findings(project, PROGRAM, f"{before}\npython train.py --out a --unknown 1")
    assert bool(found) == is_found


def test_the_program_is_found_beside_the_script_and_above_it(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "train.py").write_text(PROGRAM)
    text = f"{S}python train.py --out a --unknown 1\n"
    found = lint_script(text, path=tmp_path / "jobs" / "train.sh", select=["JOB043"])
    assert len(found) == 1
    (tmp_path / "jobs" / "train.py").write_text(PROGRAM.replace("description", "epilog"))
    assert lint_script(text, path=tmp_path / "jobs" / "train.sh", select=["JOB043"]) == []


def test_a_file_whose_name_differs_in_capital_letters_is_another_file(tmp_path: Path) -> None:
    found = findings(tmp_path, "", "python Train.py")
    assert [one.remedy for one in found] == ["did you mean train.py?"]


@pytest.mark.parametrize(
    ("before", "files", "expected"),
    [
        ("", (), ["note"]),
        ("export PYTHONPATH=$PWD\n", (), []),
        ("", ("pyproject.toml",), []),
        ("", ("src/src.py",), []),
    ],
)
def test_a_program_that_imports_its_own_directory_needs_pythonpath(
    tmp_path: Path, before: str, files: tuple[str, ...], expected: list[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "run.py").write_text("from src import data\n")
    for file in files:
        (tmp_path / file).touch()
    found = findings(tmp_path, "", f"{before}python src/run.py")
    assert [one.severity for one in found] == expected
    assert {one.remedy for one in found} <= {
        "add export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} before it"
    }


def test_a_deeply_nested_program_is_no_crash(tmp_path: Path) -> None:
    deep = f"x = {'+'.join('1' * 900)}\n"
    assert findings(tmp_path, f"{PROGRAM}{deep}", "python train.py --out a") == []
