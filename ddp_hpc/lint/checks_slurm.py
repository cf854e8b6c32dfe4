"""Checks of Slurm scripts: options, signals, GPUs and options that srun does not inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.checks_registry import Problem, Subject, check, nearest_known, plain, shown
from ddp_hpc.lint.parse_script import Command
from ddp_hpc.schedulers.base import whole_number

# Options in sbatch.1 of Slurm 22.05 and later versions.
_OPTIONS: list[str] = re.findall(
    r"\S+",
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment "
    "constraint consolidate-segments container container-id contiguous core-spec "
    "cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency "
    "distribution error exclude exclusive export export-file extra extra-node-info get-user-env "
    "gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags "
    "help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user "
    "mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue "
    "nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node "
    "ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe parsable "
    "partition power prefer priority profile propagate qos quiet reboot requeue reservation "
    "resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only "
    "thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid usage "
    "use-min-nodes verbose version wait wait-all-nodes wckey wrap ",
)
# Options that plugins add to sbatch: Shifter, pyxis, and the uenv and container engine of CSCS.
_OF_PLUGINS = re.compile(
    r"image|module|volume|entrypoint|environment|uenv|view|repo|container-.*|setattr|licence"
)
_HIDES_PEERS = re.compile(r"(?:verbose,)?(?:closest|single|per_task|map_gpu|mask_gpu|map|mask)\b.*")


@check("SLURM001", "error", "no shebang")
def _no_shebang(subject: Subject) -> Iterator[Problem]:
    if not subject.script.lines[0].startswith("#!"):
        yield Problem(1, "the script has no shebang, so sbatch rejects it", "start it with #!/bin/bash")


def _known(name: str) -> bool:
    # getopt accepts any unambiguous prefix of a long option.
    return any(option.startswith(name) for option in _OPTIONS) or bool(_OF_PLUGINS.fullmatch(name))


def _unknown(subject: Subject) -> dict[str, str]:
    """Map each of the script's flags that sbatch does not have to the most similar option, or to ""."""
    flags = dict.fromkeys(d.flag for d in subject.script.read() if d.flag)
    names = {flag: flag[2:82].replace("_", "-") for flag in flags if not _known(flag[2:])}
    nearest = nearest_known(names.values(), _OPTIONS, cutoff=0.75)
    return {flag: nearest[name] for flag, name in names.items() if name in nearest}


@check("SLURM002", "error", "a misspelled option")
def _misspelt_option(subject: Subject) -> Iterator[Problem]:
    nearest = _unknown(subject)
    for d in subject.script.read():
        if near := nearest.get(d.flag):
            yield Problem(d.line, f"{shown(d.flag)} is not an sbatch option", f"did you mean --{near}?")


@check("SLURM003", "warning", "an option that sbatch does not have")
def _unknown_option(subject: Subject) -> Iterator[Problem]:
    nearest = _unknown(subject)
    for d in subject.script.read():
        if nearest.get(d.flag) == "":
            yield Problem(
                d.line,
                f"{shown(d.flag)} is not an sbatch option, unless a plugin of the site adds it",
                "remove it, or see sbatch --help on the login node",
            )


@check("SLURM004", "error", "--gpus-per-node together with --gres=gpu")
def _two_ways_to_gpus(subject: Subject) -> Iterator[Problem]:
    gres = subject.script.value("--gres") or ""
    if subject.script.value("--gpus-per-node") is not None and re.search(r"\bgpu\b", gres):
        yield Problem(
            subject.line_of("--gres"),
            "--gres=gpu and --gpus-per-node are mutually exclusive according to Slurm's manual",
            "keep the one that the site documents",
        )


@check("SLURM005", "warning", "--gpus-per-task hides the other GPUs")
def _gpus_per_task(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if _one_device_by_design(subject) or re.search(
        r"allow-task-sharing|gpu-bind[= ]none|gres/gpu:none", script.text
    ):
        return
    found = [d.line for d in script.read() if d.flag == "--gpus-per-task" and _many_tasks(subject)]
    found += [c.line for c in _srun(subject) if c.option("--gpus-per-task") is not None]
    for line in found:
        yield Problem(
            line,
            "--gpus-per-task binds each task to its own GPU: NCCL cannot access the other GPUs' memory, and "
            "cuda:LOCAL_RANK does not exist",
            "use --gpus-per-node, or add --gpu-bind=none to srun",
        )


@check("SLURM006", "warning", "--gpu-bind hides the other GPUs")
def _gpu_bind(subject: Subject) -> Iterator[Problem]:
    if _one_device_by_design(subject):
        return
    found = [(d.line, d.value) for d in subject.script.read() if d.flag == "--gpu-bind"]
    found += [(c.line, c.option("--gpu-bind") or "") for c in _srun(subject)]
    for line, value in found:
        if _HIDES_PEERS.fullmatch(value):
            yield Problem(
                line,
                f"--gpu-bind={plain(value)} shows each task only its own GPU, so NCCL cannot access the "
                "others directly",
                "omit it, or use --gpu-bind=none",
            )


def _one_device_by_design(subject: Subject) -> bool:
    """Return whether the profile states that each rank sees a single device at this site."""
    return subject.site is not None and subject.site.launch.one_device_a_rank


def _many_tasks(subject: Subject) -> bool:
    tasks = (subject.ranks_per_node, whole_number(subject.script.value("--ntasks")))
    return any(count is not None and count > 1 for count in tasks)


def _srun(subject: Subject) -> list[Command]:
    return [command for command in subject.script.launches() if command.name == "srun"]


@check("SLURM007", "warning", "srun does not inherit --cpus-per-task from sbatch")
def _cpus_not_inherited(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    asked = script.value("--cpus-per-task")
    if asked is None or asked == "1" or script.sets("SRUN_CPUS_PER_TASK"):
        return
    for command in _srun(subject):
        if command.launched and command.option("-c", "--cpus-per-task", "--cpu-bind") is None:
            yield Problem(
                command.line,
                f"--cpus-per-task={plain(asked)} is given to sbatch, but since Slurm 22.05 srun does not "
                "inherit it, so each rank gets one core",
                "use srun --cpus-per-task=$SLURM_CPUS_PER_TASK, or export SRUN_CPUS_PER_TASK",
            )


@check("SLURM008", "warning", "--signal goes to the job steps, but the trap is in the batch shell")
def _signal_for_steps(subject: Subject) -> Iterator[Problem]:
    signal = subject.script.value("--signal")
    if signal is None or "B:" in signal:
        return
    name = signal.partition("@")[0].removeprefix("R:").removeprefix("SIG")
    for command in subject.script.commands:
        trapped = [word.upper().removeprefix("SIG") for word in command.words[2:]]
        if command.name == "trap" and name.upper() in trapped:
            yield Problem(
                subject.line_of("--signal"),
                f"--signal={plain(signal)} goes to the job steps, not to the trap of line {command.line}",
                f"use --signal=B:{plain(signal)}, start the launcher in the background and wait for it",
            )
            return


@check("SLURM009", "warning", "--signal=B: without a trap")
def _signal_without_trap(subject: Subject) -> Iterator[Problem]:
    signal = subject.script.value("--signal") or ""
    ends_in_program = any(c.words[:1] == ("exec",) for c in subject.script.commands)
    if "B:" in signal and not ends_in_program and not any(c.name == "trap" for c in subject.script.commands):
        yield Problem(
            subject.line_of("--signal"),
            f"--signal={plain(signal)} goes only to the batch shell, which has no trap and is killed",
            "remove B: to send the signal to the ranks, or set a trap",
        )


@check("SLURM010", "warning", "a requeued job overwrites its log")
def _requeue_truncates(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    asked = [d.line for d in script.read() if d.flag == "--requeue"]
    asked += [c.line for c in script.commands if c.argv[:2] == ("scontrol", "requeue")]
    if asked and script.value("--open-mode") != "append":
        yield Problem(asked[0], "a requeued job overwrites its log", "add #SBATCH --open-mode=append")


@check("SLURM011", "warning", "srun --ntasks-per-node without --ntasks")
def _per_node_is_ignored(subject: Subject) -> Iterator[Problem]:
    for command in _srun(subject):
        per_node = whole_number(command.option("--ntasks-per-node"))
        job = subject.ranks_per_node
        if per_node and job and per_node < job and command.option("-n", "--ntasks") is None:
            yield Problem(
                command.line,
                f"without --ntasks, srun ignores --ntasks-per-node={per_node} in a job with {job} tasks "
                "per node",
                "give srun --nodes, --ntasks and --ntasks-per-node together",
            )


@check("SLURM012", "warning", "several tasks, but no launcher")
def _python_without_srun(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if not _many_tasks(subject) or script.launches():
        return
    for command in script.commands:
        if re.fullmatch(r"python[0-9.]*", command.name) and re.search(r"train|ddp|torch", command.text):
            yield Problem(
                command.line,
                "the job has several tasks, but Python is started only once, in the batch shell, where it "
                "acts as rank 0 and waits for the others",
                "put srun in front of python",
            )
            return


@check("SLURM013", "warning", "--ntasks does not match nodes x tasks per node")
def _tasks_disagree(subject: Subject) -> Iterator[Problem]:
    tasks = whole_number(subject.script.value("--ntasks"))
    nodes, per_node = subject.num_nodes, subject.ranks_per_node
    if tasks and nodes and per_node and tasks != nodes * per_node:
        yield Problem(
            subject.line_of("--ntasks"),
            f"--ntasks={tasks} is not {nodes} nodes x {per_node} tasks per node, so Slurm treats "
            "--ntasks-per-node as a maximum",
            "omit --ntasks",
        )


@check("SLURM014", "note", "ranks keep waiting after one of them dies")
def _no_kill_on_bad_exit(subject: Subject) -> Iterator[Problem]:
    if not _many_tasks(subject):
        return
    for command in _srun(subject):
        bare = any(re.fullmatch(r"-[a-zA-Z]*K[01]?", word) for word in command.own_words)
        given = command.option("--kill-on-bad-exit") is not None or "--kill-on-bad-exit" in command.own_words
        starts = command.launched[0].rpartition("/")[2] if command.launched else ""
        if starts.startswith("python") and not (bare or given):
            yield Problem(
                command.line,
                "srun does not terminate the other ranks if one dies, so they wait until a timeout or "
                "the walltime",
                "use srun --kill-on-bad-exit=1",
            )
