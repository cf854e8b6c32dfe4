"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {
  responsive: true,
  displaylogo: false,
  doubleClickDelay: 300,
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

// The bars in sight and a quarter of the range on each side are drawn. Zooming, a search or a click draws again.
function drawTimeline(div, figure) {
  const whole = figure.layout.xaxis.range.slice();
  const { l, r } = figure.layout.margin;
  const pixels = () => div.clientWidth - l - r;
  const bars = figure.data.filter((trace) => trace.type === "bar");
  const lines = joined(figure.data.slice(bars.length));
  const steps = new Map(figure.steps.map(([number, ...limits]) => [String(number), limits]));
  const controls = document.querySelector(`[data-for=${div.id}]`);
  const [step, search, output] = ["select", "input", "output"].map((name) => controls.querySelector(name));
  const [num, all] = figure.numbers.map(numbers.format);
  const callers = bars.some(({ name }) => name === "Python call") ? ", and no Python functions that only call another one" : "";
  const none = `0 found${num === all ? "" : `; the timeline shows the longest ${num} of ${all} events${callers}`}`;
  let found = null;
  let matches = [];
  let at, shown, longest;
  let click;

  // Times are relative to the selected step, or else to the one that contains the visible range.
  const origin = ([from, to]) => {
    const inside = [...steps].find(([, [first, last]]) => first <= from && to <= last);
    const number = step.value || (inside ? inside[0] : "");
    return { number, zero: number ? steps.get(number)[0] : 0 };
  };
  const ticks = ([from, to], zero) => {
    const least = Math.max(((to - from) * 90) / pixels(), 0.001);
    const power = 10 ** Math.floor(Math.log10(least));
    const by = power * [1, 2, 5, 10].find((factor) => factor * power >= 0.999 * least);
    const first = Math.ceil((from - zero) / by);
    const values = Array.from({ length: Math.max(0, Math.floor((to - zero) / by) - first + 1) }, (_, i) => (first + i) * by);
    return { tickvals: values.map((value) => zero + value), ticktext: values.map(numbers.format) };
  };
  const label = (text, x, settings) => ({ text, x, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, ...settings });
  const labels = ([from, to]) => {
    let free = from;
    const shown = [...steps].flatMap(([number, [first, last]]) => {
      const x = Math.max(first, from);
      if (x < free || x > to || last <= from) return [];
      free = x + ((8 + 8 * number.length) * (to - from)) / pixels();
      return [label(number, x, { xanchor: "left" })];
    });
    return shown.length ? [label("step", 0, { xref: "paper", xanchor: "right", xshift: -7 }), ...shown] : [];
  };
  const edges = [...figure.steps.map(([, first]) => first), ...figure.steps.slice(-1).map(([, , last]) => last)];
  const shapes = edges.filter((_, i) => i % Math.ceil(edges.length / 200) === 0).map((x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { width: 1, dash: "dot" } }));
  const draw = (plot, range, settings) => {
    // A copy of the range, since plotly writes the zoomed range into the array that it was given.
    const { number, zero } = origin(range);
    const title = { ...figure.layout.xaxis.title, text: number ? `milliseconds since the start of step ${number}` : "milliseconds" };
    const xaxis = { ...figure.layout.xaxis, range: [...range], title, ...ticks(range, zero) };
    const data = [...pick(bars, figure.ranks, found, range, pixels(), steps.size, zero, number), ...lines];
    plot(div, data, { ...figure.layout, dragmode: div.layout?.dragmode ?? figure.layout.dragmode, xaxis, shapes, annotations: labels(range) }, settings);
  };
  const view = () => String([...div.layout.xaxis.range, div.clientWidth]);
  draw(Plotly.newPlot, whole, { ...config, doubleClick: false });
  let drawn = view();
  const redraw = () => draw(Plotly.react, div.layout.xaxis.range.slice());
  div.on("plotly_relayout", () => {
    if (view() === drawn) return;
    drawn = view();
    redraw();
  });
  const show = (from, to) => Plotly.relayout(div, { "xaxis.range": [from, to] });
  const showAll = () => {
    step.value = "";
    find();
    show(...whole);
  };
  // Plotly's own double-click handler would return to the range that was drawn last.
  div.on("plotly_doubleclick", () => {
    clearTimeout(click);
    showAll();
  });
  step.addEventListener("change", () => {
    find();
    show(...(step.value ? steps.get(step.value).slice(2) : whole));
  });
  for (const button of controls.querySelectorAll("button:not([data-next])")) {
    button.addEventListener("click", () => {
      const [from, to] = div.layout.xaxis.range;
      const { scale, shift } = button.dataset;
      if (!scale) return showAll();
      const middle = (from + to) / 2 + shift * (to - from);
      return show(middle - (scale * (to - from)) / 2, middle + (scale * (to - from)) / 2);
    });
  }
  div.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const button = [...controls.querySelectorAll("button")].find(({ dataset }) => dataset.keys?.split(" ").includes(event.key));
    if (button) event.preventDefault();
    button?.click();
  });
  // Marks the bars of which `choose(trace)(index)` is true, and counts them by lane.
  const mark = (choose) => {
    found = choose ? bars.map((trace) => [...trace.base.keys()].map(choose(trace))) : null;
    matches = bars.flatMap((trace, number) => trace.base.flatMap((from, i) => (found?.[number][i] ? [[from, trace.x[i], trace.y[i]]] : [])));
    matches.sort((a, b) => a[0] - b[0]);
    longest = matches.reduce((most, [, length], i) => (length > matches[most][1] ? i : most), 0);
    shown = null;
    const counts = {};
    bars.forEach(({ meta }, number) => {
      const lane = meta.lane.split(": ").pop();
      counts[lane] = (counts[lane] ?? 0) + (found ? found[number].filter(Boolean).length : 0);
    });
    const named = Object.entries(counts).filter(([, count]) => count).map(([lane, count]) => `${numbers.format(count)} ${count === 1 ? lane.replace(/s$/, "") : lane}`);
    output.textContent = found ? named.join(", ") || none : "";
    redraw();
  };
  // `cudaFree in aten::conv2d` finds the calls of a name that an operator makes. A name that was copied from a
  // table can be shortened in the middle, and numbered.
  const find = () => {
    const sought = search.value.trim().toLowerCase().replace(/\.\.\. #\d+$/, "");
    const [name, caller] = sought.split(" in ").map((words) => (text) => words.split("...").every((piece) => text.includes(piece)));
    mark(sought && (({ name: kind, meta }) => {
      const texts = meta.texts.map((text) => text.toLowerCase());
      const isNamed = texts.map((text) => name(`${text}\n${kind}`));
      const isCaller = texts.map(caller ?? name);
      const called = (i) => Boolean(meta.callers && isCaller[meta.callers[i]]);
      return (i) => (!step.value || String(meta.step[i]) === step.value) && (caller ? isNamed[meta.what[i]] && called(i) : isNamed[meta.what[i]] || called(i));
    }));
  };
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => event.key === "Enter" && go(event.shiftKey ? -1 : 1));
  // Shows the next or the previous bar that was found, in the order of time and from the visible range.
  const go = (by) => {
    if (!matches.length) return;
    const first = matches.findIndex(([from]) => from >= div.layout.xaxis.range[0]);
    if (view() === shown) at += by;
    else at = (first < 0 ? matches.length : first) - (by < 0);
    at = (at + matches.length) % matches.length;
    const [from, length] = [matches[at][0], matches[at][1] || 0.001];
    show(Math.max(from - 4 * length, whole[0]), Math.min(from + 5 * length, whole[1]));
    shown = view();
    const top = div.getBoundingClientRect().top + div._fullLayout.yaxis._offset + div._fullLayout.yaxis.l2p(matches[at][2]);
    if (top < 0 || top > innerHeight) scrollBy(0, top - innerHeight / 2);
    const [number, all, most, ms] = [at + 1, matches.length, longest + 1, matches[longest][1]].map(numbers.format);
    output.textContent = `${number} of ${all}, the longest is ${most} (${ms} ms)`;
  };
  for (const button of controls.querySelectorAll("[data-next]")) button.addEventListener("click", () => go(Number(button.dataset.next)));
  // A click on a kernel marks the call and the operators that launched it, and a click on these what they launched.
  div.on("plotly_click", ({ points: [{ curveNumber, customdata }] }) => {
    if (curveNumber >= bars.length) return;
    const clicked = { trace: bars[curveNumber], i: customdata };
    // Drawing between the two clicks of a double-click would separate them.
    clearTimeout(click);
    click = setTimeout(() => {
      search.value = "";
      mark((trace) => (i) => (trace === clicked.trace && i === customdata) || launched(clicked, { trace, i }) || launched({ trace, i }, clicked));
    }, config.doubleClickDelay);
  });
  for (const button of document.querySelectorAll(`[data-in=${div.id}]`)) {
    button.addEventListener("click", () => {
      search.value = button.dataset.find;
      find();
      controls.scrollIntoView();
      div.focus({ preventScroll: true }); // whose keys n and p show what was found
    });
  }
}

// Joins the lines of a panel that have the same style, since each trace takes time.
function joined(lines) {
  const all = new Map();
  for (const line of lines) {
    const key = line.yaxis + line.line.dash;
    const one = all.get(key) ?? { ...line, x: [], y: [], text: [] };
    const text = line.x.map(() => line.text);
    all.set(key, { ...one, x: [...one.x, null, ...line.x], y: [...one.y, null, ...line.y], text: [...one.text, "", ...text] });
  }
  return [...all.values()];
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function inLines(text) {
  return escaped(text.replaceAll(" > ", "\n> ").replace(/.{90}/g, "$&\n")).replaceAll("\n", "<br>");
}

// Whether a bar of the host is a call, an operator or an annotation around a call or the launch of a kernel.
function launched(host, kernel) {
  const isCall = ({ trace }) => trace.meta.lane === "host: runtime calls";
  const moment = isCall(kernel) ? kernel.trace.base[kernel.i] : kernel.trace.meta.launched?.[kernel.i];
  const begin = host.trace.base[host.i];
  if (moment == null || moment < begin || moment > begin + host.trace.x[host.i]) return false;
  if (Math.round(host.trace.y[host.i]) !== Math.round(kernel.trace.y[kernel.i])) return false;
  const [around, callers] = [kernel, host].map(({ trace: { meta }, i }) => meta.texts[meta.callers?.[i]]);
  const name = host.trace.meta.texts[host.trace.meta.what[host.i]];
  return isCall(host) ? callers === around : ["operator", "annotation"].includes(host.trace.name) && ` > ${around} > `.includes(` > ${name} > `);
}

// Returns the bars to draw. Of each lane, those narrower than two pixels that begin within the same two pixels are
// one bar in the color of the longest of them, which is joined with the next one if that has the same color. If
// there are too many bars, more pixels are joined.
function pick(bars, ranks, found, [from, to], pixels, hasSteps, zero, number) {
  const margin = (to - from) / 4;
  let chosen, count;
  for (let least = (2 * (to - from)) / pixels; ; least *= 2) {
    chosen = bars.map(() => []);
    const joined = new Map();
    bars.forEach(({ base, x, y }, trace) => base.forEach((begin, at) => {
      const end = begin + x[at];
      if (end < from - margin || begin > to + margin) return;
      const isFound = Boolean(found?.[trace][at]);
      const spent = x[at] * (bars[trace].meta.share?.[at] ?? 1);
      if (x[at] >= least) return void chosen[trace].push({ trace, at, begin, end, isFound, spent, num: 1 });
      const key = (Math.round(y[at] * 1000) * 2 + isFound) * 2 ** 20 + Math.floor((begin - from + margin) / least);
      const other = joined.get(key);
      if (!other) return void joined.set(key, { trace, at, begin, end, isFound, spent, num: 1 });
      if (x[at] > bars[other.trace].x[other.at]) [other.trace, other.at] = [trace, at];
      other.begin = Math.min(begin, other.begin);
      other.end = Math.max(end, other.end);
      other.num++;
      other.spent += spent;
    }));
    let last = null;
    for (const [key, one] of [...joined].sort((a, b) => a[0] - b[0])) {
      if (last && last.key === key - 1 && last.trace === one.trace && one.begin < last.end + least / 4) {
        if (bars[one.trace].x[one.at] > bars[one.trace].x[last.at]) last.at = one.at;
        Object.assign(last, { key, end: Math.max(last.end, one.end), num: last.num + one.num, spent: last.spent + one.spent });
      } else chosen[one.trace].push((last = Object.assign(one, { key })));
    }
    count = chosen.reduce((sum, some) => sum + some.length, 0);
    if (count <= 4000) break;
  }
  const all = chosen.flat();
  for (const one of all) {
    one.share = Math.min(1, one.spent / (one.end - one.begin) || 1);
    // A bar begins at the edge of the visible range, so that its name is there.
    if (one.begin < from && one.end > from) one.begin = from;
    one.y = bars[one.trace].y[one.at];
  }
  // Of bars that overlap, a name ends where the next bar begins.
  all.sort((a, b) => a.y - b.y || a.begin - b.begin || b.end - a.end);
  all.forEach((one, i) => (one.free = Math.min(one.end, to, all[i + 1]?.y === one.y ? all[i + 1].begin : to)));
  return bars.map((trace, which) => {
    const { step, what, texts, lane, callers, details, share, launched: moments } = trace.meta;
    const lines = (trace.meta.lines ??= []);
    const inLinesOf = (i) => (lines[i] ??= inLines(texts[i]));
    const kept = chosen[which].sort((a, b) => a.isFound - b.isFound);
    const side = lane.split(":")[0];
    const hovertext = kept.map(({ at, num, share: part }) =>
      (share && part < 1 ? `the device is busy for ${numbers.format(100 * part)} % of this time<br>` : "") +
      (num > 1 ? `${num} short bars; zoom in to see each of them. The longest:<br>` : "") +
      `${inLinesOf(what[at])} (${side}${moments ? `, ${trace.name}` : ""})<br>rank ${ranks[Math.round(trace.y[at])]}` +
      `${hasSteps ? (step[at] === null ? ", outside of steps" : `, step ${step[at]}`) : ""}<br>` +
      `${numbers.format(trace.x[at])} ms from ${numbers.format(trace.base[at] - zero)} ms${number && ` of step ${number}`}` +
      (callers && texts[callers[at]] ? `<br>${moments ? "launched" : "called"} in ${inLinesOf(callers[at])}` : "") +
      (details && texts[details[at]] ? `<br>${inLinesOf(details[at])}` : "") +
      (moments?.[at] == null ? "" : `<br>launched ${numbers.format(trace.base[at] - moments[at])} ms before its start`));
    // A bar contains as much of its name as fits; namespaces are left out.
    const text = kept.map(({ at, begin, free, num }) => {
      const fits = Math.floor(((free - begin) * pixels) / (to - from) / 7) - 1;
      return num > 1 || fits < 3 || trace.name === "device busy" ? "" : escaped(texts[what[at]].replace(/^void |\bat::native::|\(anonymous namespace\)::/g, "").slice(0, fits));
    });
    const isPale = ({ isFound }) => !isFound;
    // Where the device is busy for a part of the time only, its bar is as pale.
    const opacity = found ? kept.map((one) => (isPale(one) ? 0.15 : 1)) : share && kept.map((one) => 0.1 + 0.9 * one.share);
    return {
      ...trace, base: kept.map(({ begin }) => begin), x: kept.map(({ begin, end }) => end - begin), y: kept.map(({ y }) => y),
      hovertext, hoverinfo: "text", meta: null, customdata: kept.map(({ at }) => at), textposition: "inside",
      insidetextanchor: "start", textangle: 0, constraintext: "none",
      // Plotly takes twice as long for traces with texts or with a style for each bar, even if they are empty.
      text: text.some(Boolean) ? text : undefined,
      insidetextfont: { size: 10, ...(found && { color: kept.map((one) => (isPale(one) ? "#768390" : undefined)) }) },
      marker: { ...trace.marker, ...(opacity && { opacity }) },
    };
  });
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
