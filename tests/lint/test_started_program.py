"""JOB034 and JOB037 report the program that a command starts, and what it would use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.site import load_site


def _found(check: str, body: str, *directives: str) -> list[str]:
    lines = "".join(f"#SBATCH {directive}\n" for directive in directives or ("--ntasks=4",))
    found = lint_script(f"#!/bin/bash\n#SBATCH --time=01:00:00\n{lines}{body}\n")
    return [one.severity for one in found if one.check == check]


@pytest.mark.parametrize(
    "command",
    [
        "srun STEPS=10 ./simulate",
        "mpirun -np 4 STEPS=10 ./simulate",
        "srun --ntasks=4 --label cd /scratch",
        "srun conda activate myenv",
        "srun bash -c 'source activate myenv'",
        "singularity exec --nv image.sif",
        "apptainer exec -B /scratch image.sif STEPS=10 ./simulate",
        "horovodrun -np 4 -H a:2 b:2 python train.py",
    ],
)
def test_a_word_that_is_no_program_is_reported(command: str) -> None:
    assert _found("JOB034", command) == ["warning"]


@pytest.mark.parametrize(
    "command",
    [
        "srun ./simulate STEPS=10",
        "srun env STEPS=10 ./simulate",
        "STEPS=10 srun ./simulate",
        "mpirun -x STEPS=10 ./simulate",
        "srun --export ALL=1 ./simulate",
        "srun conda run -n myenv python train.py",
        "srun bash -c 'source activate myenv && python train.py'",
        "singularity exec --overlay data.img:ro image.sif ./simulate",
        "singularity exec image.sif $COMMAND",
        "singularity run image.sif",
        "srun $OPTIONS STEPS=10 ./simulate",
    ],
)
def test_a_program_is_not_reported(command: str) -> None:
    assert _found("JOB034", command) == []


@pytest.mark.parametrize(
    ("command", "directives", "severity"),
    [
        ("samtools sort -@ 16 reads.bam", ("--cpus-per-task=4",), "warning"),
        ("samtools sort -@8 reads.bam", ("--cpus-per-task=4",), "note"),
        ("THREADS=17\n./align --threads $THREADS", ("--ntasks=4", "--cpus-per-task=2"), "warning"),
        ("vllm serve MODEL --tensor-parallel-size=8", ("--gres=gpu:4",), "error"),
        ("vllm serve M --tensor-parallel-size 4 --pipeline-parallel-size 2", ("--gpus=4",), "error"),
        ("deepspeed --num_gpus 8 train.py", ("--gpus-per-node=4",), "error"),
    ],
)
def test_more_than_the_job_has_is_reported(command: str, directives: tuple[str, ...], severity: str) -> None:
    assert _found("JOB037", command, *directives) == [severity]


@pytest.mark.parametrize(
    ("command", "directives"),
    [
        ("./align --threads 16", ("--ntasks=4",)),
        ("./align --threads 16", ("--cpus-per-task=4", "--exclusive")),
        ("./align --threads 8", ("--ntasks=2", "--cpus-per-task=4")),
        ("snakemake --cores 100", ("--cpus-per-task=4",)),
        ("./align --threads $SLURM_CPUS_PER_TASK", ("--cpus-per-task=4",)),
        ("vllm serve M --tensor-parallel-size 8", ("--nodes=2", "--gpus-per-node=4")),
        ("deepspeed --num_gpus 4 train.py", ("--gpus-per-node=4",)),
    ],
)
def test_what_the_job_has_is_not_reported(command: str, directives: tuple[str, ...]) -> None:
    assert _found("JOB037", command, *directives) == []


@pytest.mark.parametrize(("devices", "expected"), [("2", ["note"]), ("4", []), ("args.gpus", [])])
def test_the_trainer_of_lightning_is_compared_with_the_tasks(
    devices: str, expected: list[str], tmp_path: Path
) -> None:
    text = f"import lightning as L\nL.Trainer(num_nodes=1, devices={devices})\n"
    (tmp_path / "train.py").write_text(text)
    script = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\nsrun python train.py\n"
    found = lint_script(script, directory=tmp_path)
    assert [one.severity for one in found if one.check == "RANK030"] == expected


@pytest.mark.parametrize(
    ("arguments", "nodes", "expected"),
    [
        ("devices=4", 2, ["note"]),
        ("devices=4", 1, []),
        ("devices=4, num_nodes=2", 2, []),
        ("devices=4, **options", 2, []),
        ("max_epochs=4", 2, []),
    ],
)
def test_the_trainer_of_lightning_needs_the_number_of_nodes(
    arguments: str, nodes: int, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"import lightning as L\nL.Trainer({arguments})\n")
    script = f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=4\nsrun python train.py\n"
    found = lint_script(script, directory=tmp_path)
    assert [one.severity for one in found if one.check == "RANK030"] == expected


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs"])
def test_a_profile_of_any_machine_says_nothing_about_its_nodes(profile: str) -> None:
    text = "#!/bin/bash\n#PBS -l nodes=1:ppn=2\n#PBS -l walltime=1:00:00\n./align --threads 120\n"
    if profile == "generic_slurm":
        text = "#!/bin/bash\n#SBATCH -c 2 -p gpu\n#SBATCH --time=1:00:00\n./align --threads 120\n"
    with_site = [(one.check, one.severity) for one in lint_script(text, load_site(profile))]
    assert with_site == [(one.check, one.severity) for one in lint_script(text)]
    assert "JOB037" in dict(with_site)


def test_the_cpus_of_one_chunk_are_known() -> None:
    text = "#!/bin/bash\n#PBS -l select=1:ncpus=4\n#PBS -l walltime=1:00:00\nbwa mem -t 5 a b\n"
    assert [one.line for one in lint_script(text) if one.check == "JOB037"] == [4]


def test_a_program_that_takes_its_rank_from_slurm_needs_no_variable_and_no_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('nccl', rank=int(os.environ['SLURM_PROCID']), world_size=2)\n"
    )
    head = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\n"
    text = f"{head}#SBATCH --ntasks-per-node=2\nexport RANK=$SLURM_PROCID\nsrun -K python train.py\n"
    found = lint_script(text, path=tmp_path / "job.sh", directory=tmp_path)
    assert [one.severity for one in found if one.check == "RANK011"] == ["note"]
    found = lint_script(
        f"{head}torchrun --nproc-per-node=2 train.py\n", path=tmp_path / "job.sh", directory=tmp_path
    )
    assert [one.severity for one in found if one.check == "RANK014"] == ["note"]
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    found = lint_script(text, path=tmp_path / "job.sh", directory=tmp_path)
    assert [one.severity for one in found if one.check == "RANK011"] == ["warning"]
