"""Stand-in for `sbatch`: copies the script, prints the job id, and queues the job."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import Line, read_line
from ddp_hpc.rehearse.slurm import controller
from ddp_hpc.rehearse.slurm.option_tables import SBATCH, exported, node_count, walltime_s
from ddp_hpc.request.queue_options import parse_array

_UNSUPPORTED = ("test-only", "wait", "hold", "wrap", "het-group")


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path) -> int:
    """Submits a script.

    Raises:
        RefusedError: the script is refused, and nothing was submitted.
    """
    settings = controller.Settings.read(root)
    typed = read_line(argv, SBATCH)
    if "version" in typed.values:
        sys.stdout.write(controller.VERSION)
        return 0
    script = _script(typed.command)
    given: dict[str, str] = {}
    for each in parse_script(script).directives_of("slurm"):
        if each.fault and not each.late:
            raise SBATCH.refuse(f"error: {each.written}: {each.fault}")
        given |= {} if each.late else {each.flag.removeprefix("--"): each.value}
    given |= typed.values
    for option in _UNSUPPORTED:
        if option in given:
            raise SBATCH.refuse(f"the stand-in does not support --{option}")
    number = jobs.next_number(root / "next_job", settings.first_job)
    copy = root / "spool" / f"job{number:05d}" / "slurm_script"
    jobs.save_script(copy, script)
    name = given.get("job-name") or Path(typed.command[0]).name
    job = _attributes(given, number, name, copy, typed.command[1:], environ, root, settings)
    jobs.save(root, number, job)
    controller.schedule(root)
    sys.stdout.write(f"{number}\n" if "parsable" in given else f"Submitted batch job {number}\n")
    return 0


def array_indices(given: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the indices of the requested array; empty if none is requested.

    Raises:
        RefusedError: the value of --array is invalid.
    """
    try:
        array = parse_array(given["array"].partition("%")[0]) if "array" in given else None
    except RequestError:
        raise SBATCH.refuse("error: Batch job submission failed: Invalid job array specification") from None
    return tuple(sorted({index for indices in array.ranges for index in indices})) if array else ()


def _script(command: Sequence[str]) -> str:
    if not command:
        raise SBATCH.refuse("the stand-in cannot read the script from stdin")
    try:
        text = Path(command[0]).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SBATCH.refuse(f"error: Unable to open file {command[0]}") from error
    if not text.startswith("#!"):
        raise SBATCH.refuse("error: This does not look like a batch script.")
    if "\r\n" in text:
        raise SBATCH.refuse("error: Batch script contains DOS line breaks (\\r\\n)")
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
    line = Line(SBATCH, list(given.items()))
    num_nodes = node_count(SBATCH, given.get("nodes", "1"))
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
        "environment": exported(given.get("export", "ALL"), environ),
    }


def _after(dependency: str, root: Path) -> list[int]:
    if not dependency:
        return []
    kind, *numbers = re.split("[:,]", dependency)
    bad = SBATCH.refuse("error: Batch job submission failed: Job dependency problem")
    if kind != "afterany" or not numbers:
        raise bad
    return [jobs.find_job(word, root, str(bad)) for word in numbers]


def _signal(text: str) -> list[str | float]:
    """Returns the parts of `[R][B:]SIGNAL[@SECONDS]`: `B` or nothing, the signal, and the seconds."""
    if not text:
        return []
    match = re.fullmatch(r"(?:([RB]{1,2}):)?(?:SIG)?([A-Z]{2,6}[0-9]?|\d{1,2})(?:@(\d{1,5}))?", text)
    if not match:
        raise SBATCH.refuse("error: Invalid --signal specification")
    return ["B" if "B" in (match[1] or "") else "", match[2], float(match[3] or 60)]
