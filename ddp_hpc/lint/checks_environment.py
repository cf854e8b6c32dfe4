"""Checks of the names and values of environment variables that programs and libraries read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from ddp_hpc.lint.check_registry import Problem, Subject, check, is_one_edit, plain, table
from ddp_hpc.lint.launch_commands import requests_gpus
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.lint.placeholders import has_placeholder

# Variables of CUDA, ROCm, OpenMP, NCCL, PyTorch, Hugging Face, MPI and the shell that scripts set most.
_KNOWN = frozenset(
    re.findall(
        r"\w+",
        "CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS "
        "CUDA_HOME ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH "
        "PYTHONPATH PYTHONUNBUFFERED PYTHONNOUSERSITE OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES "
        "OMP_STACKSIZE MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS MASTER_ADDR MASTER_PORT "
        "WORLD_SIZE LOCAL_RANK NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_SOCKET_IFNAME NCCL_IB_DISABLE "
        "NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_P2P_LEVEL NCCL_NET_GDR_LEVEL "
        "NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT GLOO_SOCKET_IFNAME TORCH_DISTRIBUTED_DEBUG "
        "TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING PYTORCH_CUDA_ALLOC_CONF "
        "PYTORCH_ALLOC_CONF TORCH_HOME TORCH_CUDA_ARCH_LIST HF_HOME HF_DATASETS_CACHE HF_HUB_CACHE "
        "HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE "
        "TOKENIZERS_PARALLELISM WANDB_MODE WANDB_PROJECT WANDB_DIR WANDB_API_KEY XDG_CACHE_HOME "
        "TRITON_CACHE_DIR I_MPI_FABRICS I_MPI_PIN_DOMAIN I_MPI_PMI_LIBRARY UCX_NET_DEVICES UCX_TLS "
        "FI_PROVIDER MPICH_GPU_SUPPORT_ENABLED SRUN_CPUS_PER_TASK SLURM_CPU_BIND APPTAINER_CACHEDIR "
        "SINGULARITY_CACHEDIR SINGULARITY_BIND APPTAINER_BIND KMP_STACKSIZE",
    )
)
# Shorter names differ from others by one letter too often.
_MIN_LENGTH = 9
# Variables, values that their readers do not understand, what happens then, and what to write instead.
_VALUES = table(r"""
PYTORCH_(?:CUDA_)?ALLOC_CONF @ [a-z_]+=.* @ PyTorch rejects = in it @ write NAME:VALUE
NCCL_(?:IB|P2P|SHM|NVLS)_DISABLE|NCCL_BLOCKING_WAIT|CUDA_LAUNCH_BLOCKING @ (?i:true|yes|on)
    @ it is read as a number, which this is not @ write 1
GLOO_SOCKET_IFNAME @ [\^=].* @ Gloo takes a name, without ^ or = @ write the name of one, such as ib0
(?:NCCL|GLOO|TP)_SOCKET_IFNAME @ \d+\.\d+\.\d+\.\d+|"?(?:\$\(|`)\s*hostname\b(?!.*\bip\s).*
    @ it takes the name of an interface, not an address @ write a name that `ip addr` prints, such as ib0
(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES @ \d[\d,]*,|(?=.*\s)[\d,\s]+|\[.*\]|(?i:gpu|cuda:?)\d.*
    @ it is a list of numbers separated by commas only @ write only numbers and commas, such as 0,1
MASTER_PORT @ \d+[+-]\$\{?\w+\}?(?:%\d+)?|\$\{?\w+\}?[+*]\d+ @ bash does not compute it @ write $(( ))
MASTER_ADDR @ \$\(hostname\s+(?:-I|--all\S*)\) @ it may be several addresses @ use hostname -s
MASTER_ADDR @ \$\(scontrol show (?!host)(?!.*(?:Host|Addr|NodeList)).*
    @ this prints no names @ write $(scontrol show hostnames | head -n 1)
MASTER_PORT @ \d{2,3}|10[01]\d|102[0-3] @ only root can open this port @ use one above 1023
MASTER_ADDR @ [^:]*:\d+ @ it is a host, without a port @ move the port to MASTER_PORT
MASTER_ADDR @ \$\(scontrol.*\|\s*tail -(?:n ?)?1\) @ rank 0 has the first node @ use head -n 1
MASTER_ADDR @ \$\{?PBS_NODEFILE\}? @ it is the name of a file @ write $(head -n 1 $PBS_NODEFILE)
NCCL_DEBUG @ (?i)(?!(?:version|warn|info|abort|trace|none|error|off|0|false|quiet|no)$)\w+
    @ NCCL has no such level @ write WARN or INFO @ note
NCCL_DEBUG @ (?i:error|off|0|false|quiet|no) @ NCCL has no such level, and prints nothing @ omit it @ note
TORCH_DISTRIBUTED_DEBUG @ (?i)(?!(?:off|info|detail)$)\w+ @ PyTorch rejects it @ write DETAIL @ note
CUDA_DEVICE_ORDER @ (?!(?:PCI_BUS_ID|FASTEST_FIRST)$)\w+ @ CUDA has no such order @ write PCI_BUS_ID @ note
WANDB_MODE @ (?!(?:online|offline|disabled|dryrun|run|shared)$)\w+ @ wandb rejects it @ write offline @ note
NCCL_P2P_DISABLE|CUDA_LAUNCH_BLOCKING @ 1
    @ this helps to find errors, and slows the job down @ omit it, if the job works without it @ note
MASTER_PORT @ \$\(\(\s*\d+\s*\+\s*\$?\{?SLURM_JOB_?ID\}?\s*\)\)
    @ a job ID can be larger than a port @ add a remainder of it, such as SLURM_JOB_ID % 20000 @ note
(?:OMP|MKL|OPENBLAS|GOTO|BLIS|NUMEXPR|NUMBA|RAYON)_NUM_THREADS @ auto|max|all|\d+,|-\d+
    @ it takes a number @ write the number of threads
""")
# SLURM_JOB_GPUS has the numbers of the node; with cgroups, the job sees its GPUs from 0.
_OF_NODE = re.compile(r"\"?\$\{?SLURM_(?:JOB|STEP)_GPUS\}?\"?")
_OF_TASK = re.compile(r".*(?:LOCALID|LOCAL_RANK).*")
# A copy of another search path, and a program, which would have no effect under the right name either.
_COPY_OF_PATH = re.compile(r"\$\{?\w*PATH\}?|.*(?:/bin/|which |command -v )python[\d.]*\)?")
_SECRET = re.compile("API_?KEY|SECRET|PASSWORD|PASSWD|(?:API|AUTH|ACCESS|HF|GITHUB)_TOKEN")
_LOGIN = re.compile(
    r"\b(wandb login|(?:huggingface-cli|hf auth) login --token)[= ]+(?:--relogin )?(?=\w*\d|hf_)\w{20,}"
)
_KEY = re.compile(r"sk-(?:proj|ant)-\w{20}|hf_\w{30}|ghp_\w{30}")
# The names of files and variables, keys of local servers such as that of vLLM's pages, and masked keys.
_NO_SECRET = re.compile(
    r"\w+_(?:FILE|PATH|DIR|NAME|ENV|VAR|LEN)=.*|\w+=(?i:token-abc123|sk-?1234\d*|(?:dummy|test|local|fake)[-_].*)"
    r"|.*(?:([Xx*0.])\1{5}|\*\*\*).*"
)
_LOOKS_SECRET = re.compile(r"(?=.*\d)[^$`/\s<>]{8,}")
# The prefixes of other libraries that are one letter from NCCL_.
_OF_OTHERS = ("CCL_", "RCCL_", "HCCL_", "XCCL_")
_UPPER_CASE = re.compile("[A-Z0-9_]+")


# A comment, but no disabled directive or command.
_EXPLANATION = re.compile(r"[ \t]*#+[ \t'\"-]*(?!SBATCH|PBS|export|[A-Z_0-9]+=)\w")


@check("JOB035", "warning", "an environment variable with a name or a value that nothing reads")
def _not_read(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    reported: set[str] = set()
    for line, name, value in script.assignments:
        is_new = not (name in _KNOWN or name in reported or _COPY_OF_PATH.fullmatch(value))
        if is_new and (near := _meant(script, name)):
            reported.add(name)
            what, is_of_other = f"nothing reads the variable {plain(name)}", name.startswith(_OF_OTHERS)
            # Libraries of linear algebra take the number of threads of OpenMP instead.
            has_threads = near.endswith("_NUM_THREADS") and script.last_assigned("OMP_NUM_THREADS")
            remedy = f"write {near}, or remove the assignment"
            if near == "CUDA_VISIBLE_DEVICES" and requests_gpus(subject):
                remedy = f"remove it, as a job that requests GPUs has its own {near}"
            # Another script may read several sizes, or a second port.
            is_further = re.fullmatch(near + r"(?:\d|(?<!S)S)", name)
            is_note = is_of_other or has_threads or is_further or _is_set(script, near)
            yield Problem(line, what, remedy, "note" if is_note else None)
        for names, values, what, remedy, *severity in _VALUES:
            if (
                re.fullmatch(names, name)
                and re.fullmatch(values, value)
                and not _is_intended(subject, name, value, line)
            ):
                yield Problem(line, f"{name}={plain(value)}: {what}", remedy, "note" if severity else None)
        if name == "CUDA_VISIBLE_DEVICES" and _OF_NODE.fullmatch(value):
            what = f"{plain(value)} has the numbers of the node, but most jobs see their GPUs from 0"
            yield Problem(line, what, "remove the assignment, as Slurm sets the variable", "note")
    yield from _twice_restricted(script)


def _is_set(script: Script, name: str) -> bool:
    """Returns whether the script, or another one that it writes, sets a variable."""
    return re.search(rf"(?m)^(?!\s*#).*\b{name}=", script.text) is not None


def _is_used_otherwise(subject: Subject, name: str, value: str) -> bool:
    """Returns whether the script itself reads a value that programs would not understand."""
    text = subject.script.text
    if name == "MASTER_ADDR" and re.search(r":\d+$", value):
        return bool(re.search(r"(?:endpoint|init[-_]addr)[= ]*[\"']?\$\{?MASTER_ADDR\b(?!\}?:)", text))
    if name == "MASTER_ADDR" and "| tail" in value:  # with c10d, any node may have the store
        return subject.num_nodes == 1 or bool("c10d" in text and re.search(r"endpoint.*MASTER_ADDR", text))
    read = rf"\(\(\s*{name}\b" if name == "MASTER_PORT" else rf"\bfor \w+ in \$\{{?{name}\b"
    return re.search(read, text) is not None


def _is_intended(subject: Subject, name: str, value: str, line: int) -> bool:
    """Returns whether a debugging variable costs nothing in this job, or a comment explains it, or the script
    reads the value.
    """
    if _is_used_otherwise(subject, name, value):
        return True
    if name not in ("NCCL_P2P_DISABLE", "CUDA_LAUNCH_BLOCKING"):
        return False
    before, own = subject.script.lines[max(0, line - 2)], subject.script.lines[line - 1]
    is_explained = _EXPLANATION.match(before) or re.search(r"\s#", own)
    place = " ".join(subject.script.value(flag) or "" for flag in ("--partition", "-q", "--constraint"))
    has_gpus = requests_gpus(subject) or re.search(r"(?i)gpu|[avh]\d00", place)  # such as a100
    has_one = name == "NCCL_P2P_DISABLE" and subject.gpus_per_node == 1
    return bool(is_explained or not has_gpus or has_one)


def _meant(script: Script, name: str) -> str:
    """Returns the known variable whose name is misspelled; empty if the script itself reads this one."""
    if len(name) < _MIN_LENGTH or not name.isupper() or name.startswith("_"):
        return ""
    near = _nearest(name)
    read = rf"\$\{{?!?{name}\b|(?:-v|printenv) {name}\b|(?:\(\(|\blet\b).*\b{name}\b(?!=)|[\"']{name}[\"']"
    return "" if near and re.search(read, script.text) else near


@lru_cache(maxsize=1000)
def _nearest(name: str) -> str:
    return next((known for known in sorted(_KNOWN) if is_one_edit(name, known)), "")


def _twice_restricted(script: Script) -> Iterator[Problem]:
    """Yields the second of two variables that both select the GPU of the task."""
    text = "\n".join(command.text for command in script.commands)
    found = dict(re.findall(r"\b(CUDA|HIP|ROCR)_VISIBLE_DEVICES=([^\s;'\"&]+)", text))
    others = [name for name in ("CUDA", "HIP") if found.get(name) == found.get("ROCR")]
    has_branches = re.search(r"(?ms)_VISIBLE_DEVICES=.*^(?:else|elif)\b.*_VISIBLE_DEVICES=", text)
    if others and not has_branches and _OF_TASK.fullmatch(found.get("ROCR", "")):
        line = next(c.line for c in script.commands if f"{others[0]}_VISIBLE_DEVICES" in c.text)
        what = f"ROCR_VISIBLE_DEVICES leaves only GPU 0, from which {others[0]}_VISIBLE_DEVICES selects"
        yield Problem(line, what, "set only ROCR_VISIBLE_DEVICES")


@check("JOB009", "warning", "a secret in the script")
def _secrets(subject: Subject) -> Iterator[Problem]:
    found = [
        (line, name)
        for line, name, value in subject.script.assignments
        if (_SECRET.search(name) and _UPPER_CASE.fullmatch(name)) or _KEY.match(value)
        if (_LOOKS_SECRET.fullmatch(value) or _KEY.match(value)) and not has_placeholder(value)
        if not _NO_SECRET.fullmatch(f"{name}={value}")
    ]
    found += [(c.line, match[1]) for c in subject.script.commands if (match := _LOGIN.search(c.text))]
    for line, name in found:
        key = f"the {'key' if ' ' in name else 'value'} of {plain(name)}"  # of wandb login, or of a variable
        what = f"the script contains {key}, which anyone who can read the script or its repository can use"
        variable = plain(name) if " " not in name else "WANDB_API_KEY" if "wandb" in name else "HF_TOKEN"
        remedy = "revoke it, and read a new one from a private file"
        remedy += f": export {variable}=$(cat ~/.secrets/FILE)"
        yield Problem(line, what, remedy)


@check("JOB030", "warning", "PATH without the directories of the system")
def _path_replaced(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    # Before a command, it is for this command only, and in parentheses for a subshell.
    of_command = {c.line for c in script.commands if c.argv and c.words[0].startswith("PATH=")}
    for line, name, written in script.assignments:
        if line in of_command or script.lines[line - 1].lstrip().startswith("("):
            continue
        # Such as OLD_PATH=$PATH.
        value = re.sub(r"\$\{?(\w+)\}?", lambda of: script.set_once.get(of[1], of[0]), written)
        before = (c.line < line and c.text.startswith("module load") for c in script.commands)
        is_known = name == "PATH" or (name == "LD_LIBRARY_PATH" and any(before))
        is_whole = is_known and "/" in written and "PATH+=" not in script.lines[line - 1]
        if is_whole and not re.search(rf"\$\{{?{name}\b|\$\(|`|(?:^|:)/bin\b|/usr/bin\b", value):
            of = "commands such as python and srun" if name == "PATH" else "libraries of modules"
            what = f"{name}={plain(written)} replaces the directories of {of}"
            yield Problem(line, what, f"write {name}=NEW:${name}", None if name == "PATH" else "note")
            return
