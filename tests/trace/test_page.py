"""The HTML page: its contents, and its behavior in a browser without a network."""

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import expect
from plotly.offline import get_plotlyjs

from ddp_hpc.base.errors import RequestError
from ddp_hpc.trace.html_page import page
from ddp_hpc.trace.html_timeline import MAX_RANKS, timeline
from ddp_hpc.trace.input_and_output import PAGE_BEGINS
from ddp_hpc.trace.tables import collectives

from .browser import REQUIRE, chromium, open_page
from .captures import ENDLESS, HOSTILE, KERNEL, hostile, made, on_device

expect.set_options(timeout=30_000)  # drawing is slow on a busy machine
# All tests share one process and thus one browser.


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shown(browser, tmp_path_factory):
    """Writes the captures' page to a file and opens it."""

    def show(*captures, sentences=(), **window):
        file = tmp_path_factory.mktemp("page") / "report.html"
        file.write_text(page(captures, sentences), encoding="utf-8")
        return open_page(browser, file, **window)

    return show


@pytest.fixture(scope="module")
def four_once(shown):
    return shown(made())


@pytest.fixture
def four(four_once):
    """The page of four ranks and three steps, in its initial state."""
    yield four_once
    four_once.page.emulate_media(color_scheme="light", media="screen")
    four_once.page.set_viewport_size({"width": 1280, "height": 900})
    four_once.page.get_by_role("button", name="all", exact=True).click()


@pytest.fixture(scope="module")
def bad(shown):
    return shown(hostile(), sentences=[HOSTILE, ENDLESS])


@pytest.fixture(scope="module")
def gpus(shown):
    return shown(on_device())


def bars(opened, chart):
    return opened.page.locator(f"#{chart} .bars .point")


def shown_range(opened, chart="timeline0"):
    return opened.page.evaluate("(id) => document.getElementById(id).layout.xaxis.range", chart)


def drag(opened, chart, begin, end):
    """Drags over a part of the chart, given as fractions of its width, and returns the visible range."""
    area = opened.page.locator(f"#{chart} .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    across = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + begin * box["width"], across)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + end * box["width"], across, steps=5)
    opened.page.mouse.up()
    return shown_range(opened, chart)


def overflow_px(opened):
    return opened.page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_the_page_begins_with_the_mark_of_the_command():
    assert page([made()], []).encode().startswith(PAGE_BEGINS)


def test_the_page_without_plotly_is_small():
    assert len(page([made()], [])) - len(get_plotlyjs()) < 50_000


def test_a_missing_plotly_is_reported_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RequestError, match=re.escape("pip install 'msgspec>=")):
        page([made()], [])


def test_unpaired_surrogates_can_be_written(tmp_path: Path):
    (tmp_path / "report.html").write_text(page([hostile()], [HOSTILE]), encoding="utf-8")


def test_of_many_ranks_the_slowest_and_fastest_are_shown_with_a_note():
    capture = made(num_ranks=256, slow_rank=77)
    lines = timeline(capture)
    assert len(lines.ranks) == MAX_RANKS
    assert 77 in lines.ranks
    assert max(b - a for a, b in pairwise(lines.ranks)) <= 2 * 256 / (MAX_RANKS / 2)
    assert "32 of 256 ranks are shown" in lines.notes[0]


def test_the_shortest_spans_are_omitted_with_a_note():
    capture = made(num_ranks=2, num_steps=2, num_buckets=4, data_s=0.0001)
    whole = timeline(capture)
    assert sum(len(trace["x"]) for trace in whole.figure["data"]) == 2 * 2 * (4 + 4)
    assert whole.notes == ()
    cut = timeline(capture, max_spans=28)
    assert "data" not in [trace["name"] for trace in cut.figure["data"]]
    assert cut.notes == ("The 4 shortest of 32 spans are not shown",)


def test_step_numbers_do_not_overlap():
    layout = timeline(made(num_steps=200)).figure["layout"]
    starts = [note["x"] for note in layout["annotations"]]
    assert 5 < len(starts) < 15
    assert min(b - a for a, b in pairwise(starts)) > 0.05 * layout["xaxis"]["range"][1]


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
    names = [entry.name for entry in timeline(made(2, data_s=0, num_buckets=0)).legend]
    assert names == ["data", "forward", "backward", "optimizer"]
    no_spans = replace(made(1), ranks=tuple(replace(one, spans=()) for one in made(1).ranks))
    assert [entry.name for entry in timeline(no_spans).legend] == ["collective"]


def test_transfers_are_unknown_if_other_ranks_were_not_recorded():
    (row,) = collectives(replace(made(), collectives=made(1).collectives[:1])).rows
    assert row["transfer_s"] is not None, "a single rank does not wait"
    alone = replace(made().collectives[0], is_transfer_known=False)
    (row,) = collectives(replace(made(), collectives=(alone,))).rows
    assert (row["transfer_s"], row["busbw"]) == (None, None)


def test_unknown_values_are_shown_as_a_dash():
    table = collectives(made())
    row = dict(table.rows[0], bytes=0, busbw=None)
    cells = {column.field: table.write(column, row) for column in table.columns}
    assert (cells["bytes"], cells["busbw"], cells["num_ranks"]) == ("-", "-", "4")


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_browser_is_reported_with_the_command_to_install_it(monkeypatch, required, outcome):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(REQUIRE, required)
    with pytest.raises(outcome, match="apt-get install chromium"), chromium():
        pass


def test_the_page_loads_without_a_network_and_requests_nothing(four):
    expect(bars(four, "mean")).not_to_have_count(0)
    assert four.problems == []


def test_long_kernel_names_are_cut_in_the_middle_with_the_whole_name_on_hover(gpus):
    cell = gpus.page.locator("tbody th", has_text="vectorized_element").first
    text = cell.text_content()
    assert len(text) == 60
    assert text.startswith("at::native::vectorized")
    assert "..." in text
    assert text.endswith("Array<char*, 3> >")
    assert cell.get_attribute("title") == KERNEL


def test_the_page_of_a_device_begins_with_the_warning_and_says_what_the_device_waits_for(gpus):
    assert gpus.problems == []
    assert gpus.page.locator("main > *").first.text_content().startswith("Warning: worker1.pt.trace.json")
    section = gpus.page.locator("section", has_text="What the device waits for")
    headings = section.locator("thead th:first-child").all_text_contents()
    assert [heading.strip() for heading in headings] == [
        "idle device, ms", "critical path of step 4", "launches per step",
    ]  # fmt: skip


def test_the_toolbar_is_shown_only_on_hover_in_readable_colors(gpus):
    bar = gpus.page.locator("#mean .modebar-group").first
    gpus.page.mouse.move(0, 0)
    expect(bar).to_have_css("opacity", "0")
    gpus.page.locator("#mean").hover()
    expect(bar).to_have_css("opacity", "1")
    color = "getComputedStyle(document.querySelector('#mean .modebar-btn:not(.active) path')).fill"
    assert gpus.page.evaluate(color) == "rgb(87, 96, 106)"


def test_requests_and_errors_are_detected(browser, tmp_path):
    file = tmp_path / "other.html"
    file.write_text("<img src='http://127.0.0.1:9/a.png'><script>throw Error('planted')</script>")
    problems = open_page(browser, file).problems
    assert "request: http://127.0.0.1:9/a.png" in problems
    assert "error: planted" in problems


def test_no_control_of_the_page_opens_an_address(shown):
    page = shown(made()).page
    page.evaluate(
        "window.addresses = []; window.open = (address) => { addresses.push(address); return null; }"
    )
    buttons = page.locator(".modebar-btn")
    titles = {buttons.nth(i).get_attribute("data-title") for i in range(buttons.count())}
    assert titles == {"Download plot as a PNG", "Pan", "Zoom"}
    for i in range(buttons.count()):
        buttons.nth(i).evaluate("button => button.click()")
    links = "[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"
    assert page.evaluate(f"[...addresses, ...{links}].filter(a => a && a[0] != '#')") == []


def test_the_charts_have_a_bar_for_each_part_rank_and_span(four):
    expect(bars(four, "mean")).to_have_count(
        5 + 2
    )  # parts that are not 0, and communication exposed and hidden
    expect(bars(four, "ranks0")).to_have_count(4 * (5 + 2))
    expect(bars(four, "timeline0")).to_have_count(4 * 3 * (4 + 3))  # regions and all_reduces


def test_dragging_zooms_the_timeline_and_a_double_click_shows_all(four):
    (begin, end), num_bars = shown_range(four), bars(four, "timeline0").count()
    tenth = (end - begin) / 10
    zoomed = drag(four, "timeline0", 0.4, 0.6)
    assert zoomed == pytest.approx([begin + 4 * tenth, begin + 6 * tenth], abs=tenth / 10)
    expect(bars(four, "timeline0")).not_to_have_count(num_bars)  # bars outside the visible range are removed
    four.page.locator("#timeline0 .nsewdrag").dblclick()
    expect(bars(four, "timeline0")).to_have_count(num_bars)
    assert shown_range(four) == pytest.approx([begin, end])


def test_the_timeline_can_be_controlled_with_the_keyboard(four):
    whole = shown_range(four)
    step = four.page.get_by_role("combobox")
    step.select_option("4")
    begin, end = shown_range(four)
    assert whole[0] < begin < end < whole[1]
    four.page.get_by_role("button", name="zoom in").press("Enter")
    assert shown_range(four) == pytest.approx([begin + (end - begin) / 4, end - (end - begin) / 4])
    four.page.get_by_role("button", name="all", exact=True).press("Enter")
    assert step.input_value() == ""
    assert shown_range(four) == pytest.approx(whole)


def test_hovering_shows_rank_step_kind_and_size(four):
    bars(four, "timeline0").first.scroll_into_view_if_needed()
    label = four.page.locator("#timeline0 .hoverlayer .hovertext")
    # Collectives are drawn last, and their first bar is that of rank 0 in step 3.
    box = bars(four, "timeline0").nth(4 * 3 * 4).bounding_box()
    four.page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    label.wait_for()
    text = label.text_content()
    for part in ("all_reduce, 1.0 MiB, 4 ranks (host)", "rank 0, step 3", " ms from "):
        assert part in text


def test_clicking_a_heading_sorts_its_table_and_reverses_the_order(four):
    heading = four.page.get_by_role("columnheader", name=re.compile("^self ms"))
    first = four.page.locator("table", has=heading).locator("tbody th").first
    heading.get_by_role("button").click()
    assert (first.text_content(), heading.get_attribute("aria-sort")) == ("aten::addmm", "descending")
    heading.get_by_role("button").click()
    assert (first.text_content(), heading.get_attribute("aria-sort")) == ("aten::copy_", "ascending")


def test_text_is_light_in_dark_mode_including_charts(four):
    color = "getComputedStyle(document.querySelector('#ranks0 .xtick text')).fill"
    assert four.page.evaluate(color) == "rgb(27, 31, 36)"
    four.page.emulate_media(color_scheme="dark")
    assert four.page.evaluate(color) == "rgb(230, 237, 243)"


def test_printing_uses_light_mode_without_controls_and_with_complete_tables(four):
    four.page.emulate_media(media="print", color_scheme="dark")
    assert four.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    assert not four.page.get_by_role("button", name="zoom in").is_visible()
    heights = "[...document.querySelectorAll('.box')].map((box) => getComputedStyle(box).maxHeight)"
    assert set(four.page.evaluate(heights)) == {"none"}


def test_names_in_traces_are_shown_as_text_and_not_executed(bad):
    assert bad.page.evaluate("window.ran") is None
    assert bad.problems == []
    assert bad.page.locator("h1").text_content().startswith("<b>b</b><script>window.ran=1</script><img src=x")
    # Plotly would interpret <b> and <a> in a label as markup.
    assert (
        bad.page.locator("#mean .xtick text")
        .text_content()
        .startswith("<b>b</b><script>window.ran=1</script>")
    )
    assert bad.page.locator("img, main script").count() == 0


def test_charts_are_drawn_despite_non_finite_numbers(bad):
    expect(bars(bad, "timeline0")).to_have_count(2 * 2 * (4 + 3))


@pytest.mark.parametrize("name", ["four", "bad"])
def test_nothing_is_wider_than_a_phone(name, request):
    opened = request.getfixturevalue(name)
    opened.page.set_viewport_size({"width": 390, "height": 844})
    try:
        expect(opened.page.locator("#mean .main-svg").first).to_have_css("width", re.compile("3[0-9]{2}px"))
        assert overflow_px(opened) == 0
        for chart in opened.page.locator(".chart").all():
            assert chart.locator(".main-svg").first.bounding_box() == chart.bounding_box()
    finally:
        opened.page.set_viewport_size({"width": 1280, "height": 900})


def test_hundreds_of_ranks_compared_with_another_capture(shown):
    opened = shown(made(256, 1, name="after"), made(name="before"), sentences=["Forward takes less."])
    assert opened.problems == []
    assert opened.page.locator("section").first.inner_text().split("\n")[-1] == "Forward takes less."
    expect(bars(opened, "mean")).to_have_count(2 * (5 + 2))
    expect(bars(opened, "ranks0")).to_have_count(256 * (5 + 2))
    assert opened.page.locator("#timeline0 .ytick text").count() == MAX_RANKS
    assert opened.page.locator("#timeline1 .ytick text").count() == 4 * 2, "a label for each lane"
    assert opened.page.locator("tbody", has_text="nid001063").locator("tr").count() == 256
    assert overflow_px(opened) == 0
    assert drag(opened, "ranks0", 0.25, 0.5) == pytest.approx([63.5, 127.5], abs=2)
