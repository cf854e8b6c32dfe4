"""Check of the arguments of launchers and of sbatch: options that they do not have, and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_hpc.lint.check_registry import Problem, Subject, check, nearest_known, plain, shown
from ddp_hpc.lint.launch_commands import Start, starts
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.slurm.check_option_values import expected_value
from ddp_hpc.schedulers.slurm.parse_directives import read_command
from ddp_hpc.schedulers.slurm.sbatch_options import CURRENT, SRUN_OPTIONS

_HIDDEN = re.compile(r"[$`<{%]")
_GLUED = re.compile(r"--?\w[\w-]*=[^=\s]*\w--[a-z][\w-]*=.*")
# Options of plugins, such as Pyxis, Shifter, uenv and EAR, and of other components of a job.
_OF_PLUGINS = re.compile(
    r"--(?:(?:no-)?container-|image|module|volume|environment|uenv|view|ear|x11|het-|pack-)"
)
# The same option of torchrun, accelerate, deepspeed, srun and mpirun; each line is one meaning.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")
_SAME = [
    line.split()
    for line in (
        "--nproc-per-node --num-processes --num-gpus --ntasks-per-node -np",
        "--nnodes --num-machines --num-nodes --nodes -np",
        "--node-rank --machine-rank --node-rank - -",
        "--master-addr --main-process-ip --master-addr - -",
        "--master-port --main-process-port --master-port - -",
        "- - - --ntasks -np",
        "- - - --ntasks-per-node --ppn",
        "- - - --gpus-per-node --ppn",
        "- - - --cpu-bind --bind-to",
        "- - - --distribution --map-by",
        "- - - --nodelist --hostfile",
    )
]
# Options that people write most, for the spelling, and options without a value.
_OFTEN = {
    "accelerate": "--multi-gpu --num-processes --num-machines --machine-rank --main-process-ip --config-file "
    "--main-process-port --mixed-precision --use-deepspeed --use-fsdp --gpu-ids --rdzv-backend",
    "deepspeed": "--num-gpus --num-nodes --include --exclude --hostfile --master-addr --master-port",
}
_FLAGS = re.compile(
    r"--(?:standalone|no-python|use-env|multi-gpu|use-deepspeed|use-fsdp|same-network|no-ssh|cpu)"
)
_LITERAL = re.compile(r"(?i:true|false|yes|no|\d+)")
_OF_ACCELERATE = re.compile(
    r"--(?:num[-_](?:processes|machines)|multi[-_]gpu|machine[-_]rank|main[-_]process_)"
)
_OF_SBATCH = re.compile(
    r"--(?:gres|gpus\S*|ntasks\S*|cpus-per-task|partition|account|qos|mem|array|dependency|chdir)\b"
)


@check("RANK031", "error", "an argument that a launcher or sbatch does not understand")
def _arguments(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        command = start.command
        found = [*_of_launchers(start.inner), *(_of_slurm(command, subject.scheduler_version))]
        if glued := next((word for word in command.words if _GLUED.fullmatch(word)), ""):
            found.append((f"a blank is missing in {shown(glued)}", "write it before --"))
        for what, remedy in found:
            yield Problem(command.line, what, remedy)


def _instead(name: str, flag: str) -> str:
    """Returns what a launcher has instead of an option of another launcher; empty if nothing is known."""
    index = _LAUNCHERS.index(name) if name in _LAUNCHERS else -1
    rows = [same for same in _SAME if flag in same and flag != same[index] != "-"]
    instead = rows[0][index] if rows and index >= 0 and all(flag != same[index] for same in _SAME) else ""
    # Some mpirun, such as that of PALS, also have options of srun for the binding.
    return "" if name == "mpirun" and instead not in ("-np", "--ppn") else instead


def _of_slurm(command: Command, version: str) -> Iterator[tuple[str, str]]:
    """Yields what srun or sbatch rejects, and what sbatch passes on to the script."""
    if command.name not in ("srun", "sbatch"):
        return
    name, of_srun = command.name, command.name == "srun"
    given, rest = read_command(command.argv[1:], of_srun=of_srun)
    for d in given:
        if _OF_PLUGINS.match(d.flag) or _HIDDEN.search(d.flag) or (d.fault and not d.flag.startswith("--")):
            return
        if d.fault == "unknown":
            known = tuple(SRUN_OPTIONS) if of_srun else CURRENT
            near = nearest_known([d.flag[2:]], known, cutoff=0.75)[d.flag[2:]]
            instead = _instead(name, d.flag.replace("_", "-")) or (near and f"--{near}") or "another one"
            yield f"{name} has no option {shown(d.flag)}", f"use {instead}, see {name} --help"
            return
        if d.value.startswith("--") and "=" not in d.written and not d.fault:
            yield f"{name} takes {shown(d.value)} for the value of {shown(d.written)}", "write its value"
        elif d.fault in ("no value", "extra value"):
            yield f"{shown(d.written)} has {d.fault.replace('extra', 'a')}", f"see {name} --help"
        elif not _HIDDEN.search(d.value) and (expected := expected_value(d.flag, d.value, version)):
            yield f"{name} rejects {d.flag} {shown(d.value)}", f"write {expected}"
    flags = {d.flag for d in given}
    if "--version" in flags and not of_srun and rest:
        yield "sbatch -V only prints its version", "remove it, or use --export=ALL"
    if of_srun or "--wrap" in flags or not rest or re.match(r"[:$`]", rest[0]):
        return
    late = next((word for word in rest[1:] if _OF_SBATCH.match(word)), "")
    if re.fullmatch(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun)", rest[0]):
        yield f"sbatch takes the file {shown(rest[0])} for the script", 'use --wrap="COMMAND"'
    elif ":" in rest:
        yield "sbatch takes one script, and what follows it for arguments", "name one script, at the end"
    elif late:
        yield f"{shown(late)} comes after {shown(rest[0])}, so it is its argument", "put it before the script"


def _of_launchers(start: Start) -> Iterator[tuple[str, str]]:
    """Yields options of other launchers, misspelled ones, and values of options that have none."""
    name, words = "torchrun" if start.is_torchrun else start.program, start.words
    end = next((i for i, word in enumerate(words) if i and word.endswith(".py")), len(words))
    own = words[1:end]
    if start.command.name in ("mpirun", "mpiexec"):
        name, own = "mpirun", start.command.own_words
    is_read = name in ("torchrun", "mpirun", *_OFTEN)
    for word, following in pairwise((*own, "")) if is_read else ():
        flag, equals, value = word.replace("_", "-").partition("=")
        if _FLAGS.fullmatch(flag) and name != "mpirun":
            if _LITERAL.fullmatch(value if equals else following):
                yield f"{plain(flag)} of {name} takes no value", f"omit {plain(value or following)}"
        elif flag.startswith("--") and name != "torchrun":
            often = _OFTEN.get(name, "").split()
            near = nearest_known([flag], often, cutoff=0.88)[flag] if flag not in often else ""
            if instead := _instead(name, flag) or near:
                yield f"{name} has no option {shown(flag)}", f"use {instead}"
    if late := next(
        (word for word in words[end + 1 :] if name == "accelerate" and _OF_ACCELERATE.match(word)), ""
    ):
        yield f"{shown(late)} is an argument of {shown(words[end])}", "put it before the program"
