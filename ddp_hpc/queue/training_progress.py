"""The progress of a training, from the last progress line in its log or from its --metrics file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ddp_hpc.lint.parse_script import MAX_CHARS, parse_script
from ddp_hpc.queue.log_files import read_tail
from ddp_hpc.schedulers.job_state import duration_s

_LINE = re.compile(
    r"epoch [0-9]+/[0-9]+ step ([0-9]{1,15})/([0-9]{1,15}) loss (\S{1,32}) \S+ samples/s eta (\S{1,16})"
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last completed step of a training. `left_s` is the estimated remaining time. None means unknown."""

    step: int
    num_steps: int | None = None
    loss: float | None = None
    left_s: int | None = None


def read_progress(
    log: str, run_dir: Path | None, work_dir: str, *, after_step: int = 0, since_s: int = 0
) -> Progress | None:
    """Returns the progress in the last lines of the log, or else in the metrics file that the script names.

    Metrics up to the step `after_step`, or written before `since_s`, belong to an earlier attempt.
    """
    if found := _LINE.findall(log):
        step, num_steps, loss, eta = found[-1]
        return Progress(step=int(step), num_steps=int(num_steps), loss=_number(loss), left_s=duration_s(eta))
    # PBS can keep the log on the node until the job ends.
    progress = _from_metrics(run_dir, work_dir, since_s) if run_dir is not None else None
    return progress if progress is not None and progress.step > after_step else None


def _from_metrics(run_dir: Path, work_dir: str, since_s: int) -> Progress | None:
    script = run_dir / "job.sh"
    try:
        text = script.read_text(encoding="utf-8", errors="replace")[:MAX_CHARS] if script.is_file() else ""
    except OSError:
        return None
    words = [word for command in parse_script(text).commands for word in command.words]
    named = [after for word, after in pairwise(words) if word == "--metrics"]
    named += [word.partition("=")[2] for word in words if word.startswith("--metrics=")]
    if not named:
        return None
    path = Path(work_dir) / named[-1]
    try:
        if path.stat().st_mtime < since_s:
            return None
    except OSError:
        return None
    for line in reversed(read_tail([path]).splitlines()):
        try:
            record = json.loads(line)
            return Progress(step=int(record["step"]), loss=float(record["loss"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
