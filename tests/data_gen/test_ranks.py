"""Several ranks write one file that equals that of one process; errors are reported once."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_gen import Recipe, generate, synthetic
from data_gen.writer import GenerateResult
from ddp_hpc.base.errors import DdpHpcError, ReportedElsewhereError, RequestError
from tests.conftest import PROJECT

SMALL = Recipe(num_samples=103, src_shape=(1, 8), tgt_shape=(3, 8))
COMMAND = (sys.executable, "-m", "data_gen", "--num-samples", "2")


class ThreadComm:
    """A rank in a thread. Values are exchanged as JSON, as in the trainer's store; waits are limited."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def allgather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = json.dumps(value)
        self._shared["barrier"].wait(timeout=20)
        values = [json.loads(self._shared[rank]) for rank in range(self.size)]
        self._shared["barrier"].wait(timeout=20)
        return values

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def combine(self, value: Any, rule: Any) -> Any:
        return rule(self.allgather(value))

    def barrier(self, what: str) -> None:
        self.allgather(None)


def by_ranks(size: int, recipe: Recipe, path: Path, **options: Any) -> list[GenerateResult | Exception]:
    """Returns the result or the error of generate() on each rank."""
    shared = {"barrier": threading.Barrier(size)}

    def run(rank: int) -> GenerateResult | Exception:
        try:
            return generate(recipe, path, comm=ThreadComm(rank, size, shared), **options)
        except DdpHpcError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def small_blocks(monkeypatch):
    """Divides SMALL into 13 blocks, the last one shorter, with several chunks in each."""
    monkeypatch.setattr(synthetic, "_BLOCK_BYTES", 8 * SMALL.bytes_per_sample)
    monkeypatch.setattr(synthetic, "_BUFFER_ELEMENTS", 40)


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
@pytest.mark.parametrize("size", [2, 20])
def test_the_file_does_not_depend_on_the_number_of_ranks(tmp_path, small_blocks, suffix, size):
    one, many = tmp_path / f"one{suffix}", tmp_path / f"many{suffix}"
    generate(SMALL, one)
    results = by_ranks(size, SMALL, many)
    assert filecmp.cmp(one, many, shallow=False)
    assert {(result.reused, result.num_bytes) for result in results} == {(False, one.stat().st_size)}
    assert sorted(tmp_path.iterdir()) == sorted([one, many])


def test_learnable_values_do_not_depend_on_the_number_of_ranks(tmp_path, small_blocks):
    recipe = replace(SMALL, dtype="bfloat16", distribution="learnable")
    generate(recipe, tmp_path / "one.h5")
    by_ranks(3, recipe, tmp_path / "many.h5")
    assert filecmp.cmp(tmp_path / "one.h5", tmp_path / "many.h5", shallow=False)


def test_no_file_is_created_before_all_ranks_handle_signals(tmp_path):
    """A signal would kill a rank that starts later, and its launcher would then kill rank 0."""
    shared = {"barrier": threading.Barrier(2)}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(generate, SMALL, tmp_path / "file.h5", comm=ThreadComm(0, 2, shared))
        while not shared["barrier"].n_waiting:
            time.sleep(0.001)
        assert list(tmp_path.iterdir()) == []
        generate(SMALL, tmp_path / "file.h5", comm=ThreadComm(1, 2, shared))
        assert not first.result().reused


def test_only_rank_0_reports_an_invalid_request(tmp_path):
    path = tmp_path / "file.h5"
    path.write_bytes(b"a thesis")
    first, *others = by_ranks(3, SMALL, path)
    assert isinstance(first, RequestError)
    assert "was not written by data_gen" in str(first)
    assert all(isinstance(error, ReportedElsewhereError) and error.exit_code == 2 for error in others)
    assert path.read_bytes() == b"a thesis"


def test_a_write_error_on_one_rank_fails_all_and_leaves_no_file(tmp_path, small_blocks, monkeypatch):
    part = synthetic.part

    def disk_of_rank_2_is_full(recipe, rank, size):
        yield from part(recipe, rank, size)
        if rank == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic, "part", disk_of_rank_2_is_full)
    first, *others = by_ranks(4, SMALL, tmp_path / "file.h5")
    assert type(first) is DdpHpcError
    assert "by rank 2 on " in str(first)
    assert "No space left on device" in str(first)
    assert all(isinstance(error, ReportedElsewhereError) and error.exit_code == 1 for error in others)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_rank_does_not_share_is_reported(tmp_path, monkeypatch):
    open_file = os.open

    def open_elsewhere(path, flags, *rest, **options):
        if flags == os.O_WRONLY:
            raise FileNotFoundError(2, "No such file or directory", path)
        return open_file(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_elsewhere)
    first, _ = by_ranks(2, SMALL, tmp_path / "file.h5")
    assert "cannot find the partial file that rank 0 created. Use a directory that all nodes share" in str(
        first
    )


def test_several_ranks_of_the_command_are_refused_in_one_line(tmp_path, launch, mpiexec):
    done = launch([mpiexec, "-n", "2", *COMMAND], cwd=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "started 2 ranks, but data_gen writes a file with one process" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["batch shell", "mpiexec -n 1"],
)
def test_one_process_does_not_use_mpi(tmp_path, variables):
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "sys.argv = ['data_gen', '--num-samples', '2', '--output', 'file.h5']\n"
        "from data_gen.cli import main\n"
        "main()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "file.h5\n")
