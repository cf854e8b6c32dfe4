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

// Drawing ten thousand bars is slow, so only the longest ones of each kind are drawn, in the visible range and
// half of it on each side. Bars that a search or a click has found take precedence, and all others are pale.
function drawTimeline(div, figure) {
  const whole = figure.layout.xaxis.range.slice();
  const pixels = () => div.clientWidth - 180; // without the labels of the lanes
  const bars = figure.data.filter((trace) => trace.type === "bar");
  const lines = figure.data.slice(bars.length);
  let found = null;
  const inSight = ([from, to]) => [...bars.map((trace, number) =>
    pick(trace, figure.ranks, found && found[number], 1.5 * from - to / 2, 1.5 * to - from / 2, pixels() / (to - from))), ...lines];
  const controls = document.querySelector(`[data-for=${div.id}]`);
  const step = controls.querySelector("select");
  const steps = [...step.options].slice(1).map(({ text, value }) => [text, ...value.split(",").map(Number)]);
  // The labels of the steps in sight, except those that would overlap.
  const labels = ([from, to]) => {
    const width = (70 * (to - from)) / pixels();
    let free = from;
    return steps.flatMap(([number, first, last]) => {
      const x = Math.max(first, from);
      if (x < free || x > to || last < from + (first < from && width)) return [];
      free = x + width;
      return [{ text: `step ${number}`, x, y: 1, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false }];
    });
  };
  const shapes = steps.filter((_, i) => i % Math.ceil(steps.length / 200) === 0).map(([, x]) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { width: 1, dash: "dot" } }));
  const layout = (range) => ({ ...figure.layout, ...div.layout, shapes, annotations: labels(range) });
  let drawn = String(whole);
  Plotly.newPlot(div, inSight(whole), layout(whole), { ...config, doubleClick: false });
  const redraw = () => Plotly.react(div, inSight(div.layout.xaxis.range), layout(div.layout.xaxis.range));
  div.on("plotly_relayout", () => {
    const range = div.layout.xaxis.range;
    if (String(range) === drawn) return;
    drawn = String(range);
    if (drawn === String(whole) && step.value) {
      step.value = "";
      find();
    }
    redraw();
  });
  // Plotly's own double-click handler would return to the range that was drawn last.
  div.on("plotly_doubleclick", () => show(...whole));
  const show = (from, to) => Plotly.relayout(div, { "xaxis.range": [from, to] });
  step.addEventListener("change", () => {
    show(...(step.value ? step.value.split(",").map(Number) : whole));
    find();
  });
  for (const button of controls.querySelectorAll("button:not([data-next])")) {
    button.addEventListener("click", () => {
      const [from, to] = div.layout.xaxis.range;
      const { scale, shift } = button.dataset;
      if (!scale) return show(...whole);
      const middle = (from + to) / 2 + shift * (to - from);
      return show(middle - (scale * (to - from)) / 2, middle + (scale * (to - from)) / 2);
    });
  }
  let matches = [];
  let at = -1;
  const search = controls.querySelector("input");
  const find = () => {
    // A name that was copied from a table can be shortened in the middle, and numbered.
    const sought = search.value.trim().toLowerCase().replace(/\.\.\. #\d+$/, "");
    const pieces = sought.split("...");
    const [first, last] = step.value ? step.value.split(",").map(Number) : [-Infinity, Infinity];
    found = sought && bars.map(({ name, meta, base }) => {
      const has = meta.texts.map((text) => pieces.every((piece) => `${text}\n${name}`.toLowerCase().includes(piece)));
      return meta.what.map((what, i) => base[i] >= first && base[i] < last && (has[what] || Boolean(meta.callers && has[meta.callers[i]])));
    });
    matches = bars.flatMap((trace, number) => trace.base.flatMap((from, i) => (found?.[number]?.[i] ? [[from, trace.x[i]]] : [])));
    matches.sort((a, b) => a[0] - b[0]);
    at = -1;
    const counts = {};
    bars.forEach(({ meta }, number) => {
      const lane = meta.lane.split(": ").pop();
      counts[lane] = (counts[lane] ?? 0) + (found ? found[number].filter(Boolean).length : 0);
    });
    const named = Object.entries(counts).filter(([, count]) => count).map(([lane, count]) => `${numbers.format(count)} ${count === 1 ? lane.replace(/s$/, "") : lane}`);
    controls.querySelector("output").textContent = found && (named.join(", ") || "0 found");
    redraw();
  };
  search.addEventListener("input", find);
  controls.querySelector("[data-next]").addEventListener("click", () => {
    const [from, length] = matches[++at % matches.length] ?? [0, 0];
    if (!length) return;
    show(from - 4 * length, from + 5 * length);
    controls.querySelector("output").textContent = `${(at % matches.length) + 1} of ${numbers.format(matches.length)}`;
  });
  // A click on an operator finds its kernels, and a click on a kernel the operator that launched it.
  div.on("plotly_click", ({ points: [{ curveNumber, customdata }] }) => {
    if (curveNumber >= bars.length) return;
    const { texts, what, callers } = bars[curveNumber].meta;
    search.value = (texts[callers?.[customdata]] || texts[what[customdata]]).split(" > ").pop();
    find();
  });
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function pick(trace, ranks, found, from, to, pixels) {
  const { step, what, texts, lane, callers } = trace.meta;
  let kept = [...trace.base.keys()].filter((i) => trace.base[i] <= to && trace.base[i] + trace.x[i] >= from);
  const isFound = (i) => Number(found?.[i] ?? 0);
  const mostBars = callers ? 150 : 400;
  if (kept.length > mostBars) kept = kept.sort((a, b) => isFound(b) - isFound(a) || trace.x[b] - trace.x[a]).slice(0, mostBars);
  if (found) kept.sort((a, b) => isFound(a) - isFound(b));
  const of = (values) => kept.map((i) => values[i]);
  const number = numbers.format;
  const hovertext = kept.map((i) =>
    `${escaped(texts[what[i]])} (${lane.split(":")[0]}${callers && lane.startsWith("device") ? `, ${trace.name}` : ""})<br>rank ${ranks[Math.round(trace.y[i])]}, ` +
    `${step[i] === null ? "outside of steps" : `step ${step[i]}`}<br>` +
    `${number(trace.x[i])} ms from ${number(trace.base[i])} ms` +
    (callers && texts[callers[i]] ? `<br>launched in ${escaped(texts[callers[i]])}` : ""));
  // A bar contains as much of its name as fits; namespaces are left out.
  const text = kept.map((i) => {
    const fits = Math.floor((trace.x[i] * pixels) / 7) - 1;
    return fits < 3 || trace.name === "device busy" ? "" : escaped(texts[what[i]].replace(/^void |\bat::native::|\(anonymous namespace\)::/g, "").slice(0, fits));
  });
  return {
    ...trace, base: of(trace.base), x: of(trace.x), y: of(trace.y), hovertext, hoverinfo: "text", meta: null, customdata: kept,
    text, textposition: "inside", insidetextanchor: "start", textangle: 0, constraintext: "none", insidetextfont: { size: 10 },
    marker: { ...trace.marker, opacity: found ? kept.map((i) => (found[i] ? 1 : 0.12)) : trace.marker.opacity },
  };
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
