"""Logs that grow, shrink or are not regular files, and the last progress line of the training in them."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_hpc.queue.log_files import Reader, log_paths, read_tail, usual_logs
from ddp_hpc.queue.training_progress import Progress, progress_in
from tests.queue.answers import slurm, slurm_job

LINE = "epoch 1/10 step {step}/640 loss {loss} 61.3 samples/s eta {eta}\n"


def test_a_reader_returns_each_byte_once_and_restarts_if_the_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = Reader(path)
    assert b"".join(reader.new()) == b"", "it is not there yet"
    path.write_bytes(b"one\n\xff")
    assert b"".join(reader.new()) == b"one\n\xff"
    with path.open("ab") as file:
        file.write(b"two\n")
    assert b"".join(reader.new()) == b"two\n"
    assert b"".join(reader.new()) == b""
    path.write_bytes(b"new\n")
    assert b"".join(reader.new()) == b"new\n"


def test_a_pipe_is_not_awaited(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_tail([tmp_path / "pipe", tmp_path / "none", Path("/dev/zero"), tmp_path]) == ""
    assert list(Reader(tmp_path / "pipe").new()) == []


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 10_000_000 + b"the end")
    tail = read_tail([tmp_path / "log"])
    assert tail.endswith("the end")
    assert len(tail) < 1_000_000


def test_the_log_of_a_job_known_only_to_sacct_is_searched_by_its_default_names(
    tmp_path: Path,
) -> None:
    job = slurm_job(slurm(log="(null)", work=str(tmp_path)), "12")
    assert log_paths(job) == []
    for name in ("ddp-12.out", "ddp-112.out", "ddp-12.out.old"):
        (tmp_path / name).touch()
    assert log_paths(job) == [tmp_path / "ddp-12.out"]
    for name in ("ddp.o12", "ddp.e12", "ddp.o123"):
        (tmp_path / name).touch()
    assert usual_logs(tmp_path, "12.pbs-srv") == [
        tmp_path / name for name in ("ddp-12.out", "ddp.o12", "ddp.e12")
    ]
    assert usual_logs(tmp_path / "none", "12[3]") == []


def test_the_last_progress_line_is_used() -> None:
    log = (
        LINE.format(step=10, loss="29.95", eta="?") + LINE.format(step=20, loss="1.5", eta="1:10:12") + "x\n"
    )
    assert progress_in(log) == Progress(step=20, num_steps=640, loss=1.5, left_s=4212)
    first = progress_in(LINE.format(step=10, loss="nonsense", eta="?"))
    assert first == Progress(step=10, num_steps=640)
    assert progress_in("no such line") is None
