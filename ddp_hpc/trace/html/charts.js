"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: "hover",
  // The buttons are listed by name, because some of Plotly's default buttons upload the chart to its company.
  modeBarButtons: [["zoom2d", "pan2d", "toImage"]],
  plotlyServerURL: "",
};
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

for (const [id, figure] of Object.entries(figures)) {
  const div = document.getElementById(id);
  if (id.startsWith("timeline")) drawTimeline(div, figure);
  else Plotly.newPlot(div, figure.data, figure.layout, config);
}

// Redrawing ten thousand bars is slow, so only the visible ones and half that range on each side are drawn.
function drawTimeline(div, figure) {
  const whole = figure.layout.xaxis.range.slice();
  const inSight = ([from, to]) => figure.data.map((trace) => pick(trace, figure.ranks, 1.5 * from - to / 2, 1.5 * to - from / 2));
  let drawn = String(whole);
  Plotly.newPlot(div, inSight(whole), figure.layout, { ...config, doubleClick: false });
  div.on("plotly_relayout", () => {
    const range = div.layout.xaxis.range;
    if (String(range) === drawn) return;
    drawn = String(range);
    Plotly.react(div, inSight(range), div.layout);
  });
  // Plotly's own double-click handler would return to the range that was drawn last.
  div.on("plotly_doubleclick", () => show(...whole));
  const show = (from, to) => Plotly.relayout(div, { "xaxis.range": [from, to] });
  const controls = document.querySelector(`[data-for=${div.id}]`);
  const step = controls.querySelector("select");
  step.addEventListener("change", () => show(...(step.value ? step.value.split(",").map(Number) : whole)));
  for (const button of controls.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const [from, to] = div.layout.xaxis.range;
      const { scale, shift } = button.dataset;
      if (!scale) {
        step.value = "";
        return show(...whole);
      }
      const middle = (from + to) / 2 + shift * (to - from);
      return show(middle - (scale * (to - from)) / 2, middle + (scale * (to - from)) / 2);
    });
  }
}

function pick(trace, ranks, from, to) {
  const kept = [...trace.base.keys()].filter((i) => trace.base[i] <= to && trace.base[i] + trace.x[i] >= from);
  const of = (values) => kept.map((i) => values[i]);
  const { step, what, texts, lane } = trace.meta;
  const number = numbers.format;
  const hovertext = kept.map((i) =>
    `${texts[what[i]]} (${lane.split(":")[0]})<br>rank ${ranks[Math.round(trace.y[i])]}, ` +
    `${step[i] === null ? "outside of steps" : `step ${step[i]}`}<br>` +
    `${number(trace.x[i])} ms from ${number(trace.base[i])} ms`);
  return { ...trace, base: of(trace.base), x: of(trace.x), y: of(trace.y), hovertext, hoverinfo: "text", meta: null };
}

// Clicking a heading sorts the table by it, numbers in descending order; a second click reverses the order.
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
      ? (a, b) => key(a).dataset.value - key(b).dataset.value || 0
      : (a, b) => key(a).textContent.localeCompare(key(b).textContent);
    const rows = [...body.rows].sort(compare);
    body.append(...(order === "ascending" ? rows : rows.reverse()));
  });
}

// Closed <details> elements would not be printed.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
