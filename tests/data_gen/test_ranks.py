"""Several ranks write one file: the same bytes as one, one error for all, MPI only where asked for."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_gen import Recipe, generate, synthetic
from data_gen.writer import GenerateResult
from ddp_hpc.errors import DdpHpcError, ReportedElsewhereError, RequestError
from tests.conftest import PROJECT

SMALL = Recipe(num_samples=103, src_shape=(1, 8), tgt_shape=(3, 8))
COMMAND = (sys.executable, "-m", "data_gen")


class ThreadComm:
    """A rank that is a thread. Values pass as JSON, as in the trainer's store; waiting alone fails."""

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

    def barrier(self, what: str) -> None:
        self.allgather(None)


def by_ranks(size: int, recipe: Recipe, path: Path, **options: Any) -> list[GenerateResult | Exception]:
    """What generate() gives or raises on each rank."""
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
    """13 blocks in SMALL, the last one shorter, and several pieces in each."""
    monkeypatch.setattr(synthetic, "_BLOCK_BYTES", 8 * SMALL.bytes_per_sample)
    monkeypatch.setattr(synthetic, "_BUFFER_ELEMENTS", 40)


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".safetensors"])
@pytest.mark.parametrize("size", [2, 3, 13, 20])
def test_the_bytes_do_not_tell_how_many_wrote_them(tmp_path, small_blocks, suffix, size):
    one, many = tmp_path / f"one{suffix}", tmp_path / f"many{suffix}"
    generate(SMALL, one)
    results = by_ranks(size, SMALL, many)
    assert filecmp.cmp(one, many, shallow=False)
    assert {(result.reused, result.num_bytes) for result in results} == {(False, one.stat().st_size)}
    assert sorted(tmp_path.iterdir()) == sorted([one, many])


@pytest.mark.parametrize("distribution", ["normal", "learnable", "tokens"])
def test_so_with_every_distribution(tmp_path, small_blocks, distribution):
    dtype, shape = ("int16", (1, 8)) if distribution == "tokens" else ("bfloat16", (3, 8))
    recipe = Recipe(
        num_samples=103, src_shape=(1, 8), tgt_shape=shape, dtype=dtype, distribution=distribution
    )
    generate(recipe, tmp_path / "one.h5")
    by_ranks(3, recipe, tmp_path / "many.h5")
    assert filecmp.cmp(tmp_path / "one.h5", tmp_path / "many.h5", shallow=False)


def test_an_equal_file_is_reused_by_all(tmp_path):
    path = generate(SMALL, tmp_path / "file.h5").path
    inode = path.stat().st_ino
    assert [result.reused for result in by_ranks(3, SMALL, path)] == [True] * 3
    assert path.stat().st_ino == inode


def test_progress_is_rank_0s_and_ends_at_all_bytes(tmp_path, small_blocks):
    calls: list[tuple[int, int]] = []
    by_ranks(4, SMALL, tmp_path / "file.h5", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (SMALL.num_bytes, SMALL.num_bytes)


def test_no_file_is_begun_before_every_rank_can_be_told_to_end(tmp_path):
    """A rank that comes later would die of a signal at once, and its launcher would kill rank 0 with it."""
    shared = {"barrier": threading.Barrier(2)}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(generate, SMALL, tmp_path / "file.h5", comm=ThreadComm(0, 2, shared))
        while not shared["barrier"].n_waiting:
            time.sleep(0.001)
        assert list(tmp_path.iterdir()) == []
        generate(SMALL, tmp_path / "file.h5", comm=ThreadComm(1, 2, shared))
        assert not first.result().reused


def test_a_refusal_is_said_by_rank_0_alone(tmp_path):
    path = tmp_path / "file.h5"
    path.write_bytes(b"a thesis")
    first, *others = by_ranks(3, SMALL, path)
    assert isinstance(first, RequestError)
    assert "is not a file that data_gen wrote" in str(first)
    assert all(isinstance(error, ReportedElsewhereError) and error.exit_code == 2 for error in others)
    assert path.read_bytes() == b"a thesis"


def test_what_one_rank_cannot_write_is_an_error_of_all_and_nothing_is_left(
    tmp_path, small_blocks, monkeypatch
):
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


def test_a_folder_that_a_rank_does_not_share_is_named(tmp_path, monkeypatch):
    open_file = os.open

    def open_elsewhere(path, flags, *rest, **options):
        if flags == os.O_WRONLY:
            raise FileNotFoundError(2, "No such file or directory", path)
        return open_file(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_elsewhere)
    first, _ = by_ranks(2, SMALL, tmp_path / "file.h5")
    assert "does not see the file that rank 0 made; name a file in a folder that all nodes share" in str(
        first
    )


def test_under_mpiexec_one_path_and_the_same_bytes(tmp_path, launch, mpiexec):
    arguments = ("--num-samples", "2000", "--output")
    done = launch([mpiexec, "-n", "3", *COMMAND, *arguments, tmp_path / "many.h5"])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'many.h5'}\n")
    assert "by 3 ranks" in done.stderr
    generate(Recipe(num_samples=2000), tmp_path / "one.h5")
    assert filecmp.cmp(tmp_path / "one.h5", tmp_path / "many.h5", shallow=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-samples", "0"], "num_samples 0"),
        (["--output", "file.h5"], "is not a file that data_gen wrote"),
        (["digits"], "is written by one process and 2 ranks were started; leave mpiexec out"),
    ],
)
def test_a_wrong_request_of_several_ranks_is_one_line(tmp_path, launch, mpiexec, arguments, message):
    (tmp_path / "file.h5").write_bytes(b"a thesis")
    done = launch([mpiexec, "-n", "2", *COMMAND, *arguments], cwd=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.h5"]


def test_ranks_without_mpi_are_refused_in_one_line(tmp_path, launch):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = launch([*torchrun, "-m", "data_gen"], cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == (
        "error: torchrun started 2 ranks, which share one file only through MPI; "
        "start them with mpiexec and mpi4py installed, or start one process"
    )
    assert "exitcode  : 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_stops_answering_ends_the_job_in_time(tmp_path, launch, mpiexec):
    code = (
        "import os, signal, sys\n"
        "from data_gen import synthetic\n"
        "part = synthetic.part\n"
        "def stop(recipe, rank, size):\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return part(recipe, rank, size)\n"
        "synthetic.part = stop\n"
        "sys.argv = ['data_gen', '--num-samples', '9', '--output', 'file.h5', '--timeout', '2']\n"
        "from data_gen.cli import main\n"
        "main()\n"
    )
    done = launch([mpiexec, "-n", "2", sys.executable, "-c", code], cwd=tmp_path)
    assert done.exit_code != 0
    assert done.wall_s < 15
    assert "error: rank 0 waited 2 s for the other ranks to do their part" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["login node", "batch shell", "mpiexec -n 1"],
)
def test_one_process_never_touches_mpi(tmp_path, variables):
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
