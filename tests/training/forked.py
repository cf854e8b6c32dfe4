"""Ranks that start quickly: a process that has already imported torch forks them.

`python forked.py MODULE...` imports the modules and reads requests, one JSON object per line. For each, it
forks a leader, which forks the ranks into one process group, responds with their process IDs, and writes
their exit codes at the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.conftest import Ended, clean_environ
from tests.waiting import PATIENCE


@dataclass(frozen=True)
class Job:
    """Running ranks, and the files for their output and exit codes."""

    pids: list[int]
    log: Path

    def running(self) -> bool:
        return not self._codes.exists()

    def wait(self, timeout_s: float = 60.0) -> list[int]:
        """The exit codes by rank, negative for signals. Kills the ranks after a time limit."""
        end_s = time.monotonic() + PATIENCE * timeout_s
        while self.running():
            if time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"still running after {PATIENCE * timeout_s:g} s\n{self.words()}")
            time.sleep(0.002)
        codes: list[int] = json.loads(self._codes.read_text())
        return codes

    def kill(self) -> None:
        """Sends SIGKILL to all ranks at once."""
        if self.running():
            with suppress(ProcessLookupError):  # they have just ended
                os.killpg(self.pids[0], signal.SIGKILL)

    def words(self) -> str:
        """The output of the ranks; if they run a script, only its stdout."""
        return self.log.read_text()

    def errors(self) -> list[str]:
        return [line for line in self.words().splitlines() if "error: " in line]

    @property
    def _codes(self) -> Path:
        return self.log.with_suffix(".codes")


class Forks:
    """The process that forks; `close` ends it and its ranks.

    It imports `modules` in addition to the modules that training imports.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.training.forked", *modules],
            # ddp_hpc.train sets this later, but here torch has been imported by then.
            env=clean_environ({"TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._jobs: list[Job] = []

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(
        self,
        *options: str | Path,
        cwd: Path,
        ranks: int,
        env: Mapping[str, str] | None = None,
        program: str = "ddp_hpc.train",
    ) -> Job:
        """Starts `python -m ddp_hpc.train` on ranks with RANK, WORLD_SIZE and MASTER_PORT."""
        log = cwd / f"job{len(self._jobs)}.log"
        return self._request(options, cwd, ranks, env, program, log, log)

    def _request(
        self,
        options: Sequence[str | Path],
        cwd: Path,
        ranks: int,
        env: Mapping[str, str] | None,
        program: str,
        log: Path,
        errors: Path,
    ) -> Job:
        argv = [str(word) for word in options]
        request = {"argv": argv, "cwd": str(cwd), "ranks": ranks, "env": dict(env or {}), "program": program}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({**request, "log": str(log), "errors": str(errors)}) + "\n")
        self._server.stdin.flush()
        job = Job(json.loads(self._server.stdout.readline()), log)
        self._jobs.append(job)
        return job

    def script(
        self,
        *words: str | Path,
        cwd: Path,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> Ended:
        """Runs `python SCRIPT ARGUMENT...` on ranks with RANK, WORLD_SIZE and MASTER_PORT.

        The exit code is the first one that is not 0, like that of mpiexec.
        """
        began_s = time.monotonic()
        log = cwd / f"job{len(self._jobs)}.log"
        errors = log.with_suffix(".errors")
        job = self._request(words[1:], cwd, ranks, env, str(words[0]), log, errors)
        try:
            codes = job.wait(timeout_s)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{errors.read_text()}") from None
        except BaseException:  # Ctrl-C, or the time limit of a test in benchmarks/gpu
            job.kill()
            raise
        code = next((code for code in codes if code), 0)
        return Ended(code, job.words(), errors.read_text(), time.monotonic() - began_s)

    def run(
        self,
        *options: str | Path,
        cwd: Path,
        ranks: int,
        env: Mapping[str, str] | None = None,
        program: str = "ddp_hpc.train",
    ) -> Job:
        """Waits for the job, which must succeed."""
        job = self.start(*options, cwd=cwd, ranks=ranks, env=env, program=program)
        assert job.wait() == [0] * ranks, job.words()
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
        try:
            self._server.communicate(timeout=60)
        except subprocess.TimeoutExpired:  # a process that a test has left holds the pipe
            self._server.kill()
            raise


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the leaders
    for line in sys.stdin:
        if os.fork() == 0:
            _lead(json.loads(line))
    os._exit(0)  # the exit of torch takes seconds


def _lead(request: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pids: list[int] = []
    port = _free_port()
    for rank in range(request["ranks"]):
        # The leader is not in the process group, so it survives a SIGKILL to the group.
        pid = os.fork()
        if pid == 0:
            _be_rank(request, rank, port)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    ended = dict(os.wait() for _ in pids)
    codes = Path(request["log"]).with_suffix(".codes")
    codes.with_suffix(".part").write_text(json.dumps([os.waitstatus_to_exitcode(ended[pid]) for pid in pids]))
    codes.with_suffix(".part").rename(codes)
    os._exit(0)


def _be_rank(request: dict[str, Any], rank: int, port: int) -> None:
    size = str(request["ranks"])
    own = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
    os.environ.update(
        {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **request["env"]}
        if request["ranks"] > 1
        else request["env"]
    )
    os.chdir(request["cwd"])
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log, errors = os.open(request["log"], how, 0o644), os.open(request["errors"], how, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (log, 1), (errors, 2)):
        os.dup2(old, new)
    # A new process has random generators with different seeds.
    random.seed()
    np.random.seed()
    if request["program"].endswith(".py"):
        _run_script(request)
    sys.path.insert(0, request["cwd"])  # as with `python -m`
    sys.argv = ["train", *request["argv"]]
    try:
        importlib.import_module(request["program"]).main(request["argv"])
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _run_script(request: dict[str, Any]) -> NoReturn:
    """Runs a script like `python SCRIPT`, but does not free the modules at the end, which takes a second."""
    path = request["program"]
    sys.path.insert(0, str(Path(path).absolute().parent))
    sys.argv = [path, *request["argv"]]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    import atexit
    import gc
    import importlib
    import runpy
    import socket
    import threading
    import traceback
    from importlib.util import find_spec

    # All modules that a rank imports.
    import numpy as np

    for name in (
        "torch._dynamo",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.profiler._cupti_monitor",
        "encodings.idna",
        "h5py",
        "tomli_w",
        "ddp_hpc.train",
        "ddp_hpc.data.hdf5",
        "ddp_hpc.data.tensor_files",
        "ddp_hpc.training.run.lifecycle",
        "ddp_hpc.training.parallel.ddp",
        "ddp_hpc.training.parallel.fsdp",
        "ddp_hpc.training.parallel.pipeline",
        "ddp_hpc.training.parallel.tensor_parallel",
        "ddp_hpc.training.parallel.torch_data_parallel",
        "ddp_hpc.training.task_setup",
        "ddp_hpc.training.summary",
        "ddp_hpc.training.trainer",
        "ddp_hpc.training.tuned_options",
        *sys.argv[1:],
    ):
        # Earlier versions of torch do not have all of these modules.
        if find_spec(name):
            importlib.import_module(name)
    # Otherwise, garbage collections in the ranks would copy the memory pages of all these objects.
    gc.collect()
    gc.freeze()
    _serve()
