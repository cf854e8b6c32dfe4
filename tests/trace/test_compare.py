"""The comparison of two captures in one sentence."""

import json
from pathlib import Path

from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.compare import compare
from ddp_hpc.trace.summarize_run import read_capture

from .made import annotation, event, step, write


def capture(directory: Path, data_us: float, forward_us: float = 100, num_ranks: int = 1) -> Capture:
    """Three steps of 240 us, the time of waiting for data and that of the forward pass."""
    times = {"data": data_us, "forward": forward_us}
    events = [event for number in range(3) for event in step(number, 1000 * number, **times)]
    directory.mkdir()
    write(directory / f"rank00000-of-{num_ranks:05d}.json", events, 0, num_ranks)
    return read_capture(directory)


def test_the_part_that_makes_a_step_slower_is_named_with_its_share(tmp_path: Path) -> None:
    memory, naive = capture(tmp_path / "memory", 10), capture(tmp_path / "naive_hdf5", 510)
    assert compare(memory, naive) == (
        "memory: a step takes 350 us, 500 us (59%) less than in naive_hdf5 (850 us). "
        "Shorter: waiting for data by 500 us."
    )
    backwards = compare(naive, memory)
    assert "500 us (143%) more than in memory (350 us). Longer: waiting for data by 500 us." in backwards


def test_a_large_wait_for_data_comes_with_what_to_try(tmp_path: Path) -> None:
    findings = capture(tmp_path / "naive_hdf5", 510).findings
    assert any("without waiting for data (attainable: more workers, or a faster" in text for text in findings)


def test_a_part_that_changed_the_other_way_is_named_too(tmp_path: Path) -> None:
    before, after = capture(tmp_path / "before", 10, 300), capture(tmp_path / "after", 310, 100)
    assert compare(after, before) == (
        "after: a step takes 650 us, 100 us (18%) more than in before (550 us). Shorter: forward by 200 us. "
        "Longer: waiting for data by 300 us."
    )


def test_captures_of_different_numbers_of_ranks_come_with_a_warning(tmp_path: Path) -> None:
    one, eight = capture(tmp_path / "one", 10), capture(tmp_path / "eight", 10, num_ranks=8)
    assert compare(one, eight).startswith(
        "Warning: one was recorded on 1 rank, cpu, but eight on 8 ranks, cpu; "
    )


def device_capture(file: Path, device: str) -> Capture:
    """A step with a kernel on the given device."""
    events = [annotation("ProfilerStep#0", 0, 100), event("kernel", "gemm", 0, 50)]
    document = json.loads(write(file, events).read_text())
    file.write_text(json.dumps({**document, "deviceProperties": [{"name": device}]}))
    return read_capture(file)


def test_captures_of_different_devices_come_with_a_warning(tmp_path: Path) -> None:
    first = device_capture(tmp_path / "a.json", "A100")
    assert "Warning" not in compare(first, device_capture(tmp_path / "same.json", "A100"))
    faster = compare(device_capture(tmp_path / "b.json", "H100"), first)
    assert faster.startswith(
        "Warning: b.json was recorded on 1 rank, cuda (H100), but a.json on 1 rank, cuda (A100)"
    )
