"""The commands of a script that start ranks, what their options say about the ranks, and their programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

from ddp_hpc.lint.check_registry import Subject, plain
from ddp_hpc.lint.parse_script import LAUNCH_COMMANDS, Command, Script
from ddp_hpc.lint.program_source import ProgramSource
from ddp_hpc.request.program import Program, program_of
from ddp_hpc.request.program_files import files_of, text_of
from ddp_hpc.schedulers.script_options import whole_number

_TORCHRUN_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch"))
# Launchers that start the ranks of all nodes.
STARTS_ALL_RANKS = ("deepspeed", "horovodrun", "mpirun", "mpiexec")
# Options of torchrun without a value.
_BARE = frozenset(
    ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--use-env", "--use_env")
)
_HIDDEN = re.compile(r"\$|`|\{\{|<")
# Words that show that a script starts distributed training with PyTorch.
_TORCH = re.compile(
    r"torchrun|torch[._]distributed|MASTER_ADDR|NCCL_|nccl|deepspeed|accelerate|(?<![a-z])ddp(?![a-z])|\bDDP\b|fsdp|FSDP|"
    r"--distributed\b|"
    r"init_process_group|--local[_-]rank|DistributedDataParallel|--dist[-_]url|WORLD_SIZE"
)
# `$( )` with at most two levels of parentheses in it.
_SUBSTITUTION = re.compile(r"\\?\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
_TRAINING = re.compile(r"(?:(?:pre|ddp|horovod|distributed)_?)?train\w*\.py")
# Frameworks that connect the ranks for the program.
_CONNECTS = re.compile(r"lightning|Trainer\b|TrainingArguments|horovod|mmengine|colossalai")
# Commands that may start processes on several nodes: launchers, and other ways to use the nodes of a job.
_SPREADS = re.compile(
    r"\b(?:srun|(?:mpirun|mpiexec)(?:_\w+)?|aprun|jsrun|ibrun|prun|orterun|charmrun|poe|foamJob|lamboot|mpdboot|"
    r"ccc_mprun|gerun|pdsh|pssh|clush|pbsdsh|blaunch|ssh|parallel|xargs|"
    r"launcher|paramrun|submitit|flux|ray|dask|horovodrun|spark-submit|nextflow|snakemake|julia|jupyter|scoop)\b|"
    r"(?<![a-z])(?:parsl|radical|balsam|fireworks|[rq]launch|libensemble|hyperqueue|executorlib|ipcluster|cylc|toil)(?![a-z])|"
    r"[Cc]luster\w*\.sh|-hostfile|SLURM_(?:JOB_)?NODELIST|PBS_NODEFILE|\bmpi\b"
)
# Words which suggest that a single process uses several GPUs or starts further processes itself.
ONE_PROCESS = re.compile(
    r"vllm|device[-_]map|tensor[-_]parallel|DataParallel|data_parallel|jax|tensorflow|keras|tf_cnn|mirrored|ray\b|llama"
    r"|ollama|sglang|spawn|--num[-_]?gpus?|--n[-_]?gpus?|--gpus?\b|--devices?\b|--ngpu|n_gpu|gpu_ids|multigpu|multi_gpu"
    r"|CUDA_VISIBLE_DEVICES|trainer\.|lightning|multiprocessing|--world[-_]size|nproc|mp\.|hydra|deepspeed|tune|sweep|agent",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """A command that starts a program, directly or with a launcher. `words` are the program's."""

    subject: Subject
    command: Command
    words: tuple[str, ...]

    @property
    def is_launched(self) -> bool:
        """Whether a launcher such as srun starts the program."""
        return bool(self.command.launched)

    @cached_property
    def program(self) -> str:
        """The program without its directory, and without a version: `python` for /usr/bin/python3.11."""
        name = self.words[0].rpartition("/")[2] if self.words else ""
        return re.sub(r"^python[0-9.]+$", "python", name)

    @cached_property
    def is_torchrun(self) -> bool:
        """Whether the program is torchrun."""
        return self.program in ("torchrun", "torchrun_jsc") or (
            "-m" in self.words[:6] and not _TORCHRUN_MODULES.isdisjoint(self.words[:7])
        )

    @cached_property
    def _options(self) -> tuple[str, ...]:
        """The options of torchrun, up to the script."""
        for index, word in enumerate(self.words[:80]):
            if index and (word.endswith(".py") or (word == "-m" and not self._is_module(index))):
                return self.words[1:index]
        return self.words[1:80]

    def _is_module(self, index: int) -> bool:
        return self.words[index + 1 : index + 2] != () and self.words[index + 1] in _TORCHRUN_MODULES

    @cached_property
    def hides_options(self) -> bool:
        """Whether options may be in a variable, or on a line after a backslash and a comment or a blank."""
        if re.search(r"\\[ \t]+(?:#.*)?$", self.command.text):
            return True
        takes_value = False
        for word in self._options:
            if _HIDDEN.match(word) and not takes_value:
                return True
            takes_value = word.startswith("-") and "=" not in word and word not in _BARE and not takes_value
        return False

    @cached_property
    def options(self) -> dict[str, str]:
        """The options with their values, spelled with -; those of a launcher end at its script."""
        is_launcher = self.is_torchrun or self.program in ("accelerate", *STARTS_ALL_RANKS)
        words = self._options if is_launcher else self.words[1:]
        options: dict[str, str] = {}
        for word, following in pairwise((*words, "")):
            flag, equals, value = word.partition("=")
            if word.startswith("-"):
                options.setdefault(flag.replace("_", "-"), value if equals else following)
        return options

    def given(self, name: str) -> str | None:
        """Returns the value of an option, also if it is in a variable; None if it is not given."""
        value = self.options.get(name)
        return None if value is None else self.subject.value_of(value)

    @cached_property
    def inner(self) -> Start:
        """The launcher of ranks that `bash -c` starts without a condition, or else the start itself."""
        flags = [i for i, word in enumerate(self.words[:4]) if re.fullmatch("-[a-z]*c", word)]
        code = self.words[flags[0] + 1 : flags[0] + 2] if flags and self.program in ("bash", "sh") else ()
        text = with_values(self.subject.script, *code) if code else ""
        for part in re.split(r"[;\n&|]+", _SUBSTITUTION.sub("`", text)):
            if re.match(r"\s*(?:if|case|test|\[|\(\()", part):
                break
            words = replace(self.command, words=tuple(part.split())).argv
            inner = Start(subject=self.subject, command=self.command, words=words)
            if inner.is_torchrun or inner.program in ("accelerate", *STARTS_ALL_RANKS):
                return inner
        return self

    def options_of(self, *programs: str) -> dict[str, str]:
        """Returns the options of one of these launchers; empty if another program is started."""
        return self.inner.options if self.inner.program in programs else {}

    @cached_property
    def launcher_hides_options(self) -> bool:
        """Whether options of the launcher may be in a variable, such as `srun $ARGS python`."""
        return self.command.name in LAUNCH_COMMANDS and hides_launcher_options(self.command)

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes on which the launcher starts the program."""
        if not self.is_launched or self.command.name != "srun":
            is_one = self.is_launched and self.command.option("-n", "-np", "--np") == "1"
            return 1 if is_one else self.subject.num_nodes
        return step_nodes(self.subject, self.command)

    @property
    def ranks_per_node(self) -> int | None:
        """The number of processes per node that the launcher starts; None if it is unknown."""
        return ranks_per_node(self.subject, self.command) if self.is_launched else 1

    @property
    def num_ranks(self) -> int | None:
        """The number of processes that the launcher starts; None if it is unknown."""
        if not self.is_launched:
            return 1
        given = self.command.option("-n", "--ntasks", "-np", "--np")
        if given is not None:
            return whole_number(self.subject.value_of(given))
        nodes, per_node = self.num_nodes, self.ranks_per_node
        if nodes == self.subject.num_nodes and per_node == self.subject.ranks_per_node:
            nodes, per_node = 1, whole_number(self.subject.value_of("$SLURM_NTASKS"))
        return nodes * per_node if nodes and per_node else None


def with_values(script: Script, text: str) -> str:
    """Returns a text with the values of variables that the script sets once, without continued lines."""

    def value(name: re.Match[str]) -> str:
        found = script.set_once.get(name[1] or name[2], "`")
        return name[0] if re.search(r"\$\(|`", found) else found

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text).replace("\\\n", " ")


def hides_launcher_options(command: Command) -> bool:
    """Returns whether a launcher's options may be in a variable, and so are unknown."""
    takes_value = False
    for word in command.own_words:
        if _HIDDEN.match(word) and not takes_value:
            return True
        takes_value = bool(re.fullmatch(r"-[A-Za-z]|--[\w-]+|-[a-z]{2,}", word)) and not takes_value
    return False


def step_nodes(subject: Subject, command: Command) -> int | None:
    """Returns the number of nodes of a job step."""
    given = command.option("-N", "--nodes")
    if given is not None:
        return whole_number(subject.value_of(given))
    if command.option("--het-group", "--pack-group") is not None:
        return None
    hosts = command.option("-w", "--nodelist")
    if hosts is not None:
        return 1 if "," not in hosts and "[" not in hosts else None
    if command.option("-n", "--ntasks") == "1":
        return 1
    return subject.num_nodes


def ranks_per_node(subject: Subject, command: Command) -> int | None:
    """Returns the number of ranks per node, from the launcher's options or else from the directives."""
    if hides_launcher_options(command) and command.option("-n", "--ntasks") != "1":
        return None
    own = command.option("--ntasks-per-node", "--tasks-per-node", "--ppn", "-ppn", "--npernode", "-npernode")
    if own is not None:
        return whole_number(subject.value_of(own))
    given, nodes = command.option("-n", "-np", "--np"), subject.num_nodes
    if command.name == "srun":
        given, nodes = command.option("-n", "--ntasks"), step_nodes(subject, command)
    if given is not None:
        tasks = whole_number(subject.value_of(given))
        return max(1, tasks // nodes) if tasks and nodes else (1 if tasks == 1 else None)
    if command.name in ("mpirun", "mpiexec") and not subject.ranks_per_node:
        return None
    return subject.ranks_per_node


def torchruns(subject: Subject) -> list[Start]:
    """Returns each command that starts torchrun."""
    return [start for start in starts(subject) if start.is_torchrun]


@lru_cache(maxsize=1)  # many checks read the starts of the same script
def starts(subject: Subject) -> tuple[Start, ...]:
    """Returns the commands of the script with the programs that they start."""
    commands = [_with_words(subject.script, command) for command in subject.script.commands]
    return tuple(
        Start(subject=subject, command=command, words=words)
        for command in commands
        if (words := command.launched or command.argv)
    )


def _with_words(script: Script, command: Command) -> Command:
    """Returns a launcher with the words of unquoted variables, such as `srun $OPTIONS python train.py`."""
    if command.name not in LAUNCH_COMMANDS:
        return command
    words: list[str] = []
    for word in command.words:
        is_variable = re.fullmatch(r"\$\{?\w+\}?", word) and f'"{word}"' not in command.text
        # The value of an array is not recorded.
        words += (with_values(script, word).split() if is_variable else []) or [word]
    return replace(command, words=tuple(words))


def is_alone(start: Start) -> bool:
    """Returns whether the program of a start is available, and does not connect ranks."""
    return any(one is start and source.is_alone for one, _, source in programs(start.subject))


@lru_cache(maxsize=8)
def source_of(_subject: Subject, program: Program, directory: Path) -> ProgramSource:
    """Returns the source code of a program that is started in `directory`.

    It is read once for all checks of one script, which may start the program many times.
    """
    return ProgramSource(files_of(program, directory))


@lru_cache(maxsize=1)  # the checks of one script
def programs(subject: Subject) -> list[tuple[Start, str, ProgramSource]]:
    """Returns the programs that the script starts, and their names, if all of their modules are available."""
    found: list[tuple[Start, str, ProgramSource]] = []
    directory = subject.directory
    for start in starts(subject) if directory else ():
        program = program_of(start.words) if ".py" in start.command.text else None
        if program is None or program.kind != "file" or directory is None:
            continue
        if text_of(directory / program.name) is None:
            continue
        source = source_of(subject, program, directory)
        # Packages that can be imported after a change of PYTHONPATH.
        packages = {path.stem for place in (directory, directory / "src") for path in place.glob("*")}
        if packages.isdisjoint(source.files.packages_elsewhere):
            found.append((start, plain(program.name), source))
    return found


def has_whole_nodes(subject: Subject) -> bool:
    """Returns whether no other job shares the nodes, because the job requests them or all GPUs."""
    script = subject.script
    is_exclusive = any("excl" in value for _, name, value in script.resources() if name == "place")
    # --mem=0 requests all memory of the node.
    if is_exclusive or script.value("--exclusive") is not None or script.value("--mem") == "0":
        return True
    gpus = subject.gpus_per_node or _gpus_of_tasks(subject)
    if (site := subject.site) and site.node.devices:
        is_pbs = subject.scheduler.reader.requests_by_resources
        asks_for_gpus = "gpu" in " ".join(site.pbs.resources) if is_pbs else site.slurm.gpu_option
        return gpus >= site.node.devices or not (asks_for_gpus or requests_gpus(subject))
    # Without a profile: most nodes have four or eight GPUs, and jobs with several nodes use all of them.
    num_nodes = subject.num_nodes or 1
    if gpus >= 8 or (gpus >= 4 and num_nodes > 1):
        return True
    # Sites where a job need not request GPUs or cores assign whole nodes.
    chunks = [value for _, name, value in script.resources() if name == "select"]
    is_bare_chunk = bool(chunks) and not re.search(r"n?cpus|gpu|vnode", chunks[-1])
    return is_bare_chunk or (num_nodes > 1 and not requests_gpus(subject))


def _gpus_of_tasks(subject: Subject) -> int:
    """Returns the GPUs per node that are requested for the job, or for its tasks; 0 if they are unknown."""
    script = subject.script
    of_task = whole_number((script.value("--gpus-per-task") or "").rpartition(":")[2])
    if of_task and subject.ranks_per_node:
        return of_task * subject.ranks_per_node
    totals = [whole_number(value) for _, name, value in script.resources() if name == "ngpus"]
    return (subject.total_gpus or next((number for number in totals if number), 0)) // (
        subject.num_nodes or 1
    )


def requests_gpus(subject: Subject) -> bool:
    """Returns whether any directive requests GPUs."""
    script = subject.script
    return (subject.gpus_per_node or 0) > 0 or any(
        re.search("gpu|gres", d.flag) or (d.flag == "-l" and "gpu" in d.value)
        for d in script.read()
        if not re.search(r"(?:^|:|=)0$", d.value)
    )


def names_torch(subject: Subject) -> bool:
    """Returns whether any command names distributed training with PyTorch, or a variable of it."""
    return any(_TORCH.search(command.text) for command in subject.script.commands)


@lru_cache(maxsize=1)  # several checks of one script
def trains_with_torch(subject: Subject) -> bool:
    """Returns whether the script starts distributed training with PyTorch, as far as its commands show it."""
    # If each GPU has its own task and the tasks run a training script, each task is a rank.
    is_rank_per_gpu = (subject.gpus_per_node or 0) > 1 and (subject.ranks_per_node or 0) > 1
    return names_torch(subject) or (is_rank_per_gpu and any(map(runs_training, starts(subject))))


def runs_training(start: Start) -> bool:
    """Returns whether a program connects ranks; if it is not available, whether its name says so."""
    program = program_of(start.words)
    if program is None or program.kind != "file":
        return False
    known = [bool(_TORCH.search(text) or _CONNECTS.search(text)) for text in _texts(start)]
    return any(known) if known else bool(_TRAINING.fullmatch(program.name.rpartition("/")[2]))


def takes_rank_of_slurm(start: Start) -> bool:
    """Returns whether a program that is available takes its rank from SLURM_PROCID, and not from torchrun."""
    texts = _texts(start)
    of_torchrun = any(re.search(r"[\"'](?:LOCAL_)?RANK[\"']|env://", text) for text in texts)
    return any("SLURM_PROCID" in text for text in texts) and not of_torchrun


def _texts(start: Start) -> list[str]:
    """Returns the texts of the files of a program, as far as they are available."""
    program, directory = program_of(start.words), start.subject.directory
    if program is None or program.kind != "file" or directory is None:
        return []
    names = files_of(program, directory).names
    return [(text_of(directory / name) or b"").decode("utf-8", "replace") for name in names]


def reaches_other_nodes(subject: Subject) -> bool:
    """Returns whether any command of the script may start processes on other nodes."""
    commands = subject.script.commands
    texts = [c.text for c in commands] + [value for _, _, value in subject.script.assignments]
    # The first node alone is only the address of the ranks.
    others = (text for text in texts if not re.search(r"head -n?\s?1\b", text))
    return any(c.name in LAUNCH_COMMANDS for c in commands) or any(map(_SPREADS.search, others))


_PIECE = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|(?:(?<=\s)|^)#[^\n]*|[^'\"\\#]+|.", re.DOTALL)


def expanded_in_shell(text: str) -> str:
    """Returns the parts of a command in which the shell of the script expands variables."""
    pieces = (piece for piece in _PIECE.findall(text) if piece[0] not in "'#")
    # An escaped character ends the name of a variable, except a line break, which continues it.
    return "".join(re.sub(r"\\[^\n]", ".", piece).replace("\\\n", "") for piece in pieces)


def single_quoted(text: str) -> str:
    """Returns the parts of a command in which the shell of the script does not expand variables."""
    return " ".join(
        piece[1:-1]
        if piece[0] == "'"
        else re.sub(r"\\(.)|\$", lambda escaped: escaped[1] or "", piece, flags=re.DOTALL)
        for piece in _PIECE.findall(text)
        if piece[0] in "'\""
    )
