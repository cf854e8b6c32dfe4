"""The comparison of two captures in one sentence."""

from pathlib import Path

from ddp_hpc.trace.capture import read_capture
from ddp_hpc.trace.compare import compare
from ddp_hpc.trace.trace_records import Capture

from .made import step, write


def capture(directory: Path, data_us: float) -> Capture:
    """Three steps of 340 us and the time of waiting for data."""
    events = [event for number in range(3) for event in step(number, 1000 * number, data=data_us)]
    directory.mkdir()
    write(directory / "trace.json", events)
    return read_capture(directory)


def test_the_part_that_makes_a_step_slower_is_named_with_its_share(tmp_path: Path) -> None:
    memory, naive = capture(tmp_path / "memory", 10), capture(tmp_path / "naive_hdf5", 510)
    assert compare(memory, naive) == (
        "memory compared with naive_hdf5: a step takes 350 us instead of 850 us (2.43 times faster): waiting "
        "for data takes 10 us instead of 510 us, which is 100% of the difference."
    )
    backwards = compare(naive, memory)
    assert "(2.43 times slower): waiting for data takes 510 us instead of 10 us" in backwards


def test_a_large_wait_for_data_comes_with_what_to_try(tmp_path: Path) -> None:
    findings = capture(tmp_path / "naive_hdf5", 510).findings
    assert any("Measure other file formats with ddp-hpc bench io" in finding for finding in findings)
