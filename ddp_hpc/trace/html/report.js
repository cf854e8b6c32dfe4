"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

for (const [id, figure] of Object.entries(figures)) {
  const div = document.getElementById(id);
  if (id.startsWith("timeline")) drawTimeline(div, figure);
  else Plotly.newPlot(div, figure.data, figure.layout, config);
}

// A bar for each span is slow to redraw by the ten thousand: only those in sight are, and as much to each side.
function drawTimeline(div, figure) {
  const whole = figure.layout.xaxis.range.slice();
  const inSight = ([from, to]) => figure.data.map((trace) => pick(trace, figure.ranks, 2 * from - to, 2 * to - from));
  let drawn = String(whole);
  Plotly.newPlot(div, inSight(whole), figure.layout, config);
  div.on("plotly_relayout", () => {
    const range = div.layout.xaxis.range;
    if (String(range) === drawn) return;
    drawn = String(range);
    Plotly.react(div, inSight(range), div.layout, config);
  });
  const show = (from, to) => Plotly.relayout(div, { "xaxis.range": [from, to] });
  const controls = document.querySelector(`[data-for=${div.id}]`);
  controls.querySelector("select").addEventListener("change", (event) => {
    const [from, to] = event.target.value ? event.target.value.split(",").map(Number) : whole;
    show(from, to);
  });
  for (const button of controls.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const [from, to] = div.layout.xaxis.range;
      const scale = Number(button.dataset.scale || 1);
      const middle = (from + to) / 2 + Number(button.dataset.shift || 0) * (to - from);
      show(middle - (scale * (to - from)) / 2, middle + (scale * (to - from)) / 2);
    });
  }
}

function pick(trace, ranks, from, to) {
  const kept = [...trace.base.keys()].filter((i) => trace.base[i] <= to && trace.base[i] + trace.x[i] >= from);
  const of = (values) => kept.map((i) => values[i]);
  const { step, what, texts } = trace.meta;
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 3 });
  const hovertext = kept.map((i) =>
    `${texts[what[i]]}<br>rank ${ranks[Math.round(trace.y[i])]}, ` +
    `${step[i] === null ? "outside of steps" : `step ${step[i]}`}<br>` +
    `${number(trace.x[i])} ms from ${number(trace.base[i])} ms`);
  return { ...trace, base: of(trace.base), x: of(trace.x), y: of(trace.y), hovertext, hoverinfo: "text", meta: null };
}

// A table is sorted by the heading that is pressed; once more turns it round. Numbers begin with the largest.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const first = heading.classList.contains("n") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = heading.getAttribute("aria-sort") === first ? other : first;
    for (const one of heading.parentElement.children) one.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const body = heading.closest("table").tBodies[0];
    const key = (row) => row.cells[heading.cellIndex];
    const compare = heading.classList.contains("n")
      ? (a, b) => key(a).dataset.value - key(b).dataset.value
      : (a, b) => key(a).textContent.localeCompare(key(b).textContent);
    const rows = [...body.rows].sort(compare);
    body.append(...(order === "ascending" ? rows : rows.reverse()));
  });
}

// Closed details would not be printed.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
