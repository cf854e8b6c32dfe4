"""Checks on labelled scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.site import load_site
from tests.lint.labelled import (
    ACCEPTED_BY_SBATCH,
    REJECTED_BY_ONE_VERSION,
    REJECTED_BY_SBATCH,
    SCRIPTS,
    SEVERITIES,
    TORQUE,
    S,
)

VERSIONS = ("", "22.05.8", "26.05.3")


def script_of(directives: str) -> str:
    """Return a Slurm script with these directives, which has another walltime if they contain one."""
    lines = directives.split("|")
    has_time = any(line.startswith(("--time=", "-t")) for line in lines)
    return ("#!/bin/bash\n" if has_time else S) + "".join(f"#SBATCH {line}\n" for line in lines)


def errors(text: str, version: str = "") -> list[str]:
    return [
        found.check
        for found in lint_script(text, installed_version=version, is_submitted=True)
        if found.severity == "error"
    ]


@pytest.mark.parametrize(("check", "directives"), REJECTED_BY_SBATCH)
def test_a_directive_that_sbatch_rejects_has_an_error(check: str, directives: str) -> None:
    assert all(check in errors(script_of(directives), version) for version in VERSIONS)


@pytest.mark.parametrize("directives", ACCEPTED_BY_SBATCH)
def test_a_directive_that_sbatch_accepts_has_no_error(directives: str) -> None:
    assert [errors(script_of(directives), version) for version in VERSIONS] == [[], [], []]


@pytest.mark.parametrize(("check", "rejects", "changed", "directives"), REJECTED_BY_ONE_VERSION)
def test_only_the_version_that_rejects_a_directive_has_an_error(
    check: str, rejects: str, changed: str, directives: str
) -> None:
    text = script_of(directives)
    assert check in errors(text, rejects)
    assert errors(text, "26.05" if rejects == "22.05" else "22.05") == []
    assert (check in errors(text, changed)) == (rejects == "26.05")
    # Without a version, the directive is a warning, as the site may have a version that accepts it.
    assert errors(text) == []
    assert {"SLURM017", "SLURM022", "SLURM023"} & {found.check for found in lint_script(text)}


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("\u2013m e", "write - instead of the dash"),
        ("M me@example.org", "write -M and the value"),
        ("joe", "write - or its option before it"),
        ("-N my job", "join it to the value, without a blank, or remove it"),
        ("-l nodes=2:ppn=4, walltime=10:00", "join it to the value, without a blank, or remove it"),
        ("-l nodes=2:ppn=4 walltime=10:00", "write -l before it"),
        ("-l nodes=2 ppn=4", "write it as a part of select or nodes, after a colon"),
        ("walltime=10:00", "write -l before it"),
        ("output=log", "write -o and the value"),
    ],
)
def test_the_remedy_for_a_word_that_belongs_to_no_option_fits_the_word(option: str, remedy: str) -> None:
    found = lint_script(f"{TORQUE}#PBS {option}\n")
    assert [one.remedy for one in found if one.check == "PBS004"] == [remedy]


def test_the_number_of_tasks_is_also_known_if_it_is_no_multiple_of_the_nodes() -> None:
    text = S + "#SBATCH -N 2\n#SBATCH -n 3\nsrun bash -c 'mpiexec -n 3 ./a.out'\n"
    found = [one.what for one in lint_script(text) if one.check == "RANK001"]
    assert found == ["srun starts mpiexec 3 times, and each of them starts all ranks"]


@pytest.mark.parametrize(
    ("check", "command", "remedy"),
    [
        ("RANK031", "srun --array=1-2 ./a", "give it to sbatch instead"),
        ("RANK031", "sbatch --label job.sh", "give it to srun instead"),
        ("JOB003", "conda activate <environment>", "replace it with a value"),
        ("RANK018", "#SBATCH -N 2\nmpirun -H $SLURM_NODELIST ./a", "use $(scontrol show hostnames"),
        ("RANK018", "#SBATCH -N 2\nMASTER_ADDR=$(scontrol show hostnames)", "use $(scontrol show hostnames"),
        ("JOB003", "echo (", "correct this line"),
        ("JOB003", "import os\nprint(1)", "write Python into a file of its own, or #!/usr/bin/env python3"),
        ("JOB003", "if x; then\n  for i in 1 2; do\n    ./a\n  done", "close the if of line 3 with fi"),
        ("JOB003", "if x;\n  ./a\nelse\n  ./b\nfi", "write then after the condition of line 3"),
        ("JOB003", "for i in 1 2; do\n  if x; then\n    ./a\ndone", "close the if of line 4 with fi"),
        ("JOB028", "docker run -it image", "omit -t (--tty)"),
        ("JOB028", "salloc --nodes=2", "remove salloc and its options"),
        ("JOB003", "if true; then\n  srun ./a && \\\n\nfi", "remove && and the backslash at the end of"),
        ("JOB024", "srun ./a --in #.txt \\\n --all", "move the comment of line 3 out of the command"),
        (
            "JOB024",
            "srun ./a --in x\n --all wait",
            "end line 3 with a backslash, like all lines of the command but the last, and write wait",
        ),
    ],
)
def test_the_remedy_fits_the_command(check: str, command: str, remedy: str) -> None:
    assert [one.remedy[: len(remedy)] for one in lint_script(f"{S}{command}\n") if one.check == check] == [
        remedy
    ]


@pytest.mark.parametrize(
    ("first", "second", "remedy"),
    [
        ("--exclude=n1", "--exclude=n2", "write one option with all of them, as in --exclude=n1,n2"),
        ("--gres=gpu:1", "--gres=nvme:100", "write one option with all of them, as in --gres=gpu:1,nvme:100"),
        ("--gres=gpu:1", "--gres=gpu:2", "write one --gres with all that the job needs"),
        (
            "-d afterok:1",
            "-d afterok:2",
            "write one option with all of them, as in --dependency=afterok:1,afterok:2",
        ),
        ("-N 1", "-N 2", "keep only one --nodes"),
        ("--ntasks-per-node=2", "--tasks=4", "write --ntasks, as sbatch takes --tasks for --ntasks-per-node"),
    ],
)
def test_options_that_take_lists_are_joined(first: str, second: str, remedy: str) -> None:
    found = lint_script(f"{S}#SBATCH {first}\n#SBATCH {second}\n")
    assert [one.remedy for one in found if one.check == "JOB007"] == [remedy]


@pytest.mark.parametrize(
    "option", ["-q [your queue here]", "-W group_list=[your group here]", "-l mem=[your memory here]"]
)
def test_a_placeholder_of_several_words_in_brackets_has_one_finding(option: str) -> None:
    found = [one.check for one in lint_script(f"{TORQUE}#PBS {option}\n") if one.line == 4]
    assert found == ["JOB016"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n" + S, "the shebang is in line 2 instead of line 1"),
        ("\u2248" + S, "there are other characters before #!"),
        ("#SBATCH --time=01:00:00\n./x\n", "line 1 is not a shebang"),
        (S + "#SBATCH --gpus-per-node=1 --gres=gpu:a:1\n", "--gres has a type of GPU and --gpus-per-node"),
        (S + 'cd "$(dirname "${BASH_SOURCE[0]}")"\n', "so BASH_SOURCE does not point to your files"),
        (S + "#SBATCH -e $1.%J.err\n", "does not expand $1 in --error"),
        (S + "#SBATCH -J a<name>\n", "'<name>' in --job-name"),
        (S + "sudo ./x\n", "sudo asks for a password, unless it is configured without one,"),
    ],
)
def test_a_finding_names_what_is_written(text: str, said: str) -> None:
    found = [one.what for one in lint_script(text) if one.check not in ("JOB027", "JOB034")]
    assert [said in what for what in found] == [True]


def test_characters_after_the_end_do_not_matter_to_pbs() -> None:
    assert [one for one in lint_script(f"{TORQUE}./a.out\n\0\0") if one.check == "JOB001"] == []
    assert [one.severity for one in lint_script(f"{S}./a.out\n\0\0")] == ["error"]


@pytest.mark.parametrize(
    ("directive", "remedy"),
    [
        ("-error slurm.out", "write --error=slurm.out"),
        ("--gres=gpu: v100 :1", "remove the blanks from the value"),
        ("debug", "write its dashes or its option before it, or # if it is a comment"),
        ("_c 10", "write -c"),
        ("- n 4", "remove the blank after -"),
        ("--time=1:00:00 : one hour", "remove it"),
        (
            "-N 1 node",
            "write # before 'node' if it is a comment; otherwise quote or remove the blank before it, "
            "or add its option",
        ),
        ("--partition=short, long", "remove the blanks from the value"),
        ("--job-name= my job", "write --job-name=my, and quote a value with blanks"),
    ],
)
def test_the_remedy_of_a_word_without_an_option(directive: str, remedy: str) -> None:
    found = lint_script(f"{S}#SBATCH {directive}\n./a.out\n")
    assert [(one.check, one.remedy) for one in found if one.severity == "error"] == [("SLURM017", remedy)]


@pytest.mark.parametrize(
    ("directive", "remedy"),
    [
        ("--N 1", "write -N, with one dash and without ="),
        ("--gres:gpu=1", "write --gres=gpu:1"),
        ("--nodes:2", "write --nodes=2"),
        ("__output=my_job.out", "write --output=my_job.out"),
        ("-n=32", "write --ntasks=32"),
        ("-t=10:00:00", "remove the = before it"),
        (
            "-o $SLURM_JOB_NAME.$SLURM_JOB_ID",
            "write %x instead of $SLURM_JOB_NAME and %j instead of $SLURM_JOB_ID",
        ),
        ("--chdir=/scratch/$SLURM_JOB_ID", "omit the variable, which is set only in the running job"),
    ],
)
def test_the_remedy_says_what_to_write_in_a_directive(directive: str, remedy: str) -> None:
    found = lint_script(f"{S}#SBATCH {directive}\n./a.out\n")
    assert [one.remedy for one in found if one.severity != "note"] == [remedy]


def test_values_of_one_line_are_named_in_their_order() -> None:
    found = lint_script(f"{TORQUE}#PBS -kod -ked\n")
    assert [one.what for one in found if one.check == "JOB007"] == [
        "-k is 'od' in line 4 and 'ed' here, and the last value is used"
    ]


@pytest.mark.parametrize(("check", "expected", "text"), SCRIPTS)
def test_a_script_has_the_finding_or_not(check: str, expected: bool, text: str) -> None:
    assert (check in {found.check for found in lint_script(text)}) == expected


@pytest.mark.parametrize(("check", "severity", "text"), SEVERITIES)
def test_a_finding_has_the_severity_of_its_consequence(check: str, severity: str, text: str) -> None:
    assert [found.severity for found in lint_script(text) if found.check == check] == [severity]


def test_a_job_may_have_whole_nodes_if_the_profile_does_not_say_how_many_gpus_they_have() -> None:
    text = S + "#SBATCH --nodes=1\nexport MASTER_PORT=29500\n"
    found = lint_script(text, load_site("generic_slurm"))
    assert [one.severity for one in found if one.check == "RANK008"] == ["note"]


def test_ranks_for_each_gpu_share_the_cpus_of_their_task() -> None:
    text = S + "#SBATCH -c 8 --gpus-per-node=2\nOMP_NUM_THREADS=16 torchrun --nproc-per-node=gpu train.py\n"
    found = [one.what for one in lint_script(text) if one.check == "RANK005"]
    assert found == ["OMP_NUM_THREADS=16, but a process has 4 CPUs"]


def test_a_script_for_a_site_with_openpbs_is_not_read_as_one_for_torque() -> None:
    found = lint_script(TORQUE + "#PBS -q long # the queue\n", load_site("generic_pbs"))
    assert [one.severity for one in found if one.check == "PBS002"] == ["error"]


def test_one_port_has_one_finding_even_if_several_commands_use_it() -> None:
    text = S + "export MASTER_PORT=29500\n" + "torchrun --master-port=$MASTER_PORT train.py\n" * 2
    assert [one.line for one in lint_script(text) if one.check == "RANK008"] == [3]


def test_the_remedy_for_a_long_option_with_one_dash_is_a_second_dash() -> None:
    found = [one.remedy for one in lint_script(S + "#SBATCH -constraint=gpu\n") if one.check == "SLURM015"]
    assert found == ["write --constraint=gpu, with two dashes"]


@pytest.mark.parametrize(("option", "expected"), [("-j oe", False), ("-k doe", True)])
def test_the_job_can_create_the_directory_of_a_log_that_pbs_copies_at_its_end(
    option: str, expected: bool, tmp_path: Path
) -> None:
    text = f"#!/bin/bash\n#PBS {option}\n#PBS -o logs/train.log\ncd $PBS_O_WORKDIR\nmkdir -p logs\n"
    assert ("PBS011" in {found.check for found in lint_script(text, directory=tmp_path)}) == expected


@pytest.mark.parametrize(
    ("check", "text", "remedy"),
    [
        ("SLURM032", "#SBATCH --array=0-9%1\na=(b c)\n./a ${a[$SLURM_ARRAY_TASK_ID]}", "use --array=0-1%1"),
        ("RANK031", "#SBATCH -n 4\nsrun -np 4 ./a", "write -n instead of -np"),
        ("RANK031", "accelerate launch --multi_gpu True a.py", "omit True"),
        ("RANK031", "accelerate launch --use_fsdp false a.py", "omit the option"),
        (
            "RANK004",
            "#SBATCH -c 24\nmodule load openmpi\nmpirun -np 4 ./a",
            "request --ntasks=4 and --cpus-per-task=6",
        ),
        (
            "RANK001",  # srun ignores --ntasks-per-node=1 here, as it gets the number of tasks from the job
            "#SBATCH --nodes=2 --ntasks-per-node=4\nsrun torchrun --nnodes=2 --nproc-per-node=4 a.py",
            "start torchrun once per node (srun -n $SLURM_NNODES, mpiexec --ppn 1)",
        ),
        (
            "RANK017",
            "#SBATCH --nodes=1 --gpus-per-node=2\nCUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus=2 a.py",
            "remove the assignment, as the scheduler assigns the GPUs, and request as many as needed",
        ),
    ],
)
def test_a_remedy_loses_nothing_that_the_script_means(check: str, text: str, remedy: str) -> None:
    assert [one.remedy for one in lint_script(f"{S}{text}\n") if one.check == check] == [remedy]


def test_a_walltime_after_the_first_command_is_not_called_missing() -> None:
    found = lint_script("#!/bin/bash\nset -e\n#SBATCH --time=01:00:00\n./a\n", load_site("generic_slurm"))
    assert [(one.check, one.line) for one in found] == [("JOB010", 3)]


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("openmpi", "add export OMP_NUM_THREADS=CORES_PER_RANK, and mpirun -x OMP_NUM_THREADS"),
        ("gcc", "add export OMP_NUM_THREADS=CORES_PER_RANK"),
    ],
)
def test_the_remedy_for_threads_of_the_chunk_is_an_option_of_the_mpi(module: str, remedy: str) -> None:
    text = (
        f"#!/bin/bash\n#PBS -l walltime=1:00:00\n#PBS -l select=1:ncpus=8:mpiprocs=4\nmodule load {module}\n"
    )
    found = lint_script(text + "mpirun -n 4 /bin/a\n")
    assert [one.remedy for one in found if one.check == "PBS019"] == [remedy]
