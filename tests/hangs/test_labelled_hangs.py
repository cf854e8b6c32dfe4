"""For each of the hangs in `programs`, the recorded reason names the ranks and the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import read_end
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.world import short_hostname
from tests.conftest import Launch

from .jobs import Job
from .programs import HANGS, Hang

END_S = 120.0


def cases() -> Iterator[object]:
    """The first hang with py-spy; more with `make check`, and all with both tools with `make soak`."""
    for index, hang in enumerate(HANGS):
        for tool in ("py-spy", "faulthandler"):
            name = f"{tool}-{hang.name.replace(' ', '-')}"
            is_checked = index == 0 or (tool == "py-spy" and index % 3 == 1)
            marks = (
                ()
                if index == 0 and tool == "py-spy"
                else (pytest.mark.check if is_checked else pytest.mark.soak)
            )
            yield pytest.param(hang, tool, id=name, marks=marks)


@pytest.mark.parametrize(("hang", "tool"), [*cases()])
def test_the_reason_names_ranks_and_lines(launch: Launch, tmp_path: Path, hang: Hang, tool: str) -> None:
    job = Job(launch, tmp_path)
    if tool == "faulthandler":
        job.forbid_py_spy()
    ended = launch.end(job.start(hang.program), END_S)
    end = read_end(job.run_dir, "1 7")
    assert ended.exit_code == 1, ended.stdout + ended.stderr
    assert end is not None
    print(end.reason)
    assert end.cause is Cause.HANG
    rest = [rank for rank in range(3) if rank not in hang.elsewhere]
    assert re.search(
        rf"rank {hang.elsewhere[0]} on \S+ {hang.does} train\.py:{hang.line('elsewhere')} \(.*"
        rf"while ranks {rest[0]}, {rest[1]} on \S+ {hang.waits} train\.py:{hang.line('waits')} \(",
        end.reason,
    ), (end.reason, hang.line("elsewhere"), hang.line("waits"))
    assert (end.rank, end.host) == (hang.elsewhere[0], short_hostname())
    assert ("Current thread" in job.stacks(0)) == (tool == "faulthandler")
    assert f'File "{tmp_path}/train.py", line {hang.line("elsewhere")} in ' in job.stacks(hang.elsewhere[0])
