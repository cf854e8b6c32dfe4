"""Checks of the Python program that a script starts, if its file is in the submission directory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Subject, check, plain, table
from ddp_hpc.lint.launch_commands import Start, programs, starts
from ddp_hpc.lint.program_source import ProgramSource
from ddp_hpc.lint.resumption_of_script import resumption_of_script
from ddp_hpc.request.program import program_of
from ddp_hpc.request.program_files import text_of
from ddp_hpc.schedulers.script_options import whole_number

# Each of these reads RANK and WORLD_SIZE from the environment. Without them, init_process_group() fails, and
# the Hugging Face Trainer, Accelerate and DeepSpeed train separately on each rank.
_NEEDS_VARIABLES = re.compile(
    r"\binit_process_group\(|\bAccelerator\(|\bTrainingArguments\b|\bdeepspeed\.(?:init|initialize)"
)
# Programs that get their rank from another source, directly or through a library.
_DETECTS_RANKS = re.compile(
    r"SLURM_PROCID|SLURM_LOCALID|PMI_RANK|PMIX_RANK|PALS_|OMPI_COMM|MV2_COMM|FLUX_TASK|mpi4py|\bddp_hpc\b|"
    r"submitit|idr_torch|environ\[['\"]RANK['\"]\]\s*=|setdefault\(['\"]RANK['\"]|\brank=|"
    r"init_method=['\"](?:tcp|file):"
)
# A program that passes on its rank may read it from the variable of torchrun, and from no other one.
_READS_RANK = re.compile(r"(?:environ(?:\.get)?|getenv)[\[(]\s*['\"]RANK['\"]")
_HAS_OTHER_RANK = re.compile(
    r"PROCID|PMI_RANK|PMIX_RANK|PALS_|OMPI_COMM_WORLD_RANK|MV2_COMM_WORLD_RANK|FLUX_TASK|mpi4py|MPI\.COMM|ddp_hpc|"
    r"submitit|idr_torch|environ\[['\"]RANK['\"]\]\s*=|setdefault\(['\"]RANK['\"]|environ\.update|spawn|tcp:|file:|"
    r"\b(?:setup|init)_dist"
)


_HAS_ADDRESS = re.compile(
    r"MASTER_ADDR|init_method=(?!['\"]env)|(?:tcp|file):|store=|idr_torch|submitit|\butils\b"
)
_READS_FILE = re.compile(r"(?:^|[\s'\";&])(?:source|\.)\s|container|apptainer|singularity|torchrun")
# Parts of commands that give each rank its own work.
_OWN_WORK = re.compile(r"PROCID|LOCALID|_RANK|TASK_PID")
# Options and variables with which each rank sees only its own GPU.
_OWN_GPU = re.compile(r"gpus-per-task|gpu-bind|VISIBLE_DEVICES|ZE_AFFINITY_MASK")
# Lines of programs that fit a single node, unless the program chooses them by its environment.
_LOCAL = table(r"""
^[ \t]*(?:os\.environ\[.MASTER_ADDR.\] *= *.|[^#\n]*['"]tcp://)(?:localhost|127\.)
    @ the program connects each node to itself @ let it read MASTER_ADDR, and export that of the first node
^ *(\w+) *= ?(?:[\w.]*get_rank\(\)|int\(os.environ\W+(?:SLURM_PROC|RANK)\w*\W{3})$(?s:.{,999})set_device\(\1\)
    @ the program takes the number among all ranks for that of a GPU @ use rank % torch.cuda.device_count()
""")
_OF_LIGHTNING = re.compile(
    r"[\s-]trainer\.(?:devices|strategy|num_nodes|gpus)[= ]"
    r"|[\s.-](?:strategy|distributed_backend)[= ]\"?ddp(?![a-z])"
    r"|\s--devices[= ]\d+\s[^#]{,200}?--num_nodes[= ]|\s--num_nodes[= ]\d+\s[^#]{,200}?--devices[= ]"
)
# A script with one of these may hide the tasks of Slurm from Lightning, or start the ranks itself.
_OTHER_RANKS = re.compile(r"unset SLURM|SLURM_(?:NTASKS|JOB_NAME)=|torchrun|torch\.distributed|\bRANK=")
_SAVES = re.compile(r"--(?:\w{1,20}[-_])?(?:save|out)[\w-]{,20}[= ]\S+")
_RESUMES = re.compile(
    r"(?i)resum|restart|restor|ckpt|checkpoint|continu|latest|\blast|load[-_]|--load|requeue"
)
# A shorter run loses little if it begins again.
_LONG_S = 3600


@check("RANK016", "note", "ranks without the variables of torchrun")
def _without_variables(subject: Subject) -> Iterator[Problem]:
    if "MASTER_ADDR" not in subject.script.text and not re.search(_READS_FILE, subject.script.text):
        yield from _without_address(subject)
    has_rank = bool(re.search(r"\bRANK=", "\n".join(subject.script.lines)))
    for start in starts(subject):
        text = _program(start)[1] if start.is_launched and (start.num_nodes or 1) > 1 else ""
        for _, what, remedy in (r for r in _LOCAL if re.search(r[0], text, re.M) and "in os.env" not in text):
            yield Problem(start.command.line, what, remedy)
        is_python = start.is_launched and start.program == "python" and not start.is_torchrun
        if has_rank or re.search(r"ddp[-_]hpc[ .]exec", start.command.text):
            continue
        if not is_python or start.launcher_hides_options or (start.num_ranks or 1) < 2:
            continue
        if needs := _needs_variables(start):
            yield Problem(
                start.command.line,
                f"{start.num_ranks} ranks are started, but {plain(needs)} needs the variables of torchrun, "
                "such as RANK, which this launcher does not set",
                f"start `ddp-hpc exec -- python {plain(needs)}`, or start torchrun once per node",
            )


def _without_address(subject: Subject) -> Iterator[Problem]:
    """Yields programs that find their ranks in variables of srun, but not the address of the first."""
    for start in starts(subject):
        name, text = _program(start)
        needs = re.search(r"\binit_process_group\(", text) and not _HAS_ADDRESS.search(text)
        is_srun = start.command.name == "srun" and start.program == "python" and (start.num_ranks or 1) > 1
        if needs and is_srun and (_DETECTS_RANKS.search(text) or "RANK=" in subject.script.text):
            what = f"{plain(name)} connects its ranks, and nothing sets MASTER_ADDR and MASTER_PORT"
            yield Problem(start.command.line, what, "export both before srun")


def _needs_variables(start: Start) -> str:
    """Returns the name of the program's file if it needs the variables; empty if not, or if it is unknown."""
    name, text = _program(start)
    text = re.sub(r"(?m)(?:^|\s)#.*", "", text)
    reads_it = _READS_RANK.search(text) and not _HAS_OTHER_RANK.search(text)
    is_left = reads_it or not _DETECTS_RANKS.search(text)
    return name if _NEEDS_VARIABLES.search(text) and is_left else ""


def _program(start: Start) -> tuple[str, str]:
    """Returns the name and the text of the program's file; both are empty if it is unknown."""
    program, directory = program_of(start.words), start.subject.directory
    if program is None or program.kind != "file" or directory is None or "$" in program.name:
        return "", ""
    return program.name, (text_of(directory / program.name) or b"").decode("utf-8", "replace")


@check("RANK030", "note", "ranks of Lightning that srun does not start")
def _ranks_of_lightning(subject: Subject) -> Iterator[Problem]:
    yield from _lightning_without_srun(subject)
    for start in starts(subject):
        if start.command.name != "srun" or start.program != "python" or start.launcher_hides_options:
            continue
        text = _program(start)[1]
        trainer = re.search(r"\bTrainer\(((?:[^()]|\([^()]*\)){,800})\)", text)
        given = (trainer[1] if trainer and "lightning" in text else "") + " " + start.command.text
        is_plain = bool(trainer) and "num_nodes" not in text and not re.search(r"num[-_]nodes", given)
        is_plain &= bool(re.search(r"\bdevices\s*=", given)) and "**" not in given
        if is_plain and (start.num_nodes or 1) > 1:
            what = f"the Trainer has no num_nodes, 1 by default, and srun uses {start.num_nodes} nodes"
            yield Problem(start.command.line, what, f"write Trainer(num_nodes={start.num_nodes})")
        nodes, tasks = (start.num_nodes, "--nodes"), (start.ranks_per_node, "--ntasks-per-node")
        for name, (has, flag) in {"num[-_]nodes": nodes, "devices": tasks}.items():
            form = rf"(?:^\s*|,\s*|\btrainer\.|\s--(?=num)){name}\s*[= ]\s*(\d+)\b(?!:|\s+if\b)"
            if (wanted := re.search(form, given)) and has and int(wanted[1]) != has:
                what = f"the program expects {flag}={wanted[1]}, and srun uses {has}"
                remedy = f"request {flag}={wanted[1]}, or let the program use {has}"
                yield Problem(start.command.line, what, remedy)


def _lightning_without_srun(subject: Subject) -> Iterator[Problem]:
    """Yields a program of Lightning that is started once in a job with several tasks."""
    tasks = whole_number(subject.value_of("$SLURM_NTASKS")) or subject.ranks_per_node or 1
    is_single = subject.scheduler.name != "slurm" or (subject.gpus_per_node or 1) == 1 or tasks == 1
    for start in starts(subject) if not (is_single or _OTHER_RANKS.search(subject.script.text)) else ():
        text = _program(start)[1]
        is_trainer = re.search(r"\bTrainer\(", text) and "lightning" in text and "Environment" not in text
        is_lightning = is_trainer or _OF_LIGHTNING.search(start.command.text)
        if start.command.name.startswith("python") and start.program == "python" and is_lightning:
            what = f"Lightning takes the number of ranks from Slurm ({tasks}), and this command starts one"
            yield Problem(start.command.line, what, "write srun before python")
            return


@check("JOB020", "warning", "a program that is not resumed after the walltime")
def _not_resumed(subject: Subject) -> Iterator[Problem]:
    if subject.directory is None or not subject.scheduler.has_queue:
        return
    resumption = resumption_of_script(subject.script, subject.directory)
    if resumption is not None and (warning := resumption.warning(subject.walltime_s)):
        line = subject.script.supervised.line if subject.script.supervised else 1
        yield Problem(line, warning, resumption.how_to_resume)


@check("RANK024", "warning", "each rank trains on all of the data")
def _same_data(subject: Subject) -> Iterator[Problem]:
    for start, name, source in _with_several_ranks(subject):
        if _OWN_WORK.search(start.command.text):
            continue
        if source.shares_data:
            what = f"each rank reads all of the data, because {name} does not divide it"
            remedy = "give the DataLoader sampler=DistributedSampler(dataset) instead of shuffle=True"
            yield Problem(start.command.line, what, remedy)
        elif source.has_one_rank:
            what = f"several ranks are started, but {name} does not connect them: each trains the same model"
            remedy = "start it once, or use DistributedDataParallel and DistributedSampler"
            yield Problem(start.command.line, what, remedy)


@check("RANK026", "warning", "the same order of the data in each epoch")
def _same_order(subject: Subject) -> Iterator[Problem]:
    for start, name, source in _with_several_ranks(subject):
        if place := source.repeated_order:
            what = f"each epoch has the same order: {name} never calls set_epoch() of its DistributedSampler"
            remedy = f"call sampler.set_epoch(epoch) of the sampler in {plain(place)} before each epoch"
            yield Problem(start.command.line, what, remedy)


@check("RANK027", "warning", "all ranks of a node use the same GPU")
def _same_gpu(subject: Subject) -> Iterator[Problem]:
    if _OWN_GPU.search("\n".join(subject.script.lines)) or subject.gpus_per_node == 1:
        return
    for start, name, source in programs(subject):
        of_node = start.given("--nproc-per-node") if start.is_torchrun else str(start.ranks_per_node or 1)
        if of_node not in (None, "1") and source.shares_gpu:
            what = f"all ranks of a node use its first GPU, as {name} does not choose one by the local rank"
            remedy = "call torch.cuda.set_device(rank % torch.cuda.device_count()) first"
            yield Problem(start.command.line, what, remedy)


@check("RANK025", "warning", "all ranks save to the same file")
def _same_file(subject: Subject) -> Iterator[Problem]:
    for start, _, source in _with_several_ranks(subject):
        if place := source.save_of_all_ranks:
            what = f"all ranks save a checkpoint to the same file, in {plain(place)}"
            yield Problem(start.command.line, what, "save it only if torch.distributed.get_rank() == 0")
        elif (place := source.save_of_each_node) and (start.num_nodes or 1) > 1:
            what = f"one rank of each node saves a checkpoint to the same file, in {plain(place)}"
            yield Problem(start.command.line, what, "save it only on rank 0 of all nodes", "note")


@check("JOB032", "note", "a program that saves checkpoints, but does not load them")
def _not_loaded(subject: Subject) -> Iterator[Problem]:
    if not subject.scheduler.has_queue or (subject.walltime_s or 0) < _LONG_S or subject.script.supervised:
        return
    body = "\n".join(_SAVES.sub("", line) for line in subject.script.lines if not line.startswith("#SBATCH"))
    for start in starts(subject) if subject.script.value("--requeue") is not None else ():
        is_training = re.search(r"(?i)train|epochs", start.command.text) and ".py" in start.command.text
        if is_training and not _RESUMES.search(body + _program(start)[1]):
            what = "with --requeue, the training begins again at its start, unless it looks for a checkpoint"
            yield Problem(start.command.line, what, "resume from the last checkpoint if there is one")
            break
    for start, name, source in programs(subject):
        if place := source.save_without_load:
            what = f"{name} saves checkpoints, in {plain(place)}, but loads none, so each job begins again"
            yield Problem(start.command.line, what, "load the newest checkpoint at the start, if any")


def _with_several_ranks(subject: Subject) -> list[tuple[Start, str, ProgramSource]]:
    return [one for one in programs(subject) if _has_several_ranks(one[0]) or one[2].starts_ranks]


def _has_several_ranks(start: Start) -> bool:
    if start.is_torchrun:
        return {start.given("--nproc-per-node"), start.given("--nnodes")} - {None, "1"} != set()
    if start.program in ("accelerate", "deepspeed"):
        options = start.options_of(start.program)
        return "1" not in (options.get("--num-processes"), options.get("--num-gpus"))
    is_clear = start.is_launched and not start.launcher_hides_options
    return is_clear and (start.num_ranks or start.ranks_per_node or 1) > 1
