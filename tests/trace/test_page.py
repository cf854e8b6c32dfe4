"""The contents of the HTML page; test_browser.py has its behavior in a browser."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.trace.html_page import page
from ddp_hpc.trace.html_timeline import MAX_RANKS, timeline
from ddp_hpc.trace.summarize_run import read_capture
from ddp_hpc.trace.tables import collectives

from .browser import REQUIRE, chromium
from .captures import HOSTILE, hostile, made, on_device
from .made import annotation, event, write


def test_a_missing_plotly_is_reported_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RequestError, match=re.escape("pip install '.[report]'")):
        page([made()], [])


def test_a_browser_parses_the_script_of_plotly_only_once():
    text = page([made()], [])
    assert text.count("* plotly.js v") == text.count('"use strict";var Plotly=') == 1
    assert "factory()" not in text


def test_unpaired_surrogates_can_be_written(tmp_path: Path):
    (tmp_path / "report.html").write_text(page([hostile()], [HOSTILE]), encoding="utf-8")


def test_of_many_ranks_the_slowest_and_fastest_are_shown_with_a_note():
    capture = made(num_ranks=256, slow_rank=77)
    lines = timeline(capture)
    ranks, work_s = lines.figure["ranks"], [mean.own_s for mean in capture.rank_means]
    assert len(ranks) == MAX_RANKS - 1
    assert 77 in ranks, "the slowest"
    shortest_s = min(work_s[rank] for rank in ranks)
    assert shortest_s == min(work_s)
    assert "31 of 256 ranks are shown" in lines.notes[0]


def test_the_shortest_bars_are_omitted_with_a_note():
    capture = made(num_ranks=2, num_steps=2, num_buckets=4, data_s=0.0001)
    whole = timeline(capture)
    assert sum(len(trace["x"]) for trace in whole.figure["data"]) == 2 * 2 * (4 + 4)
    assert whole.notes == ()
    cut = timeline(capture, max_bars=28)
    assert "data" not in [trace["name"] for trace in cut.figure["data"]]
    assert cut.notes == ("The 4 shortest of 32 bars are not shown",)


def test_an_annotation_that_is_a_region_of_the_host_is_in_one_lane(tmp_path):
    events = [annotation("ProfilerStep#1", 0, 100), annotation("attn(B)", 10, 50)]
    capture = read_capture(write(tmp_path / "rank0.json", [*events, event("cpu_op", "aten::mm", 20, 5)]))
    names = [trace["name"] for trace in timeline(capture).figure["data"]]
    assert names == ["backward", "operator"]


@pytest.mark.parametrize(("num_ranks", "num_levels"), [(1, 4), (4, 3), (9, 1)])
def test_all_lanes_have_the_same_largest_number_of_levels(tmp_path, num_ranks, num_levels):
    for rank in range(num_ranks):
        events = [annotation(f"part {at}", at, 100 - 2 * at) for at in range(6)]
        events += [event("cpu_op", f"aten::op{at}", 10 + at, 50 - 2 * at) for at in range(6)]
        write(tmp_path / f"rank{rank}.json", events, rank, num_ranks)
    lanes = timeline(read_capture(tmp_path)).lanes
    assert {lane.title: lane.num_levels for lane in lanes} == {
        "host: annotations": num_levels, "host: operators": num_levels,
    }  # fmt: skip


def test_times_of_the_timeline_are_relative_to_its_first_step():
    data = timeline(made(slow_rank=None, data_s=0.010)).figure["data"]
    forward = next(trace for trace in data if trace["name"] == "forward")
    assert forward["base"][0] == pytest.approx(13.0)  # rank 0's first load takes 1.3 times 10 ms
    assert forward["x"][0] == pytest.approx(80.0)


def test_every_lane_says_whether_it_shows_the_host_or_the_device():
    on_host, device = timeline(made(2)), timeline(on_device())
    assert [lane.title for lane in on_host.lanes] == ["host: regions", "host: collectives"]
    assert [lane.title for lane in device.lanes] == [
        "host: data", "device: regions", "device: collectives", "device: busy",
    ]  # fmt: skip
    labels = device.figure["layout"]["yaxis"]["ticktext"]
    assert labels[:5] == [
        "rank 0, host: data", "device: regions", "device: collectives", "device: busy", "rank 1, host: data",
    ]  # fmt: skip
    assert {trace["meta"]["lane"] for trace in device.figure["data"]} == {lane.title for lane in device.lanes}


def test_the_busy_lane_shows_when_the_device_did_something():
    capture = on_device()
    busy = next(trace for trace in timeline(capture).figure["data"] if trace["name"] == "device busy")
    assert len(busy["x"]) == 2 * 3
    assert busy["x"][0] == pytest.approx(190)
    assert busy["meta"]["step"] == [3, 4, 5] * 2


def test_the_legend_of_the_timeline_lists_only_what_it_shows():
    names = [trace["name"] for trace in timeline(made(2, data_s=0, num_buckets=0)).figure["data"]]
    assert names == ["data", "forward", "backward", "optimizer"]
    no_spans = replace(made(1), ranks=tuple(replace(one, named=()) for one in made(1).ranks))
    assert [trace["name"] for trace in timeline(no_spans).figure["data"]] == ["collective"]


def test_transfers_are_unknown_if_other_ranks_were_not_recorded():
    (row,) = collectives(replace(made(), collectives=made(1).collectives[:1])).rows
    assert row["transfer_s"] is not None, "a single rank does not wait"
    alone = replace(made().collectives[0], transfer_s=None, busbw_bytes_per_s=None)
    (row,) = collectives(replace(made(), collectives=(alone,))).rows
    assert (row["transfer_s"], row["busbw_bytes_per_s"]) == (None, None)


def test_unknown_values_are_shown_as_a_dash():
    table = collectives(made())
    row = dict(table.rows[0], bytes=0, busbw_bytes_per_s=None)
    cells = {column.field: table.write(column, row) for column in table.columns}
    assert (cells["bytes"], cells["busbw_bytes_per_s"], cells["num_ranks"]) == ("-", "-", "4")


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_browser_is_reported_with_the_command_to_install_it(monkeypatch, required, outcome):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(REQUIRE, required)
    with pytest.raises(outcome, match="apt-get install chromium"), chromium():
        pass
