"""Check of CUDA_VISIBLE_DEVICES, and of options with the numbers of GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ddp_hpc.base.units import counted
from ddp_hpc.lint.blocks import with_depth
from ddp_hpc.lint.check_registry import Problem, Subject, check
from ddp_hpc.lint.checks_job_steps import is_in_loop
from ddp_hpc.lint.launch_commands import Start, requests_gpus, single_quoted, starts
from ddp_hpc.schedulers.script_options import whole_number

_DEVICES = re.compile(r"\d{1,3}(?:,\d{1,3})*")
# The number of a rank on its node, of Slurm and of several MPIs, without a remainder.
_LOCAL_NUMBER = re.compile(
    r"\bCUDA_VISIBLE_DEVICES=[\"']?\$\{?(SLURM_LOCALID|(?:PMI|OMPI_COMM_WORLD)_LOCAL_RANK|MPI_LOCALRANKID|"
    r"PALS_LOCAL_RANKID)\}?[\"']?(?:[\s;&]|$)"
)
_LOCAL_DEVICE = re.compile(r"(?:\bcuda:|\bCUDA_VISIBLE_DEVICES=[\"']?)\$\{?(SLURM_LOCALID)\b")
# The number of a GPU as an option of a program.
_OF_GPU = re.compile(r"(?:\s--?(?:gpu|device|gpu[-_]id)[= ]\"?(?:cuda:)?|\bcuda:)(\S*?)[\"']?(?=\s|$)")


@check("RANK017", "warning", "CUDA_VISIBLE_DEVICES does not fit the GPUs of the job")
def _visible_devices(subject: Subject) -> Iterator[Problem]:
    yield from _other_than_own(subject)
    yield from _beyond_last_device(subject)
    yield from _all_on_first(subject)
    yield from _of_options(subject)
    gpus = subject.gpus_per_node
    # With this option, deepspeed ignores the variable.
    others = [start for start in starts(subject) if "--num-gpus" not in start.options_of("deepspeed")]
    is_ignored = len(others) < len(starts(subject))
    is_default = re.search(r"-z \S*\bCUDA_VISIBLE_DEVICES", subject.script.text)
    # srun sets the variable for its tasks if the job requests GPUs.
    in_steps = [start.command.line for start in starts(subject) if start.command.name == "srun"]
    in_shell = [start.command.line for start in starts(subject) if _is_program(start)]
    is_replaced = bool(in_steps) and not in_shell and requests_gpus(subject)
    for line, name, value in subject.script.assignments:
        if name != "CUDA_VISIBLE_DEVICES" or not _DEVICES.fullmatch(value) or is_default or is_replaced:
            continue
        users = [start.command for start in starts(subject) if start.is_launched or _is_program(start)]
        if users and all(f"{name}=" in user.text and user.line != line for user in users):
            continue  # each program gets another value
        devices = {int(one) for one in value.split(",")}
        remedy = "remove the assignment, as the scheduler assigns the GPUs, and request as many as needed"
        if is_ignored and len(devices) <= max(devices) < (gpus or sys.maxsize):
            what = f"deepspeed --num_gpus ignores CUDA_VISIBLE_DEVICES={value}, and uses the first GPUs"
            yield Problem(line, what, f"use deepspeed --include localhost:{value} instead of --num_gpus")
        # A command may have an assignment of its own before it.
        of_line = [s for s in others if s.command.line == line and s.program != "export"]
        own = [s for s in of_line if name in s.command.text]
        ranks, first = max(((_ranks_of(s), s.command.line) for s in own or others), default=(0, 0))
        is_for_this = line <= first and sum(a[1] == name for a in subject.script.assignments) == 1
        if ranks > len(devices) and is_for_this:
            what = (
                f"CUDA_VISIBLE_DEVICES={value} shows {len(devices)} GPU{'s' * (len(devices) > 1)} to each of "
                f"the {ranks} ranks of a node that line {first} starts"
            )
            yield Problem(line, what, remedy, "note" if _may_be_undone(subject, line, first) else "error")
        elif gpus and max(devices) >= gpus and subject.script.value("--exclusive") != "":
            yield Problem(
                line,
                f"CUDA_VISIBLE_DEVICES is {value}, but the job has {counted(gpus, 'GPU')} per node, "
                "numbered from 0",
                remedy,
                # CUDA ignores the first number that does not exist, and those after it.
                "note" if value.startswith(",".join(map(str, range(gpus)))) else None,
            )


def _of_options(subject: Subject) -> Iterator[Problem]:
    """Yields options that select GPUs which the job does not have."""
    gpus = subject.gpus_per_node
    of_deepspeed = [(start.command.line, start.options_of("deepspeed")) for start in starts(subject)]
    for line, options in of_deepspeed:
        given = options.get("--include", "").removeprefix("localhost:")
        if gpus and _DEVICES.fullmatch(given) and max(map(int, given.split(","))) >= gpus:
            yield _beyond(line, f"deepspeed uses GPUs {given}", gpus)
    for start in starts(subject) if gpus and subject.script.value("--exclusive") != "" else ():
        # Other programs may have other numbers, such as 0 for the CPU.
        if start.program not in ("python", "torchrun", "accelerate"):
            continue
        for option in ("--gpu", "--gpus", "--gpu-id", "--gpu-ids", "--device", "--devices"):
            value = (start.given(option) or "").removeprefix("cuda:")
            is_list = "," in value or option.endswith(("id", "ids", "device"))
            if is_list and _DEVICES.fullmatch(value) and max(map(int, value.split(","))) >= (gpus or 0):
                yield _beyond(start.command.line, f"{option} selects GPU {value}", gpus or 0)


def _beyond(line: int, selects: str, gpus: int) -> Problem:
    """Returns the finding on a number of a GPU that the job does not have."""
    what = f"{selects}, but the job gets {counted(gpus, 'GPU')} of a node, numbered from 0"
    return Problem(
        line, what, f"use {'0' if gpus == 1 else f'numbers up to {gpus - 1}'}, or request more GPUs"
    )


def _may_be_undone(subject: Subject, line: int, first: int) -> bool:
    """Returns whether the variable is unset before line `first`, or set in a block around fewer commands."""
    commands = subject.script.commands
    depths = {command.line: depth for command, depth in with_depth(commands)}
    is_unset = any(c.name == "unset" and "VISIBLE" in c.text and line < c.line < first for c in commands)
    return is_unset or depths.get(line, 0) > depths.get(first, 0)


def _is_program(start: Start) -> bool:
    return not start.is_launched and bool(
        re.match(r"python|torchrun|accelerate|deepspeed|[.$]", start.program)
    )


def _ranks_of(start: Start) -> int:
    """Returns the ranks that a command starts on a node, as far as the command says it."""
    if start.is_torchrun:
        return whole_number(start.given("--nproc-per-node")) or 0
    options = start.options_of("accelerate", "deepspeed")
    if options:
        # accelerate has the number of all machines together.
        machines = whole_number(start.subject.value_of(options.get("--num-machines", "1"))) or sys.maxsize
        return (whole_number(options.get("--num-processes", options.get("--num-gpus"))) or 0) // machines
    is_rank = start.is_launched and start.program == "python" and not start.launcher_hides_options
    return (start.ranks_per_node or 0) if is_rank else 0


def _other_than_own(subject: Subject) -> Iterator[Problem]:
    """Yields tasks that take their number on the node for that of a GPU, and see one GPU each."""
    script = subject.script
    if "--gpu-bind" in script.text or not subject.has_many_tasks:
        return
    for command in script.launches("srun"):
        of_task = command.option("--gpus-per-task") or script.value("--gpus-per-task")
        if of_task == "1" and (number := _LOCAL_DEVICE.search(single_quoted(command.text))):
            what = "with --gpus-per-task=1, each task sees only its own GPU, as device 0"
            yield Problem(command.line, what, f"write 0 for ${number[1]}", "note")
            return


def _beyond_last_device(subject: Subject) -> Iterator[Problem]:
    """Yields ranks that take their number on the node for that of a GPU, and are more than its GPUs."""
    gpus = subject.gpus_per_node
    for start in starts(subject) if gpus and subject.script.value("--exclusive") is None else ():
        ranks, number = start.ranks_per_node or 0, _LOCAL_NUMBER.search(single_quoted(start.command.text))
        if start.is_launched and gpus and number and ranks > gpus:
            what = f"{ranks} ranks of a node take {number[1]} for the number of a GPU, and the job has {gpus}"
            remedy = f"use $(({number[1]} % {gpus})), or start {counted(gpus, 'rank')} on each node"
            yield Problem(start.command.line, what, remedy, "note")


def _all_on_first(subject: Subject) -> Iterator[Problem]:
    """Yields programs in the background that all use the first of several GPUs."""
    script = subject.script
    if (subject.gpus_per_node or 1) < 2 or "VISIBLE_DEVICES" in script.text:
        return
    found = [(c, _OF_GPU.search(c.text)) for c in script.commands if c.ends == "&" and c.name != "srun"]
    on_gpu = [(command, match[1]) for command, match in found if match]
    is_repeated = len(on_gpu) > 1 or any(is_in_loop(subject, command) for command, _ in on_gpu)
    if is_repeated and {number for _, number in on_gpu} == {"0"}:
        what = f"all of these programs use the first of {subject.gpus_per_node} GPUs"
        yield Problem(on_gpu[0][0].line, what, "give each its own, such as CUDA_VISIBLE_DEVICES=$i", "note")
