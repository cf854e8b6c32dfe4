"""The loader: all methods of reading return the same batches, in reused buffers."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.training.input.batch_loader import Loader, _Reads
from ddp_hpc.training.process_group import errors_of_torch
from tests.training.runs import run

CPU = torch.device("cpu")
NUM_SAMPLES = 40
WAYS = [{"ahead": 0}, {"ahead": 3}]


@pytest.fixture
def path(tmp_path):
    """src (40, 3) float32 and tgt (40,) int64; sample i contains 3i, 3i + 1, 3i + 2 and i."""
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["src"] = np.arange(NUM_SAMPLES * 3, dtype=np.float32).reshape(NUM_SAMPLES, 3)
        file["tgt"] = np.arange(NUM_SAMPLES)
    return path


def wanted(*sizes: int) -> list[np.ndarray]:
    stream = np.random.default_rng(0)
    return [stream.integers(0, NUM_SAMPLES, size) for size in sizes]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 40
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("way", WAYS)
def test_each_batch_contains_the_requested_samples(path, way):
    numbers = wanted(4, 4, 1, 9, 0, 4)
    batches = [
        (src.clone(), tgt.clone())
        for src, tgt in Loader(open_samples(path), CPU, **way).batches(iter(numbers))
    ]
    assert [tgt.tolist() for _, tgt in batches] == [indices.tolist() for indices in numbers]
    assert all(torch.equal(src, (3 * tgt[:, None] + torch.arange(3)).float()) for src, tgt in batches)
    assert batches[0][0].dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_reused(path, way):
    batches = Loader(open_samples(path), CPU, **way).batches(wanted(*[8] * 1000))
    places = {(src.untyped_storage().data_ptr(), tgt.untyped_storage().data_ptr()) for src, tgt in batches}
    assert len(places) == way["ahead"] + 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num", "reads"), [(1, 130), (50_000, 50)])
def test_small_batches_are_read_together_and_large_ones_alone(path, monkeypatch, way, num, reads):
    samples = open_samples(path)
    read, read_sizes = samples.read, []

    def counting(indices, out):
        read_sizes.append(len(indices))
        return read(indices, out)

    monkeypatch.setattr(samples, "read", counting)
    sizes = [num] * reads
    batches = [(len(src), len(tgt)) for src, tgt in Loader(samples, CPU, **way).batches(wanted(*sizes))]
    assert batches == [(num, num)] * reads
    assert read_sizes == ([64, 64, 2] if num == 1 else [num] * reads)


@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_are_read_ahead_while_the_caller_computes(path, monkeypatch, ahead):
    samples = open_samples(path)
    read, done = samples.read, []

    def counting(indices, out):
        read(indices, out)
        done.append(len(indices))

    monkeypatch.setattr(samples, "read", counting)
    sizes = [60_000] * 8  # large enough to be read separately
    batches = Loader(samples, CPU, ahead=ahead).batches(wanted(*sizes))
    for taken in range(1, len(sizes) + 1):
        next(batches)
        until(lambda: len(done) == min(len(sizes), taken + ahead))  # noqa: B023 - called at once


def test_a_batch_is_unchanged_until_the_next_is_requested(path):
    numbers = wanted(*[8] * 300)
    batches = Loader(open_samples(path), CPU, ahead=2).batches(numbers)
    for indices, (_, tgt) in zip(numbers, batches, strict=True):
        time.sleep(0.001)  # long enough for the thread to fill all buffers
        assert tgt.tolist() == indices.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_when_its_batch_is_requested(path, way):
    good = np.zeros(2**20 // 20, dtype=np.int64)  # too large to be read with others
    batches = Loader(open_samples(path), CPU, **way).batches([good, np.array([NUM_SAMPLES])])
    assert next(batches)[1].tolist() == good.tolist()
    with pytest.raises(IndexError):
        next(batches)


@pytest.mark.parametrize(("cause", "kept"), [(Cause.REFUSED, Cause.FAILED), (Cause.OUT_OF_MEMORY,) * 2])
def test_an_error_of_the_file_is_a_failure_or_keeps_its_own_cause(path, monkeypatch, cause, kept):
    error = DataError("part of the file cannot be read")
    error.cause = cause

    def read(indices, out):
        raise error

    samples = open_samples(path)
    monkeypatch.setattr(samples, "read", read)
    with pytest.raises(DdpHpcError, match="cannot be read") as caught:
        next(Loader(samples, CPU).batches(wanted(4)))
    assert caught.value.cause is kept


def test_the_thread_ends_with_the_batches(path):
    loader = Loader(open_samples(path), CPU, ahead=1)
    for _ in loader.batches(wanted(4, 4, 4)):
        break
    list(loader.batches(wanted(4, 4)))
    until(lambda: threads() == [])


def test_a_hanging_file_system_is_an_error_after_the_timeout(path, monkeypatch):
    samples = open_samples(path)
    monkeypatch.setattr(samples, "read", lambda indices, out: time.sleep(30))
    with pytest.raises(
        DdpHpcError, match=r"waited 0.2 s for samples of .*file.h5: the file system did not answer"
    ):
        next(Loader(samples, CPU, timeout_s=0.2).batches(wanted(4)))


WITH_WORKERS = """
import multiprocessing, os, signal, sys
from itertools import islice
from pathlib import Path
import numpy as np, torch
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.training.input.batch_loader import Loader
from tests.waiting import PATIENCE

def drain(batches):
    try:
        list(batches)
    except DdpHpcError as error:
        print("DdpHpcError", error)

if __name__ == "__main__":
    path = Path(sys.argv[1])
    asked = [np.array([3, 1]), np.array([39]), np.arange(20)]
    loader = Loader(open_samples(path), torch.device("cpu"), workers=2, timeout_s=60.0)
    batches = loader.batches(asked * 100)
    before = torch.get_rng_state()
    got = [(src.tolist(), tgt.tolist()) for src, tgt in islice(batches, 3)]
    assert torch.equal(torch.get_rng_state(), before), "the workers' seeds came out of dropout's stream"
    assert [tgt for _, tgt in got] == [indices.tolist() for indices in asked], got
    assert got[0][0] == [[9.0, 10.0, 11.0], [3.0, 4.0, 5.0]], got
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    drain(batches)
    batches = Loader(open_samples(path), torch.device("cpu"), workers=1, timeout_s=60.0).batches(asked * 100)
    next(batches)
    os.truncate(path, 100)
    drain(batches)
"""


def test_an_error_in_a_worker_keeps_its_known_cause(monkeypatch):
    row = errors_of_torch.KnownError(Cause.HANG, types=("MemoryError",))
    monkeypatch.setattr(errors_of_torch, "KNOWN_ERRORS", (row,))

    def read(_):
        raise MemoryError("in a worker")

    sent = pickle.loads(pickle.dumps(_Reads(SimpleNamespace(read=read))[np.arange(2)]))
    assert errors_of_torch.known_cause(sent) is Cause.HANG


@pytest.mark.check
def test_workers_read_the_same_batches_and_their_exit_is_one_line(path, tmp_path):
    # Under PBS, TMPDIR is too long for the name of a socket.
    long_folder = tmp_path / ("x" * 100)
    long_folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(WITH_WORKERS)
    done = run([sys.executable, str(program), str(path)], tmp_path, {"TMPDIR": str(long_folder)})
    assert done.returncode == 0, done.stderr
    killed, cut = done.stdout.splitlines()
    assert "--workers 2 failed: " in killed
    assert "changed" in cut
