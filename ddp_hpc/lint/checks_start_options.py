"""Check of the arguments of launchers and of sbatch: options that they do not have, and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, takewhile

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, nearest_known, plain, shown
from ddp_hpc.lint.checks_sbatch import OF_PLUGINS
from ddp_hpc.lint.launch_commands import Start, starts
from ddp_hpc.lint.long_options import with_two_dashes
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.lint.placeholders import stands_for_value
from ddp_hpc.schedulers.script_options import ReadOption
from ddp_hpc.schedulers.slurm.check_option_values import expected_value
from ddp_hpc.schedulers.slurm.parse_directives import read_command
from ddp_hpc.schedulers.slurm.sbatch_options import CURRENT, SRUN_OPTIONS

_NUMBER_OF = re.compile(
    "(?:N|NUM|NUMBER)_?(?:OF_?)?(?:NODE|TASK|PROC|CORE|CPU|RANK|GPU|THREAD)S?"
)  # NUMTASKS
_HIDDEN = re.compile(r"[$`<{%]|@[A-Z]|!TBG_")
# Options whose values may be names in capital letters, such as GPU.
_NAMED = ("--partition", "--account", "--qos", "--constraint", "--reservation", "--job-name")
_GLUED = re.compile(r"--?\w[\w-]*=[^=\s]*\w--[a-z][\w-]*=.*")
# The same option of torchrun, accelerate, deepspeed, srun and mpirun; each line is one meaning.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")
_SAME = [
    ("--nproc-per-node", "--num-processes", "--num-gpus", "--ntasks-per-node", "-np"),
    ("--nnodes", "--num-machines", "--num-nodes", "--nodes", "-np"),
    ("--node-rank", "--machine-rank", "--node-rank", "-", "-"),
    ("--master-addr", "--main-process-ip", "--master-addr", "-", "-"),
    ("--master-port", "--main-process-port", "--master-port", "-", "-"),
    ("-", "-", "-", "--ntasks", "-np"),
    ("-", "-", "-", "--ntasks-per-node", "--ppn"),
    ("-", "-", "-", "--cpu-bind", "--bind-to"),
]
# All options of torchrun, and those of accelerate and deepspeed that people write most.
_KNOWN = {
    "torchrun": "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts "
    "monitor-interval start-method event-log-handler role module no-python run-path log-dir redirects tee "
    "local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters node-rank master-addr master-port "
    "local-addr logs-specs numa-binding signals-to-handle use-env virtual-local-rank shutdown-timeout help",
    "accelerate": "multi-gpu num-processes num-machines machine-rank main-process-ip main-process-port "
    "config-file mixed-precision use-deepspeed use-fsdp gpu-ids rdzv-backend",
    "deepspeed": "num-gpus num-nodes include exclude hostfile master-addr master-port",
    "mpirun": "",
}
_FLAGS = re.compile(r"--(?:standalone|no-python|use-(?:env|deepspeed|fsdp)|multi-gpu|same-network|cpu)")
_VALUED = re.compile(r"--?(?:np?|hosts?|hostfile|ppn|nproc[-_]per[-_]node|nnodes|num[-_](?:gpus|processes))")
_JOB_SCRIPT = re.compile(r"[\w./${}-]+\.(?:sh|pbs|qsub|job)")
_OF_SBATCH = re.compile(r"--(?:gres|gpus\S*|ntasks\S*|cpus-per-task|partition|mem|array|dependency|chdir)\b")


@check("RANK031", "error", "an argument that a launcher or sbatch does not understand")
def _arguments(subject: Subject) -> Iterator[Problem]:
    for start in starts(subject):
        command = start.command
        found = [*_of_launchers(start.inner), *(_of_slurm(command, subject.scheduler_version))]
        if glued := next((word for word in command.words if _GLUED.fullmatch(word)), ""):
            # The value may be a name that contains such words.
            severity: Severity | None = None if re.match(r"--?[\w-]+=\d+--", glued) else "note"
            yield Problem(
                command.line, f"a blank is missing in {shown(glued)}", "write it before --", severity
            )
        if command.name == "qsub" and subject.scheduler.name == "pbs":
            found += _of_qsub(command)
        for what, remedy, *severities in found:
            yield Problem(command.line, what, remedy, next(iter(severities), None))


def _of_qsub(command: Command) -> Iterator[tuple[str, str, Severity]]:
    """Yields an argument after the name of a script, which qsub of PBS does not take."""
    if "--" in command.argv:
        return  # PBS passes on what follows
    index = next((i for i, word in enumerate(command.argv) if _JOB_SCRIPT.fullmatch(word)), 0)
    following = command.argv[index + 1 : index + 2] if index and command.argv[index - 1][:1] != "-" else ()
    if following and following[0][:1] not in ("-", ":"):
        what = f"qsub of PBS does not pass the argument {shown(following[0])} to the script"
        yield what, "use qsub -v NAME=VALUE before the name of the script, and $NAME in it", "warning"


def _instead(name: str, flag: str) -> str:
    """Returns what a launcher has instead of an option of another launcher; empty if nothing is known."""
    index = _LAUNCHERS.index(name) if name in _LAUNCHERS else -1
    rows = [same for same in _SAME if flag in same and flag != same[index] != "-"]
    instead = rows[0][index] if rows and index >= 0 and all(flag != same[index] for same in _SAME) else ""
    return "" if instead == "--bind-to" else instead  # PALS has --cpu-bind


def _rejected_value(
    name: str, d: ReadOption, dashes: str, version: str
) -> Iterator[tuple[str, str] | tuple[str, str, Severity]]:
    """Yields the value of an option that srun or sbatch rejects."""
    if expected := expected_value(d.flag, d.value, version):
        what, remedy = f"{name} rejects {d.flag} {shown(d.value)}", dashes or f"write {expected}"
        remedy = "write -n instead of -np" if (d.flag, d.value) == ("--ntasks", "p") else remedy
        # A program may replace such a name.
        is_replaced = _NUMBER_OF.fullmatch(d.value) or (
            not dashes and d.flag != "--time" and stands_for_value(d.value)
        )
        yield (what, remedy, "note") if is_replaced else (what, remedy)


def _unknown_option(
    name: str, flag: str, dashes: str
) -> Iterator[tuple[str, str] | tuple[str, str, Severity]]:
    """Yields an option that srun or sbatch does not have."""
    what = f"{name} has no option {shown(flag)}"
    other, of_other = ("sbatch", CURRENT) if name == "srun" else ("srun", SRUN_OPTIONS)
    if not dashes and flag[2:] in of_other:
        yield what, f"give it to {other} instead"
        return
    near = nearest_known([flag[2:]], (*SRUN_OPTIONS, *CURRENT), cutoff=0.75)[flag[2:]]
    instead = _instead(name, flag.replace("_", "-")) or (near and f"--{near}")
    if dashes or instead:
        yield what, dashes or f"use {instead}; see {name} --help"
    else:
        what += ", unless a plugin of the site adds it"
        yield what, f"omit it, or use an option that {name} --help lists", "note"


def _of_slurm(command: Command, version: str) -> Iterator[tuple[str, str] | tuple[str, str, Severity]]:
    """Yields what srun or sbatch rejects, and what sbatch passes on to the script."""
    if command.name not in ("srun", "sbatch"):
        return
    name, of_srun = command.name, command.name == "srun"
    given, rest = read_command(command.argv[1:], of_srun=of_srun)
    # After a placeholder, nothing is known.
    given = list(takewhile(lambda d: d.flag in _NAMED or not re.fullmatch("[A-Z]{1,3}", d.value), given))
    for d in given:
        dashes = with_two_dashes(d)
        if not dashes and re.match("-[a-z]+-[a-z]", d.written):
            return  # probably an option of mpirun, such as -display-allocation
        if OF_PLUGINS.fullmatch(d.flag[2:]) or _HIDDEN.search(d.written) or (d.flag[1] != "-" and not dashes):
            return
        if d.fault == "unknown":
            yield from _unknown_option(name, d.flag, dashes)
            return
        if d.value.startswith("--") and "=" not in d.written and not d.fault:
            yield f"{name} takes {shown(d.value)} for the value of {shown(d.written)}", "write its value"
        elif d.fault in ("no value", "extra value"):
            has, remedy = (
                ("takes", "omit its value") if d.fault[0] == "e" else ("has", "write a value after it")
            )
            yield f"{shown(d.written)} of {name} {has} no value", remedy
        # srun does not read a dependency, and in a job only a step starts, which ignores it (22.05).
        elif not _HIDDEN.search(d.value) and not (of_srun and d.flag == "--dependency"):
            yield from _rejected_value(name, d, dashes, version)
    flags = {d.flag for d in given}
    if "--version" in flags and not of_srun and rest:
        yield "sbatch -V only prints its version", "remove it, or use --export=ALL"
    only_lists = any(d.flag == "--mpi" and d.value == "list" for d in given)
    is_open = only_lists or _HIDDEN.search(command.text) or flags & {"--help", "--version", "--usage"}
    if of_srun and given and not rest and not is_open:
        yield "srun starts no program, as the command ends here", "write the program on the same line"
    if of_srun or "--wrap" in flags or not rest or re.match(r"[:$`]", rest[0]):
        return
    late = next((word for word in rest[1:] if _OF_SBATCH.match(word)), "")
    if re.fullmatch(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun)", rest[0]):
        yield f"sbatch takes the file {shown(rest[0])} for the script", 'use --wrap="COMMAND"'
    elif ":" in rest:
        yield "sbatch takes one script, and what follows it for arguments", "name one script, at the end"
    elif late:
        what = f"{shown(late)} comes after {shown(rest[0])}, so it is its argument"
        # After options that only the script may have, it may be meant for the script, too.
        before = [word[2:].partition("=")[0] for word in rest[1 : rest.index(late)] if word[:2] == "--"]
        is_meant = any(name not in CURRENT for name in before)
        yield (what, "put it before the script", "note") if is_meant else (what, "put it before the script")


_WITH_VALUE = re.compile(r"--?\w.*=|--standalone$")


def _is_program(before: str, word: str) -> bool:
    is_module = before in ("-m", "--module") and not word.startswith("torch.distributed.")
    return is_module or word.endswith(".py")


def _of_launchers(start: Start) -> Iterator[tuple[str, str]]:
    """Yields options of other launchers, unknown ones, and values of options that have none."""
    words = start.words
    # A container has options of its own before those of torchrun.
    name = "torchrun" if start.is_torchrun and start.program == "python" else start.program
    # What follows the program, or its module, is for the program.
    end = next((i for i in range(1, len(words)) if _is_program(words[i - 1], words[i])), len(words))
    own = of_program = words[1:end]
    if start.command.name in ("mpirun", "mpiexec"):
        name, own = "mpirun" if start.is_launched else "", start.command.own_words
    known = _KNOWN.get(name, "").split()
    is_whole = name == "torchrun" and end < len(words) and not start.hides_options
    if start.program == "torchrun" and len(words) > 1 and all(map(_WITH_VALUE.match, words[1:])):
        yield "torchrun starts no program, as the command ends here", "write the program on the same line"
    for word, following in pairwise((*own, "")) if name in _KNOWN else ():
        flag, equals, value = word.replace("_", "-").partition("=")
        long = flag.lstrip("-")
        is_known = flag[1:2] == "-" and any(one == long or one.startswith(long) * is_whole for one in known)
        has_value = "<(" in start.command.text  # which is no word
        if (
            _VALUED.fullmatch(word)
            and not has_value
            and (following[:1] == "-" or (not following and own is of_program))
        ):
            taken = following or (words[end] if end < len(words) else "nothing")
            yield f"{name} takes {shown(taken)} for the value of {word}", "write its value"
        elif _FLAGS.fullmatch(flag) and name != "mpirun":
            if re.fullmatch(r"(?i:true|false|yes|no|\d+)", value if equals else following):
                given = value or following
                remedy = "the option" if re.fullmatch("(?i:false|no|0)", given) else plain(given)
                yield f"{plain(flag)} of {name} takes no value", f"omit {remedy}"
        elif not is_known and (flag.startswith("--") or (is_whole and flag[:1] == "-" and len(flag) > 2)):
            near = nearest_known([long], known, cutoff=0.88)[long]
            instead = _instead(name, flag) or (near and f"--{near}")
            if instead or is_whole:
                yield (
                    f"{name} has no option {shown(word.partition('=')[0])}",
                    f"use {instead}" if instead else f"write it after the program, or see {name} --help",
                )
