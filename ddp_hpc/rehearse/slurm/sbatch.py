"""Stand-in for `sbatch`: copies the script, prints the job id, and queues the job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import Line, RefusedError, read_line
from ddp_hpc.rehearse.slurm import controller
from ddp_hpc.rehearse.slurm.option_tables import SBATCH, node_count, walltime_s
from ddp_hpc.request.queue_options import parse_array

_NO_SCRIPT = """sbatch: error: This does not look like a batch script.  The first
sbatch: error: line must start with #! followed by the path to an interpreter.
sbatch: error: For instance: #!/bin/sh"""
_UNSUPPORTED = ("test-only", "wait", "hold", "wrap", "het-group")


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Submits a script.

    Raises:
        RefusedError: the script is refused, and nothing was submitted.
    """
    settings = controller.Settings.read(root)
    typed = read_line(argv, SBATCH)
    if "version" in typed.flags:
        sys.stdout.write(controller.VERSION)
        return 0
    script = _script(typed.command)
    given: dict[str, str] = {}
    for words in directives(script):
        given |= read_line(words, SBATCH).values
    given |= typed.values
    for option in _UNSUPPORTED:
        if option in given:
            raise RefusedError(f"sbatch: the stand-in does not support --{option}")
    number = jobs.next_number(root / "next_job", settings.first_job)
    copy = root / "spool" / f"job{number:05d}" / "slurm_script"
    jobs.save_script(copy, script)
    name = given.get("job-name") or (Path(typed.command[0]).name if typed.command else "sbatch")
    job = _attributes(given, number, name, copy, typed.command[1:], environ, root, settings)
    jobs.save(root, number, job)
    controller.schedule(root)
    sys.stdout.write(f"{number}\n" if "parsable" in given else f"Submitted batch job {number}\n")
    return 0


def directives(script: str) -> list[list[str]]:
    """Returns the arguments of each #SBATCH line before the first command."""
    lines = []
    for line in script.split("\n"):
        if re.match(r"#SBATCH(\s|$)", line):
            with suppress(ValueError):  # ignore a line with an unclosed quote
                lines.append(shlex.split(line.removeprefix("#SBATCH"), comments=True))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return lines


def array_indices(given: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the indices of the requested array; empty if none is requested.

    Raises:
        RefusedError: the value of --array is invalid.
    """
    try:
        array = parse_array(given["array"].partition("%")[0]) if "array" in given else None
    except RequestError:
        text = "sbatch: error: Batch job submission failed: Invalid job array specification"
        raise RefusedError(text) from None
    return tuple(sorted({index for indices in array.ranges for index in indices})) if array else ()


def _script(command: Sequence[str]) -> str:
    try:
        data = Path(command[0]).read_bytes() if command else sys.stdin.buffer.read()
    except OSError as error:
        raise RefusedError(f"sbatch: error: Unable to open file {command[0]}") from error
    text = data.decode("utf-8", "surrogateescape")
    if not text.startswith("#!"):
        raise RefusedError(_NO_SCRIPT)
    if "\0" in text:
        raise RefusedError("sbatch: error: The Slurm controller does not allow scripts that contain a NULL")
    if "\r\n" in text:
        raise RefusedError("sbatch: error: Batch script contains DOS line breaks (\\r\\n)")
    return text


def _attributes(
    given: Mapping[str, str],
    number: int,
    name: str,
    copy: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    root: Path,
    settings: controller.Settings,
) -> jobs.Attributes:
    line = Line(SBATCH, values=dict(given))
    num_nodes = node_count("sbatch", given.get("nodes", "1"))
    per_node = line.number("ntasks-per-node", 1)
    num_tasks = line.number("ntasks", num_nodes * per_node)
    indices = array_indices(given)
    if "ntasks" in given and "nodes" not in given and "ntasks-per-node" in given:
        num_nodes = -(-num_tasks // per_node)
    counts = [num_tasks // num_nodes + (i < num_tasks % num_nodes) for i in range(num_nodes)]
    here = settings.nodes[:num_nodes]
    workdir = str(Path(given.get("chdir", environ.get("PWD", "."))).absolute())
    after = _after(given.get("dependency", ""), root)
    return {
        "number": number,
        "name": name,
        "state": "PENDING",
        "reason": "Dependency" if after else "None",
        "script": str(copy),
        "arguments": list(arguments),
        "workdir": workdir,
        "output": given.get("output", "slurm-%A_%a.out" if indices else "slurm-%j.out"),
        "error": given.get("error", ""),
        "append": given.get("open-mode", "truncate").startswith("a"),
        "nodes": list(here),
        "counts": counts[: len(here)],
        "has_num_tasks": "ntasks" in given or "ntasks-per-node" in given,
        "given": dict(given),
        "walltime_s": settings.walltime_s or walltime_s(given.get("time", "0")),
        "signal": _signal(given.get("signal", "")),
        "requeue": "no-requeue" not in given,
        "partition": given.get("partition", settings.partition),
        "user": environ.get("USER", "user"),
        "after": after,
        **({"array_index": indices[0], "array_indices": indices} if indices else {}),
        "runs": 0,
        "environment": _exported(given.get("export", "ALL"), environ),
    }


def _exported(export: str, environ: Mapping[str, str]) -> dict[str, str]:
    words = export.split(",")
    if export in ("NONE", "NIL"):
        kept = ("HOME", "USER", "LOGNAME", "PATH", "SHELL")
        return {name: value for name, value in environ.items() if name in kept}
    exported = dict(environ) if "ALL" in words else {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            exported[name] = value
        elif name in environ:
            exported[name] = environ[name]
    return exported


def _after(dependency: str, root: Path) -> list[int]:
    if not dependency:
        return []
    kind, *numbers = re.split("[:,]", dependency)
    bad = RefusedError("sbatch: error: Batch job submission failed: Job dependency problem")
    if kind != "afterany" or not numbers:
        raise bad
    return [jobs.find_job(word, root, str(bad)) for word in numbers]


def _signal(text: str) -> list[str | float]:
    """Returns the parts of `[R][B:]SIGNAL[@SECONDS]`: `B` or nothing, the signal, and the seconds."""
    if not text:
        return []
    match = re.fullmatch(r"(?:([RB]{1,2}):)?(?:SIG)?([A-Z]{2,6}[0-9]?|\d{1,2})(?:@(\d{1,5}))?", text)
    if not match:
        raise RefusedError("sbatch: error: Invalid --signal specification", 255)
    return ["B" if "B" in (match[1] or "") else "", match[2], float(match[3] or 60)]
