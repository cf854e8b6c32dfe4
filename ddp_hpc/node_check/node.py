"""What the first rank of each node checks: the run directory, and what nvidia-smi and dcgmi report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hpc.doctor.check_result import Here, one_line
from ddp_hpc.doctor.gpus import gpu_state
from ddp_hpc.node_check.earlier_ranks import end_earlier_ranks
from ddp_hpc.node_check.results import EARLIER, LAUNCH, Problem

# A network file system can show a new file some seconds later on other nodes.
_VISIBLE_S = 8.0
_COMMAND_LIMIT_S = 10.0
# DCGM_ERROR_ISOLATE and DCGM_ERROR_RESET of dcgm_errors.h: the GPU cannot do any work. Other failures are
# no reason to give up a node: persistence mode that is off makes the test `software` fail, for example.
_UNUSABLE = (2, 6)


def node_problems(directory: Path, environ: Mapping[str, str]) -> list[Problem]:
    """Returns the problems of this node. `directory` is that of the check, in the run directory."""
    not_ended = end_earlier_ranks(environ)  # before their GPUs are examined
    state = gpu_state(Here(environ), _COMMAND_LIMIT_S)
    found = [
        Problem(EARLIER, not_ended),
        Problem("run directory", unseen(directory, environ.get("DDP_HPC_LAUNCH", ""))),
        Problem("nvidia-smi", state.what if state.status == "fail" else ""),
        Problem("dcgmi", _dcgm_failure(environ)),
    ]
    return [problem for problem in found if problem.text]


def unseen(directory: Path, launch: str, limit_s: float = _VISIBLE_S) -> str:
    """Returns why this node cannot read the file that the supervisor has just written; empty if it can."""
    end_s, why = time.monotonic() + limit_s, "its content is out of date"
    while True:
        try:
            if (directory / LAUNCH).read_text(encoding="utf-8") == launch:
                return ""
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", "") or "it is damaged"
        if time.monotonic() > end_s:
            return f"this node cannot read the current run directory: {directory / LAUNCH} ({why})"
        time.sleep(0.2)


def _dcgm_failure(environ: Mapping[str, str]) -> str:
    """Returns what `dcgmi diag -r 1` says about a GPU that cannot be used; nothing if dcgmi does not work."""
    program = shutil.which("dcgmi", path=environ.get("PATH", os.defpath))
    if program is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            argv = [program, "diag", "-r", "1", "-j"]
            done = subprocess.run(argv, capture_output=True, timeout=_COMMAND_LIMIT_S, check=False)
            return dcgm_failure_in(done.stdout.decode("utf-8", "replace"))
    return ""


def dcgm_failure_in(output: str) -> str:
    """Returns the first failure in the output of `dcgmi diag -j` because of which a GPU cannot be used.

    The exit code of dcgmi is not considered: it is 226 for settings such as persistence mode, too.
    """
    try:
        report = json.loads(output[output.index("{") :])
    except ValueError:
        return ""
    for results in _lists(report, "results"):
        for result in results:
            for warning in result.get("warnings") or ():
                if isinstance(warning, dict) and warning.get("error_severity") in _UNUSABLE:
                    entity = f"{result.get('entity_group', 'GPU')} {result.get('entity_id', '')}".rstrip()
                    return one_line(f"dcgmi diag: {entity}: {warning.get('warning', 'failed')}")
    return ""


def _lists(value: Any, key: str) -> Iterator[list[dict[str, Any]]]:
    """Yields the lists of objects under this key, on any level: versions of DCGM differ in the levels."""
    if isinstance(value, dict):
        if isinstance(found := value.get(key), list):
            yield [each for each in found if isinstance(each, dict)]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _lists(inner, key)
