"""Runs the GPU tests and the benchmarks of one GPU within a time limit, and writes one page of results.

python -m benchmarks.gpu [--minutes 9] [--out DIR] [--device auto]

This program is for a machine with a GPU on which nothing can be installed. It needs torch >= 2.8, h5py,
pytest, click and jinja2, but neither mpiexec nor an installed ddp-hpc. Run it in the root directory of the
project. DIR/gpu.md and DIR/gpu.json are written again after each result, so they are usable if the program
is killed. A row that fails does not end the program: the page has the last line of its error, and
DIR/ROW.log has its output. With `--device cpu`, the same rows run on a CPU with small models, to test this
program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.page import Page, Values, result
from benchmarks.gpu.rows import ROOT, ROWS, Row
from ddp_hpc.base.process_control import adopt_orphans, end_descendants
from tests.conftest import clean_environ
from tests.training.forked import Forks

# The time that a row gets after SIGINT, so that pytest can write its output.
_GRACE_S, _KILL_S, _LOOK_S = 8.0, 10.0, 0.05
_TRACEBACK = re.compile(r"the traceback is in (\S+)")


@dataclass(frozen=True)
class _Process:
    """A running row."""

    group: int
    log: Path
    poll: Callable[[], int | None]
    """Returns the exit code, or None while the row runs."""

    def ends_before(self, at_s: float, look: Callable[[], None]) -> bool:
        while self.poll() is None:
            if time.monotonic() > at_s:
                return False
            time.sleep(_LOOK_S)
            look()
        return True

    def stop(self, look: Callable[[], None]) -> None:
        for number, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _KILL_S)):
            try:
                os.killpg(self.group, number)
            except ProcessLookupError:
                return
            if self.ends_before(time.monotonic() + patience_s, look):
                return


@dataclass
class Runner:
    """Runs rows, each in its own process, and writes the page after each of their results."""

    page: Page
    directory: Path
    """A temporary directory."""
    end_s: float
    forks: Forks | None
    """Forks a process that has already imported torch; None if CUDA cannot be initialized in forks."""
    program: str = "benchmarks.gpu.rows"
    """The module whose function `main` runs a row."""

    def run(self, row: Row, device: str) -> Values:
        """Runs a row until its end or its limit; returns its values."""
        values: Values = {}
        self.page.rows[row.name] = values
        if reason := self._why_not(row):
            values["skipped"] = reason
        else:
            self._measure(row, device, values)
        self.page.write()
        return values

    def _why_not(self, row: Row) -> str:
        num_gpus = self.page.rows["machine"].get("num_gpus", row.num_gpus)
        if row.num_gpus > num_gpus:
            return "needs a GPU" if row.num_gpus == 1 else f"needs {row.num_gpus} GPUs"
        if missing := [name for name in row.packages if find_spec(name) is None]:
            return f"{', '.join(missing)} is not installed"
        is_late = self.end_s - time.monotonic() < 1.0
        return "not measured: the time limit was used up" if is_late else ""

    def _measure(self, row: Row, device: str, values: Values) -> None:
        home = self.directory / _file_name(row.name)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        num_read = 0

        def look() -> None:
            nonlocal num_read
            path = home / "values.jsonl"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            if new := lines[num_read:]:
                num_read = len(lines)
                for line in new:
                    values.update(json.loads(line))
                self.page.write()

        begin_s = time.monotonic()
        process, stopped, is_failure = self._start(row, device, home), "", False
        if not process.ends_before(min(begin_s + row.limit_s, self.end_s), look):
            stopped = f"stopped after {time.monotonic() - begin_s:.0f} s"
            is_failure = "tests" not in values and time.monotonic() < self.end_s
            process.stop(look)
        look()
        values["seconds"] = time.monotonic() - begin_s
        # Tests and torchrun start processes in other sessions, which would disturb the next rows.
        end_descendants(0.0, without=lambda: [self.forks.pid] if self.forks is not None else [])
        output = process.log.read_text(errors="replace")
        if stopped:
            values["failed" if is_failure else "stopped"] = f"{stopped}: {_last_line(output)}"
        elif code := process.poll():
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            values["failed"] = f"{name}: {_last_line(output)}" if code < 0 else _last_line(output) or name
        if "failed" in values:
            values["log"] = f"{_file_name(row.name)}.log"
            tracebacks = [Path(name) for name in _TRACEBACK.findall(output)]
            output += "".join(path.read_text() for path in tracebacks if path.exists())
            (self.page.out / values["log"]).write_text(output)

    def _start(self, row: Row, device: str, home: Path) -> _Process:
        context = {"device": device, "out": str(self.page.out), "shared": str(self.directory)}
        argv = [row.name, str(home / "context.json")]
        Path(argv[1]).write_text(json.dumps({**context, "found": self.page.rows}))
        if self.forks is not None:
            job = self.forks.start(*argv, cwd=home, ranks=1, program=self.program)
            return _Process(job.pids[0], job.log, lambda: None if job.running() else job.wait()[0])
        code = f"import sys; from {self.program} import main; main(sys.argv[1:])"
        with (home / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *argv], cwd=home, env=clean_environ(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return _Process(process.pid, home / "log", process.poll)


def _file_name(row: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", row.lower())


def _last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def _find_device(runner: Runner, requested: str) -> str:
    """Runs the first row, which finds the GPU; returns the device of all others.

    Raises:
        RuntimeError: there is a GPU, but torch cannot use it, or --device cuda was requested without one.
    """
    has_gpu = requested == "cuda" or (requested == "auto" and Path("/dev/nvidiactl").exists())
    for forks in (runner.forks, None):
        runner.forks = forks
        machine = runner.run(ROWS[0], requested)
        if machine.get("device") == "cuda" or not has_gpu:
            break
    if machine.get("device") is None:
        raise RuntimeError(f"torch does not work here: {machine.get('failed')}")
    if machine["device"] == "cpu" and has_gpu:
        raise RuntimeError(
            f"torch {machine['torch']} finds no GPU ({machine['why_no_gpu']}); use --device cpu"
        )
    return str(machine["device"])


def _run_all(runner: Runner, requested: str) -> None:
    device = _find_device(runner, requested)
    for row in ROWS:
        values = runner.page.rows["machine"] if row is ROWS[0] else runner.run(row, device)
        print(f"{row.name}: {result(values)} ({values.get('seconds', 0):.0f} s)", flush=True)
    for name, (value, goal, verdict) in runner.page.verdicts().items():
        print(f"goal: {name}: {value or 'no value'} ({goal}): {verdict}")


def main() -> None:
    """Runs all rows; the exit code is 1 if one failed or a test failed."""
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all rows together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory for the results")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    args = parser.parse_args()
    if find_spec("torch") is None:
        parser.error("torch is not installed for this Python; use the Python of an environment with torch")
    args.out.mkdir(parents=True, exist_ok=True)
    title = f"python -m benchmarks.gpu --minutes {args.minutes:g}"
    page = Page(args.out.resolve(), title, {"machine": {}})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    os.chdir(ROOT)
    directory = Path(tempfile.mkdtemp(prefix="ddp-hpc-gpu-"))
    try:
        _run_all(Runner(page, directory, begin_s + args.minutes * 60, Forks()), args.device)
    except RuntimeError as error:
        parser.error(str(error))
    finally:
        end_descendants(0.0)
        shutil.rmtree(directory, ignore_errors=True)
    failed = page.failed()
    print(f"results: {args.out}/gpu.md" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
