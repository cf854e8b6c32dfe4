"""JOB034 does not report commands that are meant as they are written."""

from __future__ import annotations

import pytest

from ddp_hpc.lint.run_checks import lint_script


@pytest.mark.parametrize(
    "body",
    [
        "setenv () { export $1=$2; }\nsetenv DATA /scratch/data",
        "for name in A B; do\n  export $name=1\ndone",
        "name=DATA\nexport $name=1",
        "source venv/bin/activate",
        "./simulate 2>&1 > /dev/null",
        "./simulate 2>&1 > simulate.log | tee errors.log",
        "echo the “second” run",
        "./simulate --title '“second” run'",
        "exit\nSBATCH --mem=8G",
        "for i in {1..3}; do ./simulate $i; done",
        "export IFS= && ./simulate",
        "CUDA_VISIBLE_DEVICES= python test.py",
        "export DATA=~/data",
        'COMMAND="~/bin/simulate"\neval $COMMAND',
        "export LD_LIBRARY_PATH=$HOME/lib:$LD_LIBRARY_PATH PATH=$HOME/bin:$PATH",
        "python -m torch.distributed.run train.py",
        "export PATH=/opt/tools:$PATH; /opt/tools/run",
        "srun bash -c 'ssh login \"export NAME=\\$HOME\"'",
        "sbatch --wrap '-p gpu'",
        "find . -name core -exec rm {} \\;",
        "[[ $STEPS > 3 ]] && ./simulate",
        "sed -n ''$SLURM_ARRAY_TASK_ID'p' names",
        "echo $first[0]",
    ],
)
def test_a_command_that_is_meant_is_not_reported(body: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n{body}\n"
    assert [one for one in lint_script(text) if one.check == "JOB034"] == []


def test_one_step_of_several_without_the_variables_is_reported() -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00\nsrun ./first\nsrun --export=STEPS=10 ./second\n"
    assert [(one.check, one.line) for one in lint_script(text) if one.severity == "warning"] == [
        ("SLURM027", 4)
    ]


@pytest.mark.parametrize(
    ("body", "line", "severity", "said"),
    [
        ("./energy <<+\n15\n+ \n", 5, "note", "blanks before or after '+'"),
        ("./energy <<+\n15\n + \n./next\n", 5, "error", "blanks before or after '+'"),
        ("./energy <<EOF\n\n", 3, "note", "the line 'EOF' is missing"),
        ("./energy <<EOF\n15\n./next\n", 5, "error", "wanted `EOF'"),
        ("cd <<DIR>>\n./next\n", 3, "note", "is a placeholder"),
        ("if a; then\n./energy <<EOF\n15\n EOF\nfi\n", 6, "error", "blanks before or after 'EOF'"),
    ],
)
def test_a_here_document_that_is_not_closed(body: str, line: int, severity: str, said: str) -> None:
    found = [
        one for one in lint_script(f"#!/bin/bash\n#SBATCH --time=01:00:00\n{body}") if one.check == "JOB003"
    ]
    assert [(one.line, one.severity) for one in found] == [(line, severity)]
    assert said in found[0].what


def test_after_an_exit_in_a_comment_of_julia_bash_reads_nothing() -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00\n#=\n    srun julia run.jl\n    exit\n=#\nrun(@__DIR__)\n"
    assert [one.check for one in lint_script(text) if one.severity == "error"] == []


@pytest.mark.parametrize(
    "command",
    [
        "set STEPS = 3\n./simulate $STEPS",
        "sbatch '-p gpu' --gpus=1 segment.sh",
        "source ~/.login.csh",
        "export STEPS= 3",
        "export STEPS 3",
        "unset CUDA_VISIBLE_DEVICES.",
        "$ python train.py",
        "source source venv/bin/activate",
        "source conda activate myenv",
        "module load gcc/12.2, openmpi",
        "for i in 1..9; do ./simulate $i; done",
        "evaluate config \\&\\& summarize",
        "if [ $STEPS > 3 ]; then ./simulate; fi",
        'DATA="~/data"',
        "export LD_LIBRARY_PATH=$HOME/lib:$PATH",
        "torchrun --standalone -m train.py",
        "mpirun -np SLURM_NTASKS ./simulate",
        "INDEX=SLURM_ARRAY_TASK_ID\n./simulate $INDEX",
        "sed -n '${SLURM_ARRAY_TASK_ID}p' names",
        "names=(a b)\n./simulate $names[$SLURM_ARRAY_TASK_ID]",
    ],
)
def test_a_command_that_does_something_else_is_reported(command: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --array=1-2\n{command}\n"
    assert "JOB034" in {one.check for one in lint_script(text)}


@pytest.mark.parametrize(
    ("shebang", "severities"),
    [("env bash -l", ["error"]), ("env -S bash -l", []), ("env bash", []), ("env FLAG=1 bash", [])],
)
def test_linux_gives_env_one_argument(shebang: str, severities: list[str]) -> None:
    text = f"#!/usr/bin/{shebang}\n#SBATCH --time=01:00:00\n./simulate\n"
    assert [one.severity for one in lint_script(text) if one.check == "JOB034"] == severities


@pytest.mark.parametrize(
    "code",
    [
        "NUM=$((NUM*2))\nmpirun -n $NUM ./a.out",
        "ONE=$((OTHER*2))\nOTHER=$((ONE*2))\nmpirun -n $ONE ./a.out",
        "mpirun -n $((²*2)) ./a.out",
        "srun torchrun '' --nnodes=2 train.py",
        "srun torchrun =x --nnodes=2 train.py",
        "torchrun --nproc_per_node=4 -m tools.train --config c.py --num-nodes 4",
        "accelerate launch --num_processes 8 -m tools.train --nnodes 3",
    ],
)
def test_values_without_a_number_and_arguments_of_programs(code: str) -> None:
    assert all(f.check != "RANK031" for f in lint_script(f"#!/bin/bash\n#SBATCH --nodes=2\n{code}\n"))


def test_a_loop_in_one_line_ends_there() -> None:
    loop = "while read name; do echo $name; done < names\nfor i in 1 2; do\n  srun -n 1 ./simulate $i\ndone\n"
    assert all(f.check != "JOB040" for f in lint_script(f"#!/bin/bash\n#SBATCH --nodes=2\n{loop}"))


def test_an_option_of_torchrun_after_the_module_that_is_run() -> None:
    code = "python -m torch.distributed.run --num-nodes=2 train.py"
    assert "RANK031" in {f.check for f in lint_script(f"#!/bin/bash\n#SBATCH --nodes=2\n{code}\n")}


@pytest.mark.parametrize(
    ("code", "severities"),
    [
        ("srun --gres=gpu:4,nvme:1 --ntasks-per-node=1 torchrun --nproc_per_node=4 train.py", []),
        ("srun --gres=nvme:9,gpu:2 --ntasks-per-node=1 torchrun --nproc_per_node=4 train.py", ["error"]),
        ("python train.py --run-name=large--lr=0.1", ["note"]),
        ("python train.py --batch=8--lr=0.1", ["error"]),
        ("names=$(cat list)\nmapfile -t names < list\n./simulate ${names[0]}", []),
    ],
)
def test_gpus_of_a_step_and_a_blank_that_may_be_missing(code: str, severities: list[str]) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n"
    found = [f for f in lint_script(f"{head}{code}\n") if f.check in ("RANK003", "RANK031", "JOB034")]
    assert [f.severity for f in found] == severities


@pytest.mark.parametrize(
    ("code", "is_reported"),
    [
        ("python train.py --save_dir=/dev/shm/run", True),
        ("trap 'cp -r $TMPDIR/run .' EXIT\npython train.py --save_dir=$TMPDIR/run", False),
        ("python train.py --save_dir=$TMPDIR/run\nzip -r run.zip $TMPDIR/run", False),
    ],
)
def test_results_that_are_lost_with_the_node(code: str, is_reported: bool) -> None:
    found = lint_script(f"#!/bin/bash\n#SBATCH --nodes=1\n{code}\n")
    assert ("JOB040" in {f.check for f in found}) == is_reported


@pytest.mark.parametrize(("shell", "expected"), [("", 1), ("dash", 1), ("bash", 0)])
def test_commands_of_bash_in_sh_matter_only_where_sh_is_another_shell(shell: str, expected: int) -> None:
    text = "#!/bin/sh\n#SBATCH --time=01:00:00\nsource env.sh\n./a\n"
    found = [found for found in lint_script(text, shell=shell) if found.check == "JOB034"]
    assert len(found) == expected


@pytest.mark.parametrize(
    ("prefix", "expected"), [("SBATCH --time=01:00:00", 0), ("PBS -l walltime=1:0:0", 1)]
)
def test_sh_is_bash_where_a_script_loads_modules_without_a_login_shell(prefix: str, expected: int) -> None:
    found = lint_script(f"#!/bin/sh\n#{prefix}\nmodule load cuda\nsource env.sh\n./a\n")
    assert [f.check for f in found].count("JOB034") == expected
