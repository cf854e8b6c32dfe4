"""The HTML page in a browser without a network."""

import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from ddp_hpc.trace.event_names import shortened
from ddp_hpc.trace.html_page import page
from ddp_hpc.trace.html_timeline import MAX_RANKS
from ddp_hpc.trace.summarize_run import read_capture

from .browser import chromium, open_page
from .captures import ENDLESS, HOSTILE, KERNEL, hostile, made, on_device
from .made import annotation, event, launch, training, write

pytestmark = pytest.mark.check
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


@pytest.fixture
def named(shown, tmp_path):
    """The page of a trace with operators, annotations and kernels."""
    return shown(read_capture(write(tmp_path / "rank0.json", training())))


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


def test_the_page_loads_without_a_network_and_requests_nothing(four):
    expect(bars(four, "mean")).not_to_have_count(0)
    assert four.problems == []


def test_long_kernel_names_are_shown_without_common_parts_and_whole_on_hover(gpus):
    cell = gpus.page.locator("tbody th", has_text="vectorized_element").first
    assert cell.text_content() == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >"
    assert cell.get_attribute("title") == KERNEL


def test_the_page_of_a_device_begins_with_the_warning_and_says_what_the_device_waits_for(gpus):
    assert gpus.problems == []
    assert gpus.page.locator("main > *").first.text_content().startswith("Warning: worker1.pt.trace.json")
    section = gpus.page.locator("section", has_text="What the device waits for")
    headings = section.locator("thead th:first-child").all_text_contents()
    assert [heading.strip() for heading in headings] == [
        "idle device, ms", "critical path of step 4: 250 ms, from rank 0 to rank 1",
    ]  # fmt: skip


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
    expect(bars(four, "mean")).to_have_count(5)  # parts that are not 0
    expect(bars(four, "ranks0")).to_have_count(4 * 5)
    expect(bars(four, "timeline0")).to_have_count(4 * 3 * (4 + 3))  # regions and all_reduces


def test_dragging_zooms_the_timeline_and_a_double_click_shows_all(four):
    (begin, end), num_bars = shown_range(four), bars(four, "timeline0").count()
    tenth = (end - begin) / 10
    zoomed = drag(four, "timeline0", 0.4, 0.6)
    assert zoomed == pytest.approx([begin + 4 * tenth, begin + 6 * tenth], abs=tenth / 10)
    expect(bars(four, "timeline0")).not_to_have_count(num_bars)  # bars outside the visible range are removed
    four.page.wait_for_timeout(400)  # or the press of the drag would be the first click of a double-click
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


def test_each_part_of_the_timeline_has_the_number_of_its_step(shown):
    opened = shown(made(2, num_steps=100))
    labels = opened.page.locator("#timeline0 .annotation-text")
    boxes = [label.bounding_box() for label in labels.all()]
    assert labels.all_text_contents()[:2] == ["step", "3"]
    assert all(one["x"] + one["width"] <= other["x"] for one, other in pairwise(boxes))
    assert len(boxes) > 20
    opened.page.get_by_role("combobox").select_option("50")
    opened.page.get_by_role("button", name="zoom in").press("Enter")
    expect(labels).to_have_text(["step", "50"])


def test_hovering_shows_rank_step_kind_and_size(four):
    bars(four, "timeline0").first.scroll_into_view_if_needed()
    label = four.page.locator("#timeline0 .hoverlayer .hovertext")
    # Collectives are drawn last, the longest first.
    box = bars(four, "timeline0").nth(4 * 3 * 4).bounding_box()
    four.page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    label.wait_for()
    text = label.text_content()
    waited = "all_reduce, 1.0 MiB, 4 ranks, 60.4 ms of it waiting for rank 2 (host)"
    for part in (waited, "rank 0, step 5", " ms from "):
        assert part in text


def bar(opened, text):
    """Returns the first bar that contains the text."""
    return bars(opened, "timeline0").filter(has_text=text).first


def click(opened, text):
    """Clicks the middle of the bar, and returns what the page has searched and found."""
    bars(opened, "timeline0").first.scroll_into_view_if_needed()
    box = bar(opened, text).bounding_box()
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    output = opened.page.locator("[data-for=timeline0] output")
    expect(output).not_to_be_empty()
    search = opened.page.get_by_role("searchbox", name="find").input_value()
    return search, output.text_content()


def test_bars_contain_their_names_without_namespaces(named):
    assert named.problems == []
    texts = [text for text in bars(named, "timeline0").all_text_contents() if text]
    assert {"attention block", "aten::linear", "aten::copy_"} <= set(texts)
    assert named.page.locator("#timeline0 .ytick text").all_text_contents() == [
        "rank 0, host: annotations", "host: operators", "host: runtime calls", "device: kernels",
        "device: busy",
    ]  # fmt: skip


def marked(opened):
    paint = "bars => bars.filter(bar => getComputedStyle(bar.querySelector('path')).opacity == 1).length"
    return bars(opened, "timeline0").evaluate_all(paint)


def test_a_click_on_an_operator_finds_its_calls_and_kernels(named):
    assert click(named, "aten::linear") == ("", "1 operator, 2 runtime calls, 2 kernels")
    assert marked(named) == 5


def test_a_click_on_a_kernel_finds_the_call_and_the_operators_that_launched_it(named):
    assert click(named, "sgemm") == ("", "1 annotation, 2 operators, 1 runtime call, 1 kernel")


def test_a_click_on_a_call_finds_its_operators_and_its_kernel(shown, tmp_path):
    call, kernel = launch(1, 5, "sgemm", 1000, 600)
    events = [event("cpu_op", "aten::mm", 0, 900), call | {"dur": 800}, kernel]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    assert click(opened, "cudaLaunchKernel") == ("", "1 operator, 1 runtime call, 1 kernel")


def test_a_click_on_a_collective_finds_the_call_and_the_operator_that_launched_it(shown, tmp_path):
    call, kernel = launch(1, 5, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1000, 600)
    events = [event("cpu_op", "c10d::allreduce_", 0, 900), call | {"dur": 800}, kernel]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    found = "1 collective, 1 operator, 1 runtime call"
    assert click(opened, "all_reduce") == ("", found)
    label = opened.page.locator("#timeline0 .hoverlayer .hovertext")
    assert "launched in c10d::allreduce_" in label.text_content()
    assert click(opened, "c10d::allreduce_") == ("", found)


def test_calls_that_block_are_found_by_their_name_and_operator(named):
    named.page.get_by_role("searchbox", name="find").fill("cudaLaunchKernel in aten::linear")
    assert named.page.locator("[data-for=timeline0] output").text_content() == "2 runtime calls"


def test_the_names_of_pale_bars_are_readable(named):
    named.page.get_by_role("searchbox", name="find").fill("sgemm")
    text = bar(named, "attention block").locator("text")
    expect(text).to_have_css("fill", "rgb(118, 131, 144)")


def test_a_click_on_a_row_finds_its_name_in_the_timeline(named):
    named.page.get_by_role("button", name="aten::addmm", exact=True).last.click()
    assert named.page.get_by_role("searchbox", name="find").input_value() == "aten::addmm"
    output = named.page.locator("[data-for=timeline0] output")
    assert output.text_content() == "1 operator, 2 runtime calls, 2 kernels"


def test_a_row_with_a_long_name_finds_its_kernel(shown, tmp_path):
    long = KERNEL.replace("CUDAFunctor_add", "Functor" * 20)
    opened = shown(read_capture(write(tmp_path / "rank0.json", launch(1, 5, long, 100, 60))))
    rows = opened.page.locator("tbody th button", has_text="vectorized_elementwise_kernel")
    rows.first.click()
    assert opened.page.locator("[data-for=timeline0] output").text_content() == "1 kernel"


def test_short_bars_are_joined_instead_of_omitted(shown, tmp_path):
    """Each operator takes a thousandth of a pixel, and another one as much as all of them."""
    events = [event("cpu_op", "aten::long", 0, 1e6), event("cpu_op", "aten::short", 1.5e6, 1)]
    events += [event("cpu_op", "aten::short", 1e6 + 20 * at, 1) for at in range(5000)]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    boxes = sorted((one.bounding_box() for one in bars(opened, "timeline0").all()), key=lambda box: box["x"])
    assert len(boxes) < 60
    joined = [box for box in boxes[1:-1] if box["width"] > 1]
    assert sum(box["width"] for box in joined) == pytest.approx(boxes[0]["width"] / 10, rel=0.05)


def test_times_are_relative_to_the_selected_step(four):
    ticks = four.page.locator("#timeline0 .xtick text")
    title = four.page.locator("#timeline0 .xtitle")
    assert title.text_content() == "milliseconds"
    four.page.get_by_role("combobox").select_option("4")
    expect(title).to_have_text("milliseconds since the start of step 4")
    assert ticks.first.text_content() == "0"


def test_the_timeline_is_moved_and_zoomed_by_keys(four):
    begin, end = shown_range(four)
    chart = four.page.locator("#timeline0")
    chart.focus()
    chart.press("+")
    quarter = (end - begin) / 4
    assert shown_range(four) == pytest.approx([begin + quarter, end - quarter])
    chart.press("ArrowRight")
    assert shown_range(four) == pytest.approx([begin + 2 * quarter, end])
    chart.press("0")
    assert shown_range(four) == pytest.approx([begin, end])


def test_a_step_includes_the_host_that_is_ahead_of_the_device(shown, tmp_path):
    events = []
    for number in range(3):
        events += [annotation(f"ProfilerStep#{number}", 100 * number, 100)]
        events += [event("cpu_op", f"aten::op{number}", 100 * number, 50)]
        events += launch(number, 100 * number + 10, "sgemm", 400 * number + 50, 380)
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    opened.page.get_by_role("combobox").select_option("2")
    assert shown_range(opened) == pytest.approx([0.2, 1.23])
    opened.page.get_by_role("searchbox", name="find").fill("op2")
    output = opened.page.locator("[data-for=timeline0] output")
    assert output.text_content() == "1 operator, 1 runtime call, 1 kernel"


def test_a_search_finds_names_and_shows_one_after_the_other(named):
    search = named.page.get_by_role("searchbox", name="find")
    search.fill("SGEMM")
    output = named.page.locator("[data-for=timeline0] output")
    assert output.text_content() == "2 kernels"
    named.page.get_by_role("button", name="next").press("Enter")
    first = shown_range(named)
    assert first[0] < 0.1 < 0.16 < first[1] < 0.6
    named.page.get_by_role("button", name="next").press("Enter")
    assert shown_range(named)[0] == pytest.approx(0.6 - 4 * 0.007)
    named.page.get_by_role("button", name="next").press("Enter")
    assert shown_range(named) == pytest.approx(first)
    search.fill("aten::softmax")
    assert output.text_content() == "0 found; the timeline shows the longest 14 of 15 events"
    search.fill("matrix products")
    assert output.text_content() == "3 kernels"
    search.fill("")
    assert output.text_content() == ""


def test_next_and_previous_begin_at_the_visible_part_and_name_the_longest(shown, tmp_path):
    events = [
        one for at in range(4) for one in launch(at, 100 * at, "sgemm", 100 * at + 10, 20 + 5 * (at == 1))
    ]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    opened.page.get_by_role("searchbox", name="find").fill("sgemm")
    output = opened.page.locator("[data-for=timeline0] output")
    opened.page.evaluate("Plotly.relayout('timeline0', {'xaxis.range': [0.15, 0.4]})")
    for key, expected in [("n", 3), ("n", 4), ("p", 3), ("p", 2), ("p", 1), ("p", 4)]:
        opened.page.locator("#timeline0").press(key)
        assert output.text_content() == f"{expected} of 4, the longest is 2 (0.025 ms)"


def test_the_names_of_bars_that_overlap_do_not(shown, tmp_path):
    for rank in range(9):  # one level in each lane
        events = [annotation("outer " * 20, 0, 1000), annotation("inner", 400, 590)]
        write(tmp_path / f"rank{rank}.json", events, rank, 9)
    opened = shown(read_capture(tmp_path))
    outer, inner = (bar(opened, text).locator("text").bounding_box() for text in ("outer", "inner"))
    assert outer["x"] + outer["width"] <= inner["x"]
    opened.page.evaluate("Plotly.relayout('timeline0', {'xaxis.range': [0.5, 0.9]})")
    texts = [text for text in bars(opened, "timeline0").all_text_contents() if text]
    assert texts == ["inner"] * 9


def test_a_search_is_limited_to_the_selected_step(shown, tmp_path):
    events = []
    for number, at in enumerate((0, 100, 200)):
        events += [
            annotation(f"ProfilerStep#{number}", at, 100),
            *launch(number, at + 10, "sgemm", at + 20, 50),
        ]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    output = opened.page.locator("[data-for=timeline0] output")
    opened.page.get_by_role("searchbox", name="find").fill("sgemm")
    assert output.text_content() == "3 kernels"
    opened.page.get_by_role("combobox").select_option("1")
    assert output.text_content() == "1 kernel"
    opened.page.get_by_role("button", name="next", exact=True).press("Enter")
    assert shown_range(opened) == pytest.approx([0, 0.12 + 5 * 0.05])
    opened.page.get_by_role("button", name="all", exact=True).press("Enter")
    assert (opened.page.get_by_role("combobox").input_value(), output.text_content()) == ("", "3 kernels")


def test_a_collective_is_found_by_its_name_and_by_that_of_its_kernel(shown, tmp_path):
    kernel = f"ncclKernel_SendRecv_RING<{'T' * 200}>"
    events = [annotation("nccl:all_to_all", 10, 5), *launch(1, 11, kernel, 20, 50)]
    opened = shown(read_capture(write(tmp_path / "rank0.json", events)))
    for name in ("SendRecv", "all_to_all", shortened(kernel, 160)):
        opened.page.get_by_role("searchbox", name="find").fill(name)
        assert "1 collective" in opened.page.locator("[data-for=timeline0] output").text_content()


def test_hovering_over_a_kernel_shows_what_launched_it(named):
    bars(named, "timeline0").first.scroll_into_view_if_needed()
    box = bar(named, "sgemm").bounding_box()
    named.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = named.page.locator("#timeline0 .hoverlayer .hovertext")
    label.wait_for()
    text = label.text_content()
    assert "sgemm (device, matrix products)" in text
    assert "launched in attention block> aten::linear> aten::addmm" in text


def test_hovering_over_a_kernel_shows_its_grid_and_registers(shown, tmp_path):
    call, kernel = launch(1, 5, "sgemm", 10, 600)
    kernel["args"] |= {"grid": [80, 1, 1], "registers per thread": 32}
    opened = shown(read_capture(write(tmp_path / "rank0.json", [call, kernel])))
    bars(opened, "timeline0").first.scroll_into_view_if_needed()
    box = bar(opened, "sgemm").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = opened.page.locator("#timeline0 .hoverlayer .hovertext")
    label.wait_for()
    assert "grid 80 x 1 x 1, 32 registers per thread" in label.text_content()


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
    expect(bars(opened, "mean")).to_have_count(2 * 5)
    expect(bars(opened, "ranks0")).to_have_count(256 * 5)
    assert opened.page.locator("#timeline0 .ytick text").count() == MAX_RANKS - 1
    assert opened.page.locator("#timeline1 .ytick text").count() == 4 * 2, "a label for each lane"
    assert opened.page.locator("tbody", has_text="nid001063").locator("tr").count() == 256
    assert overflow_px(opened) == 0
    assert drag(opened, "ranks0", 0.25, 0.5) == pytest.approx([63.5, 127.5], abs=2)
