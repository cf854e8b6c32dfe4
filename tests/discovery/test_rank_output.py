"""With --rank-logs, a rank's output goes to its own file, and its problems to the log of the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import rank_log, read_end
from ddp_hpc.discovery.problem_lines import MAX_LINES, ProblemLines
from ddp_hpc.discovery.world import short_hostname
from tests.conftest import Launch

NUM_LINES, RANKS_PER_NODE = 1000, 16
# Each rank is a fork of one process, which needs no time to start Python; 8 of them run at a time.
FORKED = f"""
import os, sys
from pathlib import Path
from ddp_hpc.base.attempt_end import rank_log
from ddp_hpc.discovery.rank_output import RankOutput
from ddp_hpc.discovery.rank_program import run_as_child
run_dir, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
for rank in range(num_ranks + 8):
    if rank >= 8:
        assert os.wait()[1] == 0
    if rank < num_ranks and os.fork() == 0:
        host = f"n{{rank // {RANKS_PER_NODE}}}"
        output = RankOutput(run_dir / rank_log(1, host, rank), rank, host)
        program = f"seq -f 'rank {{rank}} line %g' {NUM_LINES}; echo 'error: bad' >&2; seq 3"
        os._exit(run_as_child("/bin/sh", ["sh", "-c", program], os.environ, None, None, output))
"""


@pytest.mark.parametrize("num_ranks", [64, pytest.param(512, marks=pytest.mark.check)])
def test_the_log_of_the_job_has_the_lines_of_rank_0_and_the_errors_of_all_ranks(
    launch: Launch, tmp_path: Path, num_ranks: int
) -> None:
    ended = launch([sys.executable, "-c", FORKED, tmp_path, str(num_ranks)], timeout_s=200)
    assert ended.exit_code == 0, ended.stderr
    of_rank_0 = [f"rank 0 line {number}" for number in range(1, NUM_LINES + 1)]
    assert ended.stdout.splitlines() == [*of_rank_0, "1", "2", "3"]
    labelled = [f"[rank {rank} n{rank // RANKS_PER_NODE}] error: bad" for rank in range(1, num_ranks)]
    assert sorted(ended.stderr.splitlines()) == sorted(["error: bad", *labelled])
    for rank in range(num_ranks):
        (path,) = tmp_path.glob(rank_log(1, "*", rank))
        lines = path.read_text().splitlines()
        assert lines[:NUM_LINES] == [f"rank {rank} line {number}" for number in range(1, NUM_LINES + 1)]
        assert sorted(lines[NUM_LINES:]) == ["1", "2", "3", "error: bad"]
    nodes = sorted(f"n{number}" for number in range(num_ranks // RANKS_PER_NODE))
    assert sorted(path.name for path in (tmp_path / "logs" / "attempt-1").iterdir()) == nodes


def run_rank(launch: Launch, run_dir: Path, program: str, rank: int = 3) -> tuple[int, str, str]:
    """Runs the program as one rank; returns its exit code, and what goes to the log of the job."""
    env = {"DDP_HPC_RUN_DIR": str(run_dir), "DDP_HPC_THIS_ATTEMPT": "2 17", "DDP_HPC_RANK_LOGS": "1"}
    env |= {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "7"}
    argv = [sys.executable, "-m", "ddp_hpc.exec", sys.executable, "-c", f"import os, sys, time\n{program}"]
    ended = launch(argv, env=env)
    return ended.exit_code, ended.stdout, ended.stderr


def log_of(run_dir: Path, rank: int = 3) -> Path:
    return run_dir / "logs" / "attempt-2" / short_hostname() / f"rank-{rank}.log"


@pytest.mark.parametrize(
    ("program", "exit_code", "content"),
    [
        ("print('kept'); os._exit(3)", 3, b"kept\n"),
        ("print('kept'); os.kill(os.getpid(), 9)", -9, b"kept\n"),
        ("os.write(1, bytes(range(256)) * 1000)", 0, bytes(range(256)) * 1000),
        ("os.system('echo of a child'); os.write(2, b'no end')", 0, b"of a child\nno end"),
        ("if os.fork() == 0: time.sleep(8)\nelse: print('kept')", 0, b"kept\n"),
    ],
    ids=["crash", "killed", "binary", "child", "child-that-keeps-the-streams"],
)
def test_the_file_contains_what_a_rank_wrote(
    launch: Launch, tmp_path: Path, program: str, exit_code: int, content: bytes
) -> None:
    assert run_rank(launch, tmp_path, program) == (exit_code, "", "")
    assert log_of(tmp_path).read_bytes() == content


def test_without_space_for_the_file_the_log_of_the_job_gets_the_output_and_one_warning(
    launch: Launch, tmp_path: Path
) -> None:
    log_of(tmp_path).parent.mkdir(parents=True)
    log_of(tmp_path).symlink_to("/dev/full")
    for place, why in ((tmp_path, "No space left on device"), (Path("/proc/nonesuch"), "No such file")):
        code, out, err = run_rank(launch, place, "for i in range(1000): print('line', i)")
        assert (code, out.splitlines()) == (0, [f"line {number}" for number in range(1000)])
        (line,) = [line for line in err.splitlines() if "rank-3.log cannot be written" in line]
        assert line.startswith(f"[rank 3 {short_hostname()}] warning: ")
        assert why in line


def test_the_exception_is_one_line_in_the_log_of_the_job_and_whole_in_a_file(
    launch: Launch, tmp_path: Path
) -> None:
    code, out, err = run_rank(launch, tmp_path, "def fail(): raise ValueError('bad')\nfail()")
    assert (code, out, err) == (1, "", f"[rank 3 {short_hostname()}] ValueError: bad\n")
    kept = (tmp_path / "tracebacks" / "rank00003.txt").read_text()
    assert kept == log_of(tmp_path).read_text()
    assert kept.startswith("Traceback (most recent call last):\n")
    end = read_end(tmp_path, "2 17")
    assert end is not None
    assert (end.exception, end.rank) == ("ValueError", 3)
    assert f" exited with code 1: ValueError: bad; its traceback is in {tmp_path}/tracebacks" in end.reason


def test_a_rank_has_a_limited_number_of_lines_in_the_log_of_the_job(launch: Launch, tmp_path: Path) -> None:
    *lines, last = run_rank(launch, tmp_path, "for i in range(1000): print('error:', i)")[1:]
    assert len("".join(lines).splitlines()) == MAX_LINES
    assert "further warnings and errors of this rank are only in " in last


def problems(text: str) -> list[str]:
    found = ProblemLines()
    return [line.decode() for part in (text[:7], text[7:], "\n") for line in found.new(part.encode())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step 1 loss 0.5\nval_error 0.2\n0 errors\nno warnings", []),
        ("a.py:1: UserWarning: slow", ["a.py:1: UserWarning: slow"]),
        ("2026-11-27 ERROR root - bad", ["2026-11-27 ERROR root - bad"]),
        ("n1:7:7 [0] misc/x.cc:1 NCCL WARN Call to bind failed", None),
        ("Fatal Python error: Segmentation fault", None),
        ("1%\r2%\r\rwarning: odd\r\n", ["warning: odd"]),
        ("[rank3]: Traceback (most recent call last):\n[rank3]:   File a\n[rank3]: Odd", ["[rank3]: Odd"]),
    ],
)
def test_warnings_and_errors_are_recognized(text: str, expected: list[str] | None) -> None:
    assert problems(text) == ([text] if expected is None else expected)


def test_a_chain_of_exceptions_is_kept_whole() -> None:
    found = ProblemLines()
    first = "Traceback (most recent call last):\n  File a\nKeyError: 1\n"
    chain = f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{first}"
    found.new(f"{first}x\n{chain}".encode())
    assert (found.traceback, found.exception) == (chain, "KeyError: 1")
