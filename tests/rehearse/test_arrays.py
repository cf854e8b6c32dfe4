"""A rehearsal runs one task of a job array, with the variables and the job ID that the scheduler gives it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]
SHOW = ["env | sort | grep -E '_ARRAY_|^PBS_JOBID' || true"]


def variables(output: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.splitlines() if re.match(r"[A-Z_]+=", line))


def test_the_first_task_of_an_array_of_pbs_runs(rehearse: Rehearse, script: Script) -> None:
    done = rehearse(script("pbs", "-J 2-8:2", "-j oe", "-k doe", *SHOW))
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "job.sh is a job array, of which only the task with index 2 runs" in done.stderr
    found = variables(done.stdout)
    assert found["PBS_ARRAY_INDEX"] == "2"
    assert re.fullmatch(r"[0-9]+\[\]\.rehearsal", found["PBS_ARRAY_ID"])
    assert found["PBS_JOBID"] == found["PBS_ARRAY_ID"].replace("[]", "[2]")
    assert re.findall("^rehearse: job (.*): Exit_status 0", done.stderr, re.MULTILINE) == [found["PBS_JOBID"]]
