"use strict";
// Draws the curves of #data. One state, one function that draws it all again; no library.
const data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: data.axis, smoothing: 0, log: false, hidden: new Set(), range: null };
const SVG = "http://www.w3.org/2000/svg", LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function node(parent, name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function short(value) { // 1234567 → 1.23M; 0.00012 → 1.2e-4
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (size >= factor * 0.99995) return +(value / factor).toPrecision(4) + unit;
  return size < 1e-3 ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4));
}

function long(axis, value) {
  if (axis !== "time") return Math.round(value).toLocaleString("en");
  const hours = Math.floor(value / 3600), minutes = Math.floor(value / 60) % 60, seconds = value % 60;
  return hours ? `${hours}h ${minutes}m` : minutes ? `${minutes}m ${Math.floor(seconds)}s` : `${+seconds.toFixed(2)}s`;
}

function smooth(values) { // exponential moving average, its beginning unbiased
  if (!state.smoothing) return values;
  let sum = 0, weight = 0;
  return values.map(value => {
    sum = state.smoothing * sum + (1 - state.smoothing) * value;
    weight = state.smoothing * weight + 1 - state.smoothing;
    return sum / weight;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(step => step >= rough);
  const found = [];
  for (let index = Math.ceil(low / size - 1e-9); index * size <= high + size * 1e-9; index++) found.push(index * size);
  return found;
}

function logTicks(low, high) { // low, high are logarithms
  if (high - low < 0.7) return ticks(10 ** low, 10 ** high, 4).filter(value => value > 0).map(Math.log10);
  const found = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const factor of high - low < 2.5 ? [1, 2, 5] : [1]) {
      const place = power + Math.log10(factor);
      if (place >= low && place <= high) found.push(place);
    }
  return found;
}

const colour = run => `var(--c${run % 8})`;
const shown = () => data.runs.map((run, index) => ({ ...run, index })).filter(run => !state.hidden.has(run.index));

function draw(panel) {
  const { chart, svg } = panel, width = svg.clientWidth, height = svg.clientHeight;
  svg.replaceChildren();
  panel.tip.hidden = true;
  const curves = shown().map(run => {
    const curve = run.curves[chart.key];
    return { run, x: curve[state.axis], raw: curve.y, y: smooth(curve.y) };
  }).filter(curve => curve.x.length);
  const log = state.log && curves.every(curve => curve.raw.every(value => value > 0));
  const up = log ? Math.log10 : value => value;
  let [left, right] = [Infinity, -Infinity], [low, high] = [Infinity, -Infinity];
  for (const { x } of curves) { left = Math.min(left, x[0]); right = Math.max(right, x[x.length - 1]); }
  if (state.range) [left, right] = state.range;
  for (const { x, y, raw } of curves)
    for (let i = 0; i < x.length; i++)
      if (x[i] >= left && x[i] <= right)
        for (const value of state.smoothing ? [y[i]] : [raw[i]]) { low = Math.min(low, up(value)); high = Math.max(high, up(value)); }
  panel.scale = null;
  if (!(low <= high) || width < LEFT + RIGHT + 20) {
    node(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing here");
    return;
  }
  if (right === left) { left -= left ? Math.abs(left) * 0.5 : 1; right += right ? Math.abs(right) * 0.5 : 1; }
  const margin = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.05 || 1;
  low -= margin; high += margin;
  const X = value => LEFT + (value - left) / (right - left) * (width - LEFT - RIGHT);
  const Y = value => height - BOTTOM - (up(value) - low) / (high - low) * (height - TOP - BOTTOM);
  for (const place of log ? logTicks(low, high) : ticks(low, high, 5)) {
    const value = log ? 10 ** place : place, y = Y(value);
    node(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
    node(svg, "text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(value));
  }
  for (const value of ticks(left, right, Math.max(2, width / 110))) {
    if (value < left || value > right) continue;
    node(svg, "line", { class: "grid", x1: X(value), x2: X(value), y1: TOP, y2: height - BOTTOM });
    const end = X(value) > width - 30;
    node(svg, "text", { x: end ? width - 2 : X(value), y: height - 6, "text-anchor": end ? "end" : "middle" }, short(value));
  }
  const clip = `clip-${chart.key}`;
  node(node(svg, "clipPath", { id: clip }), "rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM });
  const area = node(svg, "g", { "clip-path": `url(#${clip})` });
  for (const { run, x, y, raw } of curves) {
    const line = values => "M" + x.map((place, i) => `${X(place).toFixed(1)},${Y(values[i]).toFixed(1)}`).join("L");
    const look = { stroke: colour(run.index), "stroke-dasharray": DASHES[Math.floor(run.index / 8) % 4] };
    if (state.smoothing) node(area, "path", { ...look, class: "faint", d: line(raw) });
    node(area, "path", { ...look, d: line(y), "data-run": run.name });
    if (x.length < 40) x.forEach((place, i) => node(area, "circle", { cx: X(place), cy: Y(y[i]), r: 2.5, fill: colour(run.index) }));
  }
  panel.scale = { left, right, X, Y, curves, width };
}

function nearest(places, wanted) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (places[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(places[low] - wanted) <= Math.abs(places[high] - wanted) ? low : high;
}

function place(panel, event) { // of the pointer on the axis
  const { left, right, width } = panel.scale, box = panel.svg.getBoundingClientRect();
  const part = (event.clientX - box.left - LEFT) / (width - LEFT - RIGHT);
  return left + Math.min(1, Math.max(0, part)) * (right - left);
}

function hover(panel, event) {
  if (!panel.scale) return;
  const { X, Y, curves, width } = panel.scale, wanted = place(panel, event);
  panel.svg.querySelectorAll(".hover").forEach(old => old.remove());
  const group = node(panel.svg, "g", { class: "hover" });
  if (panel.from !== undefined) {
    const a = X(panel.from), b = X(wanted);
    node(group, "rect", { class: "drag", x: Math.min(a, b), y: TOP, width: Math.abs(b - a), height: panel.svg.clientHeight - TOP - BOTTOM });
  }
  node(group, "line", { class: "cross", x1: X(wanted), x2: X(wanted), y1: TOP, y2: panel.svg.clientHeight - BOTTOM });
  panel.tip.replaceChildren();
  for (const { run, x, raw, y } of curves) {
    const i = nearest(x, wanted);
    node(group, "circle", { cx: X(x[i]), cy: Y(y[i]), r: 3.5, fill: colour(run.index) });
    const row = panel.tip.appendChild(document.createElement("div")), key = row.appendChild(document.createElement("b"));
    key.textContent = short(raw[i]);
    key.style.color = colour(run.index);
    row.append(`  at ${long(state.axis, x[i])}  ${run.name}`);
  }
  panel.tip.hidden = false;
  const section = panel.svg.parentElement, size = panel.tip.offsetWidth, most = section.clientWidth - size - 4;
  const inset = panel.svg.getBoundingClientRect().left - section.getBoundingClientRect().left;
  const beside = X(wanted) > width / 2 ? X(wanted) - 12 - size : X(wanted) + 12;
  panel.tip.style.left = `${Math.max(4, Math.min(most, inset + beside))}px`;
  panel.tip.style.top = "2.5rem";
}

function leave(panel) {
  panel.svg.querySelectorAll(".hover").forEach(old => old.remove());
  panel.tip.hidden = true;
  panel.from = undefined;
}

const panels = data.charts.map(chart => {
  const section = document.getElementById("charts").appendChild(document.createElement("section"));
  const title = section.appendChild(document.createElement("h2"));
  title.append(chart.title + " ");
  title.appendChild(document.createElement("small")).textContent = chart.unit;
  const svg = node(section, "svg", { role: "img", "aria-label": `${chart.title} of ${data.runs.map(run => run.name).join(", ")}` });
  const tip = section.appendChild(document.createElement("div"));
  tip.className = "tip";
  const panel = { chart, svg, tip };
  svg.addEventListener("pointermove", event => hover(panel, event));
  svg.addEventListener("pointerleave", () => leave(panel));
  svg.addEventListener("pointercancel", () => leave(panel));
  svg.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse" && panel.scale) panel.from = place(panel, event);
    hover(panel, event);
  });
  svg.addEventListener("pointerup", event => {
    if (panel.from === undefined) return;
    const ends = [panel.from, place(panel, event)].sort((a, b) => a - b), { X } = panel.scale;
    panel.from = undefined;
    if (X(ends[1]) - X(ends[0]) > 8) { state.range = ends; drawAll(); } else hover(panel, event);
  });
  svg.addEventListener("dblclick", () => { state.range = null; drawAll(); });
  return panel;
});
function drawAll() { panels.forEach(draw); }

for (const axis in data.axes) {
  const label = document.getElementById("axes").appendChild(document.createElement("label"));
  const input = label.appendChild(document.createElement("input"));
  Object.assign(input, { type: "radio", name: "axis", value: axis, checked: axis === state.axis });
  label.append(data.axes[axis]);
  input.addEventListener("change", () => { state.axis = axis; state.range = null; drawAll(); });
}
document.getElementById("smoothing").addEventListener("input", event => { state.smoothing = +event.target.value; drawAll(); });
document.getElementById("log").addEventListener("change", event => { state.log = event.target.checked; drawAll(); });
[...document.getElementById("runs").rows].forEach((row, index) => {
  const key = row.querySelector(".key");
  key.style.borderColor = key.style.background = colour(index);
  row.tabIndex = 0;
  const toggle = () => {
    row.classList.toggle("off", !state.hidden.delete(index) && Boolean(state.hidden.add(index)));
    drawAll();
  };
  row.addEventListener("click", toggle);
  row.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
});
new ResizeObserver(drawAll).observe(document.getElementById("charts"));
drawAll();
