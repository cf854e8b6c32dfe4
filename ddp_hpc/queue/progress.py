"""How far a training is: from the last line of progress in its log, else from its `--metrics` file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ddp_hpc.batch.script import MAX_CHARS, parse_script
from ddp_hpc.queue.job_state import duration_s
from ddp_hpc.queue.log_files import read_tail

_LINE = re.compile(
    r"epoch [0-9]+/[0-9]+ step ([0-9]{1,15})/([0-9]{1,15}) loss (\S{1,32}) \S+ samples/s eta (\S{1,16})"
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A step that is trained; None where nobody says. `left_s`: what the trainer thought was left then."""

    step: int
    num_steps: int | None = None
    loss: float | None = None
    left_s: int | None = None


def read_progress(log: str, run_dir: Path | None, work_dir: str) -> Progress | None:
    """The newest step that the log's end, or else the metrics of the run folder's script, tell of."""
    if found := _LINE.findall(log):
        step, num_steps, loss, eta = found[-1]
        return Progress(step=int(step), num_steps=int(num_steps), loss=_number(loss), left_s=duration_s(eta))
    # PBS may keep the log on the node until the job ends.
    return _from_metrics(run_dir, work_dir) if run_dir is not None else None


def _from_metrics(run_dir: Path, work_dir: str) -> Progress | None:
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
    for line in reversed(read_tail([Path(work_dir) / named[-1]]).splitlines()):
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
