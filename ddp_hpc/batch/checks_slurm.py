"""Checks of Slurm scripts: options, signals, GPUs and what srun does not inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from ddp_hpc.batch.checks_registry import Seen, Subject, check, plain, shown, whole
from ddp_hpc.batch.script import Command

# sbatch.1 of Slurm 22.05 and what came since.
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
# Options that plugins of sites add: Shifter, pyxis, CSCS's uenv and container engine.
_OF_PLUGINS = re.compile(
    r"image|module|volume|entrypoint|environment|uenv|view|repo|container-.*|setattr|licence"
)
_HIDES_PEERS = re.compile(r"(?:verbose,)?(?:closest|single|per_task|map_gpu|mask_gpu|map|mask)\b.*")


@check("SLURM001", "error", "no shebang")
def _no_shebang(subject: Subject) -> Iterator[Seen]:
    if not subject.script.lines[0].startswith("#!"):
        yield Seen(
            1, "the first line names no interpreter, and sbatch refuses the script", "begin with #!/bin/bash"
        )


def _known(name: str) -> bool:
    # getopt takes any beginning of an option that fits.
    return any(option.startswith(name) for option in _OPTIONS) or bool(_OF_PLUGINS.fullmatch(name))


@check("SLURM002", "error", "a misspelt option")
def _misspelt_option(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        if d.flag and not _known(d.flag[2:]):
            for near in get_close_matches(d.flag[2:82].replace("_", "-"), _OPTIONS, n=1, cutoff=0.75):
                yield Seen(d.line, f"{shown(d.flag)} is no option of sbatch", f"did you mean --{near}?")


@check("SLURM003", "warning", "an option that sbatch does not have")
def _unknown_option(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        name = d.flag[2:]
        near = get_close_matches(name[:80].replace("_", "-"), _OPTIONS, n=1, cutoff=0.75)
        if d.flag and not _known(name) and not near:
            yield Seen(
                d.line,
                f"{shown(d.flag)} is no option of sbatch, unless a plugin of the site brings it",
                "take it out, or see sbatch --help on the login node",
            )


@check("SLURM004", "error", "--gpus-per-node beside --gres=gpu")
def _two_ways_to_gpus(subject: Subject) -> Iterator[Seen]:
    gres = subject.script.value("--gres") or ""
    if subject.script.value("--gpus-per-node") is not None and re.search(r"\bgpu\b", gres):
        yield Seen(
            subject.line_of("--gres"),
            "--gres=gpu stands beside --gpus-per-node; Slurm's manual calls them mutually exclusive",
            "keep the one that the site documents",
        )


@check("SLURM005", "warning", "--gpus-per-task hides the other GPUs")
def _gpus_per_task(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    if _one_device_by_design(subject) or re.search(
        r"allow-task-sharing|gpu-bind[= ]none|gres/gpu:none", script.text
    ):
        return
    found = [d.line for d in script.read() if d.flag == "--gpus-per-task"] if _many_tasks(subject) else []
    found += [c.line for c in _srun(subject) if c.option("--gpus-per-task") is not None]
    for line in found:
        yield Seen(
            line,
            "--gpus-per-task binds each task to its own GPU: NCCL cannot reach the neighbours' memory, and "
            "cuda:LOCAL_RANK does not exist",
            "ask with --gpus-per-node, or add --gpu-bind=none to srun",
        )


@check("SLURM006", "warning", "--gpu-bind hides the other GPUs")
def _gpu_bind(subject: Subject) -> Iterator[Seen]:
    if _one_device_by_design(subject):
        return
    found = [(d.line, d.value) for d in subject.script.read() if d.flag == "--gpu-bind"]
    found += [(c.line, c.option("--gpu-bind") or "") for c in _srun(subject)]
    for line, value in found:
        if _HIDES_PEERS.fullmatch(value):
            yield Seen(
                line,
                f"--gpu-bind={plain(value)} leaves each task only its own GPU, and NCCL no direct "
                "way to the others",
                "leave it out, or use --gpu-bind=none",
            )


def _one_device_by_design(subject: Subject) -> bool:
    """Where the site shows each rank a single device, its profile has said how the ranks cope."""
    return subject.site is not None and subject.site.launch.one_device_a_rank


def _many_tasks(subject: Subject) -> bool:
    tasks = (subject.ranks_per_node, whole(subject.script.value("--ntasks")))
    return any(count is not None and count > 1 for count in tasks)


def _srun(subject: Subject) -> list[Command]:
    return [command for command in subject.script.launches() if command.name == "srun"]


@check("SLURM007", "warning", "srun does not take --cpus-per-task from sbatch")
def _cpus_not_inherited(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    asked = script.value("--cpus-per-task")
    if asked is None or asked == "1" or script.sets("SRUN_CPUS_PER_TASK"):
        return
    for command in _srun(subject):
        if command.launched and command.option("-c", "--cpus-per-task", "--cpu-bind") is None:
            yield Seen(
                command.line,
                f"--cpus-per-task={plain(asked)} is asked of sbatch; srun from 22.05 on does not "
                "inherit it, and each rank gets one core",
                "srun --cpus-per-task=$SLURM_CPUS_PER_TASK, or export SRUN_CPUS_PER_TASK",
            )


@check("SLURM008", "warning", "--signal reaches the steps, the trap is in the shell")
def _signal_for_steps(subject: Subject) -> Iterator[Seen]:
    signal = subject.script.value("--signal")
    if signal is None or "B:" in signal:
        return
    name = signal.partition("@")[0].removeprefix("R:").removeprefix("SIG")
    for command in subject.script.commands:
        if command.name == "trap" and name.upper() in [
            w.upper().removeprefix("SIG") for w in command.words[2:]
        ]:
            yield Seen(
                subject.line_of("--signal"),
                f"--signal={plain(signal)} goes to the steps, not to the trap of line {command.line}",
                f"write --signal=B:{plain(signal)}, with the launcher in the background and wait",
            )
            return


@check("SLURM009", "warning", "--signal=B: without a trap")
def _signal_without_trap(subject: Subject) -> Iterator[Seen]:
    signal = subject.script.value("--signal") or ""
    ends_in_program = any(c.words[:1] == ("exec",) for c in subject.script.commands)
    if "B:" in signal and not ends_in_program and not any(c.name == "trap" for c in subject.script.commands):
        yield Seen(
            subject.line_of("--signal"),
            f"--signal={plain(signal)} goes to the batch shell alone, which has no trap and dies of it",
            "leave out B:, so that the ranks get it, or set a trap",
        )


@check("SLURM010", "warning", "requeue cuts the log")
def _requeue_truncates(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    asked = [d.line for d in script.read() if d.flag == "--requeue"]
    asked += [c.line for c in script.commands if c.argv[:2] == ("scontrol", "requeue")]
    if asked and script.value("--open-mode") != "append":
        yield Seen(
            asked[0],
            "a requeued job begins its log anew, and what was in it is lost",
            "#SBATCH --open-mode=append",
        )


@check("SLURM011", "warning", "srun --ntasks-per-node without --ntasks")
def _per_node_is_ignored(subject: Subject) -> Iterator[Seen]:
    for command in _srun(subject):
        per_node = whole(command.option("--ntasks-per-node"))
        job = subject.ranks_per_node
        if per_node and job and per_node < job and command.option("-n", "--ntasks") is None:
            yield Seen(
                command.line,
                f"srun ignores --ntasks-per-node={per_node} in a job of {job} tasks a node without --ntasks",
                "give srun --nodes, --ntasks and --ntasks-per-node together",
            )


@check("SLURM012", "warning", "several tasks, and no launcher starts them")
def _python_without_srun(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    if not _many_tasks(subject) or script.launches():
        return
    for command in script.commands:
        if re.fullmatch(r"python[0-9.]*", command.name) and re.search(r"train|ddp|torch", command.text):
            yield Seen(
                command.line,
                "the job has several tasks and Python is started once, in the batch shell, where it "
                "looks like rank 0 and waits for the others",
                "put srun in front of python",
            )
            return


@check("SLURM013", "warning", "--ntasks against nodes and tasks a node")
def _tasks_disagree(subject: Subject) -> Iterator[Seen]:
    tasks, nodes, per_node = (
        whole(subject.script.value("--ntasks")),
        subject.num_nodes,
        subject.ranks_per_node,
    )
    if tasks and nodes and per_node and tasks != nodes * per_node:
        yield Seen(
            subject.line_of("--ntasks"),
            f"--ntasks={tasks} is not {nodes} nodes x {per_node} tasks a node; Slurm then takes "
            "--ntasks-per-node for a maximum",
            "leave --ntasks out",
        )


@check("SLURM014", "note", "one dead rank leaves the others waiting")
def _no_kill_on_bad_exit(subject: Subject) -> Iterator[Seen]:
    if not _many_tasks(subject):
        return
    for command in _srun(subject):
        bare = any(re.fullmatch(r"-[a-zA-Z]*K[01]?", word) for word in command.own_words)
        given = command.option("--kill-on-bad-exit") is not None or "--kill-on-bad-exit" in command.own_words
        starts = command.launched[0].rpartition("/")[2] if command.launched else ""
        if starts.startswith("python") and not (bare or given):
            yield Seen(
                command.line,
                "srun does not end the other ranks when one dies; they wait until a timeout or the walltime",
                "srun --kill-on-bad-exit=1",
            )
