"""Job IDs, and durations as schedulers format them."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers.job_state import check_job_id, duration_s, one_task, task_index


@pytest.mark.parametrize(
    "text",
    [
        "349726.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
        "12_3",
        "53[2].pbs-srv",
        "53[2]",
        "53[].pbs-srv",
        "12@cm4",
    ],
)
def test_job_ids_of_both_schedulers_are_accepted(text: str) -> None:
    assert check_job_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--help",
        "all",
        "12\n13",
        "12;scancel 13",
        "12@-x",
        "$(touch x)",
        "12_[1-3]",
        "53[1-3]",
        "53[]x",
        "\u0661\u0662",
        "12.\x1b[31m",
        "1" * 10_000,
    ],
)
def test_other_text_is_refused_as_a_job_id(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_job_id(text)
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("job_id", "index", "first"),
    [
        ("12", None, "12"),
        ("12@cm_4", None, "12@cm_4"),
        ("12[].pbs-srv", None, "12[].pbs-srv"),
        ("12_3@cm4", 3, "12_3@cm4"),
        ("12_[3-7:2]@cm4", 3, "12_3@cm4"),
        ("12[10].pbs-srv", 10, "12[10].pbs-srv"),
        ("12[10-12:2].pbs-srv", 10, "12[10].pbs-srv"),
    ],
)
def test_tasks_of_an_array_have_an_index(job_id: str, index: int | None, first: str) -> None:
    assert (task_index(job_id), one_task(job_id)) == (index, first)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:00", 0),
        ("1-02:03:04", 93784),
        ("10:12", 612),
        ("UNLIMITED", None),
        ("", None),
        ("-1:00:00", None),
        ("99999999999999:00:00", None),
    ],
)
def test_durations_are_parsed_to_seconds(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds
