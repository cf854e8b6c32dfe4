"""Checks of the program that a script starts: its data and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lint_precision import OF_PROGRAMS, read_programs
from ddp_hpc.lint.run_checks import lint_script

DIRECTIVES = "#!/bin/bash\n#SBATCH --time=24:00:00\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
TORCHRUN = "torchrun --nproc-per-node=4 train.py"
ALONE = """
import torch

model = torch.nn.Linear(2, 1)
model(torch.ones(2)).backward()
"""
PARALLEL = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DistributedDataParallel(torch.nn.Linear(2, 1).cuda())
loader = DataLoader(dataset, shuffle=False, sampler=DistributedSampler(dataset))
for batch in loader:
    loss = model(batch.cuda())
    loss.backward()
"""
ON_ALL_DATA = PARALLEL.replace("shuffle=False, sampler=DistributedSampler(dataset)", "shuffle=True")


def checks(
    tmp_path: Path, program: str, command: str = TORCHRUN, directives: str = DIRECTIVES, **modules: str
) -> set[str]:
    """Return the checks of programs that have a finding."""
    (tmp_path / "train.py").write_text(program)
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = lint_script(f"{directives}{command}\n", directory=tmp_path)
    return {one.check for one in found} & OF_PROGRAMS.keys()


def saves(text: str) -> str:
    """Return a parallel program with these lines, which also loads a checkpoint."""
    return PARALLEL + "    torch.load(path)\n" + text


@pytest.mark.parametrize("program", [PARALLEL, "import torch\n", "print('no torch')\n", "def (\n"])
def test_a_program_without_a_mistake_has_no_finding(tmp_path: Path, program: str) -> None:
    assert checks(tmp_path, program) == set()


@pytest.mark.parametrize("command", [TORCHRUN, "srun python train.py", "accelerate launch train.py"])
def test_ranks_that_do_not_divide_the_data_all_read_it(tmp_path: Path, command: str) -> None:
    assert "RANK024" in checks(tmp_path, ON_ALL_DATA, command)


@pytest.mark.parametrize(
    "change",
    [
        ("loader =", "dataset = dataset[rank::4]\nloader ="),
        ("loader =", "torch.manual_seed(7 + rank)\nloader ="),
        ("loader =", "dataset = partition(dataset, rank)\nloader ="),
        ("import os", "import lightning"),
        ("import os", "from broken import read"),
        ("shuffle=True", "num_workers=2"),
    ],
)
def test_the_data_may_be_divided_in_other_ways(tmp_path: Path, change: tuple[str, str]) -> None:
    assert checks(tmp_path, ON_ALL_DATA.replace(*change), broken="def (\n") == set()


@pytest.mark.parametrize("arguments", ["32, True", "**arguments"])
def test_a_loader_may_be_told_in_other_ways_to_shuffle(tmp_path: Path, arguments: str) -> None:
    program = ON_ALL_DATA.replace("shuffle=True", arguments)
    assert checks(tmp_path, program) == {"RANK024"}


def test_a_program_that_starts_its_ranks_itself_is_read_too(tmp_path: Path) -> None:
    program = ON_ALL_DATA + "torch.multiprocessing.spawn(train, nprocs=4)\n"
    assert checks(tmp_path, program, "python train.py") == {"RANK024"}


@pytest.mark.parametrize("command", [TORCHRUN, "srun python train.py", "mpirun -np 4 python train.py"])
def test_a_program_for_one_process_trains_the_same_model_on_each_rank(tmp_path: Path, command: str) -> None:
    assert checks(tmp_path, ALONE, command) == {"RANK024"}


EPOCHS = PARALLEL + "for epoch in range(9):\n    run_epoch(loader)\n"


@pytest.mark.parametrize(
    "program",
    [
        EPOCHS,
        EPOCHS.replace("for epoch in range(9)", "for number in trange(num_epochs)"),
        EPOCHS.replace("Sampler(dataset)", "Sampler(dataset, shuffle=True)"),
        PARALLEL + "while True:\n    for batch in loader:\n        pass\n",
    ],
)
def test_a_sampler_that_is_not_told_the_epoch_repeats_its_order(tmp_path: Path, program: str) -> None:
    assert checks(tmp_path, program) == {"RANK026"}


@pytest.mark.parametrize(
    "change",
    [
        ("    run_epoch", "    loader.sampler.set_epoch(epoch)\n    run_epoch"),
        ("Sampler(dataset)", "Sampler(dataset, shuffle=False)"),
        ("Sampler(dataset)", "Sampler(dataset, shuffle=args.shuffle)"),
        ("Sampler(dataset)", "Sampler(dataset, **options)"),
        ("Sampler(dataset)", "Sampler(val_dataset)"),
        ("for epoch in range(9)", "if True"),
        ("import os", "import lightning"),
    ],
)
def test_a_sampler_may_need_no_epoch(tmp_path: Path, change: tuple[str, str]) -> None:
    assert checks(tmp_path, EPOCHS.replace(*change)) == set()


def test_the_line_of_the_sampler_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EPOCHS)
    found = lint_script(f"{DIRECTIVES}{TORCHRUN}\n", directory=tmp_path)
    remedy = next(one.remedy for one in found if one.check == "RANK026")
    assert remedy == "call sampler.set_epoch(epoch) of the sampler in train.py:12 before each epoch"


ON_FIRST_GPU = """
import torch

torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda())
model(torch.ones(2, device="cuda")).backward()
"""


@pytest.mark.parametrize(
    "command", [TORCHRUN, "srun python train.py", "torchrun --nproc-per-node=gpu train.py"]
)
def test_ranks_that_do_not_choose_a_gpu_share_the_first_one(tmp_path: Path, command: str) -> None:
    assert checks(tmp_path, ON_FIRST_GPU, command) == {"RANK027"}


@pytest.mark.parametrize(
    ("change", "command"),
    [
        (("model =", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\nmodel ="), TORCHRUN),
        ((".cuda()", ".cuda(rank % 4)"), TORCHRUN),
        ((".cuda()", ".to(f'cuda:{number}')"), TORCHRUN),
        (("import torch", "import torch, deepspeed"), TORCHRUN),
        ((".backward()", ""), TORCHRUN),
        (("", ""), "torchrun --nproc-per-node=1 train.py"),
        (("", ""), "srun --gpus-per-task=1 python train.py"),
        (("", ""), "srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID python train.py'"),
        (("", ""), "srun --ntasks-per-node=1 python train.py"),
    ],
)
def test_each_rank_may_have_its_own_gpu(tmp_path: Path, change: tuple[str, str], command: str) -> None:
    program = ON_FIRST_GPU.replace(*change) if change[0] else ON_FIRST_GPU
    assert checks(tmp_path, program, command) == set()


@pytest.mark.parametrize(("program", "shares"), [(ALONE, False), (PARALLEL, True)])
def test_ranks_share_a_gpu_if_the_program_connects_them(tmp_path: Path, program: str, shares: bool) -> None:
    (tmp_path / "train.py").write_text(program)
    text = (
        DIRECTIVES.replace("node=4", "node=2", 1) + "#SBATCH --gpus-per-node=1\nsrun python train.py --nccl\n"
    )
    found = lint_script(text, directory=tmp_path)
    assert ("RANK003" in {one.check for one in found}) == shares


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (ALONE, "python train.py"),
        (ALONE, "srun -n 1 python train.py"),
        (ALONE, "srun bash -c 'python train.py --seed $SLURM_PROCID'"),
        (ALONE + "import os\nos.environ['SLURM_ARRAY_TASK_ID']\n", "srun python train.py"),
        (ALONE + "from mpi4py import MPI\n", "srun python train.py"),
        (ALONE.replace("model(torch.ones(2)).backward()", "model(torch.ones(2))"), "srun python train.py"),
    ],
)
def test_a_program_for_one_process_may_be_started_once_or_do_other_work_on_each_rank(
    tmp_path: Path, program: str, command: str
) -> None:
    assert checks(tmp_path, program, command) == set()


@pytest.mark.parametrize(
    "text",
    [
        "torch.save(model.state_dict(), 'model.pt')\n",
        "if loss < best:\n    torch.save(model.state_dict(), f'{epoch}.pt')\n",
        "def keep(model):\n    torch.save(model.state_dict(), 'model.pt')\nkeep(model)\n",
        "def run():\n    torch.save(model.state_dict(), 'model.pt')\ntorch.multiprocessing.spawn(run)\n",
        "class Run:\n    def keep(self):\n        torch.save(self.state, 'model.pt')\nRun().keep()\n",
        "saved_dict = model.module.state_dict()\ntorch.save(saved_dict, 'last.pt')\n",
    ],
)
def test_a_file_that_all_ranks_save_is_found(tmp_path: Path, text: str) -> None:
    assert checks(tmp_path, saves(text)) == {"RANK025"}


USED = "class Used:\n    def run(self):\n        return None\n"
UPDATE = "class Best:\n    def update(self):\n        torch.save(model, 'm.pt')\n"
KEEP = "def keep():\n    torch.save(model.state_dict(), 'model.pt')\n"


@pytest.mark.parametrize(
    "text",
    [
        "if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')\n",
        "def work(worker_idx):\n    if worker_idx == 0:\n        torch.save(model, 'm.pt')\nspawn(work)\n",
        "if rank != 0:\n    pass\nelse:\n    torch.save(model.state_dict(), 'model.pt')\n",
        "writes = rank == 0\nif writes and loss < best:\n    torch.save(model.state_dict(), 'model.pt')\n",
        "writes = True\nif rank:\n    writes = False\nif writes:\n    torch.save(model.state, 'm.pt')\n",
        "torch.save(model.state_dict(), f'model_{rank}.pt')\n",
        "path = os.path.join('runs', str(rank))\ntorch.save(model.state_dict(), path)\n",
        "def keep():\n    if rank != 0:\n        return\n    torch.save(model.state, 'm.pt')\nkeep()\n",
        KEEP + "if rank == 0:\n    keep()\n",
        KEEP + "if parallel:\n    if rank == 0:\n        keep()\nelse:\n    keep()\n",
        f"{UPDATE}if rank == 0:\n    run(Best())\nvalues.update(loss)\n",
        KEEP + "def run():\n    keep()\nif rank == 0:\n    run()\n",
        "def first():\n    return rank == 0\nif first():\n    torch.save(model.state_dict(), 'm.pt')\n",
        f"@rank_zero_only\n{KEEP}keep()\n",
        KEEP,
        "class Other:\n    def run(self):\n        torch.save(model.state_dict(), 'm.pt')\nmodel.run()\n",
        f"{USED}class Used:\n    def run(self):\n        torch.save(model.state, 'm.pt')\nUsed().run()\n",
        "torch.save(features, 'features.pt')\n",
        "import io\nbuffer = io.BytesIO()\ntorch.save(model.state_dict(), buffer)\n",
    ],
)
def test_a_file_that_one_rank_saves_has_no_finding(tmp_path: Path, text: str) -> None:
    assert checks(tmp_path, saves(text)) == set()


@pytest.mark.parametrize(
    ("text", "nodes", "found"),
    [
        ("if local_rank == 0:\n    torch.save(model.state_dict(), 'model.pt')\n", 2, {"RANK025"}),
        ("if local_rank == 0:\n    torch.save(model.state_dict(), 'model.pt')\n", 1, set()),
        ("if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')\n", 2, set()),
        ("if local_rank == 0:\n    torch.save(model.state_dict(), f'model_{rank}.pt')\n", 2, set()),
        ("if local_rank == 0 and node_rank == 0:\n    torch.save(model.state, 'model.pt')\n", 2, set()),
        ("if local_rank == 0:\n    torch.save(model.state_dict(), '/tmp/model.pt')\n", 2, set()),
        ("local_rank = dist.get_rank()\nif local_rank == 0:\n    torch.save(model, 'm.pt')\n", 2, set()),
    ],
)
def test_a_file_that_one_rank_of_each_node_saves_is_found(
    tmp_path: Path, text: str, nodes: int, found: set[str]
) -> None:
    directives = f"{DIRECTIVES}#SBATCH --nodes={nodes}\n"
    command = f"srun --ntasks-per-node=1 torchrun --nnodes={nodes} --nproc-per-node=4 train.py"
    assert checks(tmp_path, saves(text), command, directives) & {"RANK025"} == found


def test_the_file_and_the_line_of_a_save_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(saves("import files\nfiles.keep(model)\n"))
    (tmp_path / "files.py").write_text("import torch\ndef keep(model):\n    torch.save(model, 'model.pt')\n")
    found = lint_script(f"{DIRECTIVES}{TORCHRUN}\n", directory=tmp_path)
    said = next(one.what for one in found if one.check == "RANK025")
    assert said == "all ranks save a checkpoint to the same file, in files.py:3"


SAVES = ALONE + "for epoch in range(9):\n    torch.save(model.state_dict(), 'model.pt')\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def read(path):\n    model.load_state_dict(torch.load(path))\n",
        "model.load_state_dict(other.state_dict())\n",
        "images = torch.load('images.pt')\n",
        "def test(path):\n    model.load_state_dict(torch.load(path))\ntest('model.pt')\n",
        "import test\n",
    ],
)
def test_a_program_that_does_not_load_its_checkpoints_is_found(tmp_path: Path, text: str) -> None:
    module = "import torch\nif __name__ == '__main__':\n    torch.load('model.pt')\n"
    assert checks(tmp_path, SAVES + text, "python train.py", test=module) == {"JOB032"}


def test_a_program_that_saves_through_a_function_with_any_arguments_is_found(tmp_path: Path) -> None:
    text = "def save(*args):\n    torch.save(*args)\nwhile True:\n    save(model.state_dict())\n"
    assert checks(tmp_path, ALONE + text, "python train.py") == {"JOB032"}


def test_a_program_that_saves_only_its_result_has_no_finding(tmp_path: Path) -> None:
    text = ALONE + "torch.save(model.state_dict(), 'model.pt')\n"
    assert checks(tmp_path, text, "python train.py") == set()


@pytest.mark.parametrize(
    ("text", "directives"),
    [
        ("model.load_state_dict(torch.load('model.pt'))\n", DIRECTIVES),
        ("from files import load_checkpoint\nload_checkpoint(model)\n", DIRECTIVES),
        ("import lightning\n", DIRECTIVES),
        ("", DIRECTIVES.replace("24:00:00", "00:30:00")),
        ("", "#!/bin/bash\n"),
    ],
)
def test_a_program_that_loads_or_a_short_job_has_no_finding(
    tmp_path: Path, text: str, directives: str
) -> None:
    assert checks(tmp_path, SAVES + text, "python train.py", directives) == set()


@pytest.mark.parametrize("package", ["library", "src/library"])
@pytest.mark.parametrize("first", ["__init__.py", "other.py"])
def test_a_package_in_the_submission_directory_is_read_too(tmp_path: Path, package: str, first: str) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").write_text(saves("from library import files\nfiles.keep(model)\n"))
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / first).touch()
    (tmp_path / package / "files.py").write_text(
        "import torch\ndef keep(model):\n    torch.save(model, 'model.pt')\n"
    )
    found = lint_script(f"{DIRECTIVES}torchrun --nproc-per-node=4 tools/train.py\n", directory=tmp_path)
    said = [one.what for one in found if one.check == "RANK025"]
    assert said == [f"all ranks save a checkpoint to the same file, in {package}/files.py:3"]


def test_a_program_whose_package_is_elsewhere_in_the_submission_directory_is_not_judged(
    tmp_path: Path,
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").write_text(SAVES + "import library\n")
    (tmp_path / "library").mkdir()
    assert checks(tmp_path, "", "python tools/train.py") == set()


@pytest.mark.parametrize(("program", "is_reported"), [(PARALLEL, True), ("import mpi4py\n", False)])
def test_ranks_may_share_a_gpu_if_the_program_does_not_connect_them(
    tmp_path: Path, program: str, is_reported: bool
) -> None:
    (tmp_path / "train.py").write_text(program)
    text = DIRECTIVES.replace("=4", "=8", 1) + "srun python train.py\n"
    assert ("RANK003" in {one.check for one in lint_script(text, directory=tmp_path)}) == is_reported


@pytest.mark.parametrize(
    "name",
    [
        "programs.txt",
        "programs_held_out.txt",
        "programs_third.txt",
        "programs_fourth.txt",
        "programs_fifth.txt",
    ],
)
def test_the_verdicts_on_public_programs_can_be_read(name: str) -> None:
    programs = read_programs(Path(__file__).with_name(name))
    assert len({(one.repository, one.path) for one in programs}) == len(programs) > 30
    allowed = [
        {"own", "shared"},
        {"divided", "same", "order"},
        {"one", "own", "all"},
        {"yes", "weights", "no"},
    ]
    for one in programs:
        assert all(word == "-" or word in some for word, some in zip(one.verdicts, allowed, strict=True))
