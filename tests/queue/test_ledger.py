"""The ledger of submissions in a run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.queue import submission_ledger as ledger
from ddp_hpc.queue.submission_ledger import Attempt, SubmissionRecord
from tests.conftest import PROJECT


def submission(job_id: str, at_s: int = 1000, **changes: str) -> SubmissionRecord:
    known = {"user": "me", "host": "login", "script": "/w/job.sh", "sha256": "0" * 64, "work_dir": "/w"}
    argv = ("sbatch", "--parsable", "/w/job.sh")
    return SubmissionRecord(job_id=job_id, scheduler="slurm", at_s=at_s, argv=argv, **{**known, **changes})


def make_run(folder: Path, *attempts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempts").write_text("".join(f"{line}\n" for line in attempts))
    return folder


def test_a_damaged_line_is_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    good = submission("12")
    ledger.record(tmp_path, good)
    with (tmp_path / "submitted").open("ab") as file:
        file.write(b'{"job_id": "13"\n\xff\xfe\n[]\n5\nnull\n{"job_id": 1}\n' + b"[" * 5000 + b"\n")
    ledger.record(tmp_path, good)
    assert ledger.submissions(tmp_path) == [good, good]
    make_run(tmp_path, "1 12 0 1000", "x", "2 12 5", "2 12 -5 9", "3 13.srv 60 2000", "")
    assert ledger.attempts(tmp_path) == [
        Attempt(number=1, job_id="12", first_step=0, at_s=1000),
        Attempt(number=3, job_id="13.srv", first_step=60, at_s=2000),
    ]


@pytest.mark.parametrize(
    "changes", [{"at_s": 10**20}, {"at_s": -1}, {"job_id": "gar bage"}, {"job_id": "-x"}]
)
def test_a_line_without_an_id_or_a_time_is_skipped(tmp_path: Path, changes: dict[str, object]) -> None:
    line = json.dumps({**asdict(submission("12")), **changes})
    (tmp_path / "submitted").write_text(f"{line}\n")
    assert ledger.submissions(tmp_path) == []


def test_a_truncated_line_does_not_affect_the_next_one(tmp_path: Path) -> None:
    ledger.record(tmp_path, submission("12"))
    with (tmp_path / "submitted").open("a") as file:
        file.write('{"job_id": "13", "sche')
    ledger.record(tmp_path, submission("14"))
    assert [one.job_id for one in ledger.submissions(tmp_path)] == ["12", "14"]


def test_a_line_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a quota is exceeded, write() returns a smaller number of bytes without an error."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, line: write(handle, line[:100]))
    with pytest.raises(
        DdpHpcError, match=r"submitted: only 100 of [0-9]+ bytes could be written; check the quota"
    ):
        ledger.record(tmp_path, submission("12"))


def test_a_job_of_another_cluster_is_not_mistaken_for_a_local_one(tmp_path: Path) -> None:
    """The script records only its job number, and its successor is queued on the cluster where it runs."""
    make_run(tmp_path, "1 12 0 1010", "2 13 60 2000")
    ledger.record(tmp_path, submission("12@cm4"))
    assert ledger.job_ids(tmp_path) == ["12@cm4", "13@cm4"]
    assert ledger.next_job(tmp_path, "12@cm4") == "13@cm4"
    assert ledger.next_job(tmp_path, "12") == ""


def test_an_unwritable_ledger_is_an_error_and_a_missing_one_is_empty(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    assert ledger.submissions(open_folder) == []
    with as_nobody(), pytest.raises(DdpHpcError, match=r"submitted cannot be written: .*Permission denied"):
        ledger.record(open_folder, submission("12"))


@pytest.mark.check
def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.queue.test_ledger import submission\n"
        "from ddp_hpc.queue import submission_ledger as ledger\n"
        "for i in range(200): ledger.record(Path(sys.argv[1]), submission(sys.argv[2] + str(i)))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen([*argv, number], cwd=PROJECT) for number in ("1", "2")]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(ledger.submissions(tmp_path)) == 400


def test_the_next_job_is_the_queued_successor_or_the_one_that_started_later(tmp_path: Path) -> None:
    make_run(tmp_path, "1 12.srv 0 1000", "2 12.srv 30 1500", "3 13.srv 60 2000", "1 20.srv 0 3000")
    assert ledger.next_job(tmp_path, "12") == "13.srv"
    assert ledger.next_job(tmp_path, "13") == "", "job 20 has restarted the run"
    ledger.record(tmp_path, submission("14.srv", after="13.srv"))
    assert ledger.next_job(tmp_path, "13") == "14.srv"
    assert ledger.next_job(tmp_path, "99") == ""
