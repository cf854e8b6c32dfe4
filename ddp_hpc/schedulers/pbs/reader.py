"""How PBS reads the directives of a script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from ddp_hpc.schedulers.reader import ScriptReader
from ddp_hpc.schedulers.script_options import ScriptOptions, whole_number
from ddp_hpc.sites.site import Site

# Options without a value, of OpenPBS's qsub (qsub.1B) and of Torque's (src/cmds/qsub_functions.c).
_BARE = frozenset("VXIhfznEx")


class PbsReader(ScriptReader):
    """Reads directives of PBS."""

    requests_by_resources = True
    log_flags = ("-o", "-e")
    array_directive = re.compile(rb"^#PBS[ \t]+-J.*\n", re.MULTILINE)
    queue_flag = "-q"
    walltime_directive = "#PBS -l walltime=HH:MM:SS"
    # The formats that decode_time in OpenPBS's attr_fn_time.c accepts, and DD:HH:MM:SS of Torque.
    walltime_pattern = re.compile(r"(?:\d{1,9}:){0,2}\d{1,9}(?:\.\d*)?|\d{1,9}(?::\d{1,9}){3}")
    expands_log_variables = True
    starts_login_shell = True
    reads_indented = True
    # No blank is needed: pbs_ispbsdir in OpenPBS's check_job_script.c.
    directive_pattern = re.compile(r"#PBS(?:[ \t]+|(?=-)|$)(.*)", re.DOTALL)
    submit_directory = "PBS_O_WORKDIR"
    port_of_job = "$((20000 + ${PBS_JOBID%%[!0-9]*} % 10000))"
    submit_with_variable = "qsub -v NAME=VALUE"
    bare_memory_unit = "bytes"
    foreign_log_pattern = re.compile(r"%[jJAaxN](?![A-Za-z_]+%)")
    # qsub.1B and pbs_python(8) of OpenPBS, with the common ones of Torque.
    variables = frozenset(
        f"PBS_{name}"
        for name in re.findall(
            r"\w+",
            "ARRAYID ARRAY_ID ARRAY_INDEX ENVIRONMENT JOBCOOKIE JOBDIR JOBID JOBNAME MOMPORT NODEFILE "
            "NODENUM NCPUS O_HOME O_HOST O_LANG O_LOGNAME O_MAIL O_PATH O_QUEUE O_SERVER O_SHELL O_SYSTEM "
            "O_TZ O_WORKDIR QUEUE TASKNUM TMPDIR GPUFILE NP NUM_NODES NUM_PPN SERVER VERSION VNODENUM "
            "WALLTIME JOBFS SELECT NGPUS PROJECT ",
        )
    )
    own_commands = ("pbsdsh",)
    variables_elsewhere: ClassVar[Mapping[str, tuple[str, str]]] = {
        "PBS_ARRAYID": ("-J", "PBS_ARRAY_INDEX"),
        "PBS_ARRAY_INDEX": ("-t", "PBS_ARRAYID, or -J for an array of OpenPBS"),
        "PBS_NP": ("select", "$(wc -l < $PBS_NODEFILE)"),
        "PBS_NUM_PPN": ("select", "NCPUS"),
        "PBS_NUM_NODES": ("select", "$(sort -u $PBS_NODEFILE | wc -l)"),
    }

    def version_of(self, site: Site) -> str:
        return site.pbs.version

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        index = 0
        while index < len(words):
            word, index = words[index], index + 1
            if word.startswith("#"):
                return  # the rest is a comment, which another check of lint reports
            if not word.startswith("-"):
                yield "", word
                continue
            flag, value = (word, "") if word.startswith("--") else (word[:2], word[2:])
            if not value and word[1:2] not in _BARE and index < len(words):
                value, index = words[index], index + 1
            yield flag, value

    def num_nodes(self, script: ScriptOptions) -> int | None:
        chunk = _only_chunk(script)
        return chunk[0] if chunk else None

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        return _in_chunk(script, "mpiprocs")

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        return _in_chunk(script, "ngpus")

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        select = last_resource(script, "select")
        match = re.search(r":ncpus=(\d{1,6})\b", select[1]) if select else None
        ranks = self.ranks_per_node(script)
        return max(1, int(match[1]) // ranks) if match and ranks else None

    def memory(self, script: ScriptOptions) -> Iterator[tuple[int, str, str]]:
        for option, name, value in script.resources():
            parts = [part.partition("=")[::2] for part in value.split(":")] if name == "select" else []
            for resource, amount in [*parts, (name, value)]:
                if resource in ("mem", "pmem", "vmem", "pvmem"):
                    yield option.line, resource, amount

    def walltime(self, script: ScriptOptions) -> tuple[int, str] | None:
        return last_resource(script, "walltime")

    def names_account(self, script: ScriptOptions) -> bool:
        return super().names_account(script) or any(
            option.flag == "-W" and "group_list=" in option.value for option in script.read()
        )


ROLE = PbsReader


def last_resource(script: ScriptOptions, name: str) -> tuple[int, str] | None:
    """Returns the line number and the value of the last `-l NAME=VALUE`; None if there is none."""
    values = [
        (directive.line, value) for directive, resource, value in script.resources() if resource == name
    ]
    return values[-1] if values else None


def _only_chunk(script: ScriptOptions) -> tuple[int, dict[str, str]] | None:
    """Returns the number of chunks in `select` or `nodes` and the resources of each; None if they differ."""
    select = last_resource(script, "select")
    chosen = select or last_resource(script, "nodes")
    if chosen is None or "+" in chosen[1]:
        return None
    count, *parts = chosen[1].split(":")
    if not count.isdecimal():
        if not select:
            return None  # a host or a property of one
        count, parts = "1", [count, *parts]
    resources = dict(part.partition("=")[::2] for part in parts)
    if "gpus" in resources:  # as in -l nodes=2:ppn=4:gpus=4
        resources.setdefault("ngpus", resources["gpus"])
    return int(count[:9]), resources


def _in_chunk(script: ScriptOptions, name: str) -> int | None:
    chunk = _only_chunk(script)
    return whole_number(chunk[1].get(name)) if chunk else None
