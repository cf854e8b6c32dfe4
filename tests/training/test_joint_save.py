"""The ranks agree whether a snapshot is complete, whatever happens to one of them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.training.snapshots import snapshot_directory as directory_module
from ddp_hpc.training.snapshots.shard_file import write_shards as write_really
from ddp_hpc.training.snapshots.snapshot_files import read_snapshot

from .shards import Ranks, ranks_in

NUM_RANKS = 3
MODEL = {"big": torch.arange(600.0).reshape(50, 12), "flag": torch.tensor(True)}
TRAINING = {"optimizer.exp_avg/big": torch.ones(50, 12)}


def test_a_rank_that_cannot_write_is_a_warning_and_the_next_snapshot_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_on_rank_1(path: Path, *rest: Any) -> Any:
        if "-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_really(path, *rest)

    with ranks_in(tmp_path, NUM_RANKS) as ranks:
        ranks.save(1, MODEL, TRAINING)
        with monkeypatch.context() as patched:
            patched.setattr(directory_module, "write_shards", full_on_rank_1)
            ranks.save(2, MODEL, TRAINING)
        [line] = ranks.said
        assert line == (
            f"WARNING: the snapshot of step 2 was NOT saved in {tmp_path}: No space left on device (rank 1); "
            "the newest snapshot is still from step 1. Training continues; free disk space"
        )
        assert [writer.saved.step for writer in ranks.writers] == [1] * NUM_RANKS
        assert _entries(tmp_path) == ["step_00000001"]
        ranks.save(3, MODEL, TRAINING)
        assert _entries(tmp_path) == ["step_00000001", "step_00000003"]
        assert len(ranks.said) == 1


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_an_unexpected_error_of_one_rank_does_not_make_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_on_rank_2(path: Path, *rest: Any) -> Any:
        if "-00002" in path.name:
            raise RuntimeError("a defect")
        return write_really(path, *rest)

    monkeypatch.setattr(directory_module, "write_shards", broken_on_rank_2)
    with ranks_in(tmp_path, NUM_RANKS) as ranks:
        ranks.save(1, MODEL, TRAINING)
        [line] = ranks.said
        assert "NOT saved" in line
        assert "RuntimeError: a defect (rank 2); there is no snapshot yet" in line
        assert _entries(tmp_path) == []


def test_ranks_that_do_not_write_are_named_after_a_limit(tmp_path: Path) -> None:
    with ranks_in(tmp_path, NUM_RANKS, limit_s=2.0) as ranks:
        ranks.save(1, MODEL, TRAINING, absent=(1,))
        [line] = ranks.said
        assert "rank 1 did not write its part within 2 s; there is no snapshot yet" in line
        assert _entries(tmp_path) == []
        ranks.first.joint.limit_s = 60.0
        ranks.save(2, MODEL, TRAINING)
        assert _entries(tmp_path) == ["step_00000002"]


def test_a_rank_that_reports_late_does_not_disturb_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def late_on_rank_1(path: Path, *rest: Any) -> Any:
        if "-00001" in path.name:
            assert go.wait(10)
        return write_really(path, *rest)

    monkeypatch.setattr(directory_module, "write_shards", late_on_rank_1)
    with ranks_in(tmp_path, NUM_RANKS, limit_s=0.2) as ranks:
        threading.Timer(1.0, go.set).start()
        ranks.save(1, MODEL, TRAINING)
        ranks.first.joint.limit_s = 60.0
        ranks.save(2, MODEL, TRAINING)
        assert len(ranks.said) == 1
        assert "step_00000002" in _entries(tmp_path)
    assert torch.equal(read_snapshot(tmp_path / "step_00000002").model["big"], MODEL["big"])


def test_the_end_of_the_store_ends_the_writing_threads(tmp_path: Path) -> None:
    with ranks_in(tmp_path, NUM_RANKS, limit_s=1000.0) as ranks:
        _lose_the_store(ranks)
        ranks.save(1, MODEL, TRAINING, absent=(1,))
        [line] = ranks.said
        assert "the snapshot of step 1 was NOT saved" in line
        assert _entries(tmp_path) == []


def _lose_the_store(ranks: Ranks) -> None:
    def lose() -> None:
        for writer in ranks.writers:
            assert writer.joint.store is not None
            writer.joint.store.close()

    threading.Timer(0.3, lose).start()


def test_files_that_rank_0_does_not_see_are_reported(tmp_path: Path) -> None:
    elsewhere = tmp_path / "node1"
    elsewhere.mkdir()
    with ranks_in(tmp_path / "node0", 2) as ranks:
        ranks.writers[1].path = elsewhere
        ranks.save(1, MODEL, TRAINING)
        [line] = ranks.said
        assert "rank 0 does not see the files of rank 1" in line
        assert line.endswith("use another --snapshot-dir")
        assert _entries(tmp_path / "node0") == []
