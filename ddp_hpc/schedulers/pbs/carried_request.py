"""What the user requested for this PBS job with options of qsub, as options and variables for its successor.

Everything comes from the attributes that `qstat -f` prints. Submit_arguments is not sufficient: it contains
the words of the command line without their quotes, and qalter and hooks change attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ddp_hpc.base.errors import RequestError

# Attributes (pbs_job_attributes(7B)) and the options of qsub(1B) that set them. A default value is not passed
# on, since a site may reject the option.
_OPTIONS = {
    "Job_Name": ("-N", ""),
    "Account_Name": ("-A", ""),
    "project": ("-P", "_pbs_project_default"),
    "Priority": ("-p", "0"),
    "Join_Path": ("-j", "n"),
    "Keep_Files": ("-k", "n"),
    "Mail_Points": ("-m", "a"),
    "Mail_Users": ("-M", ""),
    "Shell_Path_List": ("-S", ""),
    "User_List": ("-u", ""),
    "Checkpoint": ("-c", "u"),
}
_W_OPTIONS = (
    "group_list",
    "umask",
    "sandbox",
    "stagein",
    "stageout",
    "tolerate_node_failures",
    "release_nodes_on_stageout",
)
_LOGS = {"Output_Path": ("-o", "o"), "Error_Path": ("-e", "e")}
_RESOURCE = re.compile(r"""(?:^|,)['"]*([A-Za-z_][A-Za-z0-9_]*)=""")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# One variable of Variable_List. A backslash precedes a comma, a quote or a backslash in a value, and stands
# with `n` for a line break.
_VARIABLE = re.compile(r"([^=,]+)=((?:\\.|[^,\\])*)(?:,|$)", re.DOTALL)
# Variables that PBS or ddp-hpc sets anew for each job.
_OF_ONE_JOB = ("PBS_", "DDP_HPC_")


def options(attributes: Mapping[str, str], work_dir: str) -> list[str]:
    """Returns the options of qsub that repeat the request of a job, except for its queue and resources."""
    words = []
    for name, (flag, default) in _OPTIONS.items():
        if (value := attributes.get(name, "")) and value != default:
            words += [flag, value]
    if attributes.get("Rerunable") == "False":
        words += ["-r", "n"]
    for name, (flag, ending) in _LOGS.items():
        if path := _own_log(attributes, name, ending, work_dir):
            words += [flag, path]
    for name in _W_OPTIONS:
        if value := attributes.get(name, ""):
            # qstat prints the umask as an octal number without leading zero.
            words += ["-W", f"{name}={value.zfill(3)}" if name == "umask" else f"{name}={value}"]
    return words


def variables(attributes: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that `qsub -v` or -V has passed to the job."""
    pairs = _VARIABLE.findall(attributes.get("Variable_List", ""))
    return {name: _unescaped(value) for name, value in pairs if not name.startswith(_OF_ONE_JOB)}


def safe_names(variables: Mapping[str, str]) -> list[str]:
    """Returns the variables whose values qsub passes on unchanged; OpenPBS 23.06 doubles each backslash."""
    return [name for name, value in variables.items() if not re.search(r"""[\\'"\n]""", value)]


def variables_in(script: str) -> list[str]:
    """Returns the values of -v in the directives of a script, which the command line's -v replaces."""
    return re.findall(r"^#PBS +(?:.* )?-v *(\S+)", script, re.MULTILINE)


def check_names(names: Iterable[str]) -> None:
    """Checks that a script can export these variables.

    Raises:
        RequestError: a name is not that of a variable of bash.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"qsub -v has passed the variable {name[:80]!r} to this job, but a job that resumes the run "
                "could not get it, because bash cannot export this name; rename the variable"
            )


def passes_environment(attributes: Mapping[str, str], script: str) -> bool:
    """Returns whether the job was submitted with `qsub -V`, on the command line or in a directive."""
    arguments = attributes.get("Submit_arguments", "").split()
    return "-V" in arguments or bool(re.search(r"^#PBS +(?:.* )?-V\b", script, re.MULTILINE))


def _unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda escaped: "\n" if escaped[1] == "n" else escaped[1], value, flags=re.DOTALL)


def _own_log(attributes: Mapping[str, str], name: str, ending: str, work_dir: str) -> str:
    """Returns the path of a log that the user chose; empty for the default, which names the job."""
    path = attributes.get(name, "").partition(":")[2]
    default = rf"{re.escape(work_dir)}/{re.escape(attributes.get('Job_Name', ''))}\.{ending}[0-9]+(?:\..*)?"
    return "" if re.fullmatch(default, path) else path


def resources(attributes: Mapping[str, str], script: str) -> Iterator[str]:
    """Yields options for the resources that the directives of the script and qsub's options request.

    The resources of a job also include those that its queue sets.
    """
    requests = re.findall(r"^#PBS +-l *(.*)", script, re.MULTILINE)
    requests += re.findall(r" -l *(\S+)", f" {attributes.get('Submit_arguments', '')}")
    for name in sorted({name for request in requests for name in _RESOURCE.findall(request)}):
        if value := attributes.get(f"Resource_List.{name}"):
            yield from ("-l", f"{name}={value}")
