// Elements, scales, axes and two kinds of charts, in SVG. Names are only ever set as text.

const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// A name that may be broken behind _ . / and -, as words are.
function soft(text) {
  const parts = String(text).split(/(?<=[_./-])/);
  return parts.flatMap((part, k) => (k ? [document.createElement("wbr"), part] : [part]));
}

function fixed(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(digits).replace("-", MINUS);
}
// As statistics.signed: more decimals where a difference would be printed as 0.
function signed(value, digits = 1) {
  const small = value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits;
  const text = small ? Number(value.toPrecision(1)).toString() : value.toFixed(digits);
  return (value < 0 || text.startsWith("-") ? text : `+${text}`).replace("-", MINUS);
}
const mean = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};
const textWidth = (() => {
  const context = document.createElement("canvas").getContext("2d");
  return (text, size = 12.5) => {
    context.font = `${size}px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif`;
    return context.measureText(text).width;
  };
})();
// Charts are drawn as wide as their box; on paper, as wide as data-print says.
const paper = { on: false };
const widthOf = (box, least) => Math.max(least, Math.round((paper.on && Number(box.dataset.print)) || box.clientWidth || 640));
// The longest beginning of a text that fits, with an ellipsis.
function shorten(text, width) {
  if (textWidth(text) <= width) return text;
  let end = text.length;
  while (end > 1 && textWidth(`${text.slice(0, end)}…`) > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

function linear([low, high], [from, to]) {
  const scale = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  scale.invert = (place) => low + ((place - from) / (to - from || 1)) * (high - low);
  return scale;
}
function logarithmic([low, high], range) {
  const inner = linear([Math.log(low), Math.log(high)], range);
  const scale = (value) => inner(Math.log(value));
  scale.invert = (place) => Math.exp(inner.invert(place));
  return scale;
}
function ticks([low, high], wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}
function logTicks([low, high]) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const factor of [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  return found.length > 7 ? found.filter((value) => /^1/.test(value.toPrecision(1))) : found;
}
// As many decimals as the distance of two ticks needs.
function axisFormat(domain, wanted, more = 0) {
  const [first, second] = ticks(domain, wanted);
  const digits = Math.max(0, -Math.floor(Math.log10((second - first) * 1.0001) || 0)) + more;
  return (value) => fixed(value, Number.isFinite(digits) ? digits : 1);
}
function widened([low, high], share = 0.06) {
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}
function extent(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
}

// Labels moved apart vertically, so that none covers another.
function spread(places, gap, low, high) {
  const order = places.map((y, index) => ({ y, index })).sort((a, b) => a.y - b.y);
  for (let k = 0; k < order.length; k += 1) order[k].y = Math.max(order[k].y, k ? order[k - 1].y + gap : low);
  const over = order.length ? order[order.length - 1].y - high : 0;
  if (over > 0) {
    order[order.length - 1].y = high;
    for (let k = order.length - 2; k >= 0; k -= 1) order[k].y = Math.min(order[k].y, order[k + 1].y - gap);
  }
  const moved = new Array(places.length);
  for (const { y, index } of order) moved[index] = y;
  return moved;
}

const path = (points, x, y) => points.map(([a, b], k) => `${k ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");

/* A line chart. options:
   label        for screen readers
   x, y         {label, domain, format, log, reversed, ticks, wanted}
   series       [{name, colour, dash, points: [[x, y], ...], band: [[x, low, high], ...], dots}]
   height, labels (direct labels at the right end), diagonal, square, cursor (x of a vertical line), unit */
function lineChart(box, options) {
  const series = options.series.filter((one) => one.points.length);
  const area = layOut(box, options, series);
  const { width, height, x, y, top, bottom, left, plot } = area;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
  drawAxes(chart, options, area);
  if (options.diagonal) chart.append(svg("line", { class: "zero", x1: x(0), y1: y(0), x2: x(1), y2: y(1), "stroke-dasharray": "1 4", "stroke-linecap": "round" }));
  if (options.zero) chart.append(svg("line", { class: "zero", x1: left, x2: left + plot, y1: y(0), y2: y(0) }));
  drawSeries(chart, series, x, y);
  if (options.labels) drawEndLabels(chart, series, area);
  if (options.cursor !== undefined) {
    const line = svg("line", { class: "zero cursor", y1: top, y2: bottom, x1: x(options.cursor), x2: x(options.cursor) });
    chart.append(line);
    chart.moveCursor = (value) => { line.setAttribute("x1", x(value)); line.setAttribute("x2", x(value)); };
  } else if (options.tip !== false) {
    const format = { x: area.format.x, y: options.y.tip || axisFormat(options.y.domain, 5, 1) };
    addTip(box, chart, series, { ...area, format, unit: options.unit || "", xName: options.x.name || "" });
  }
  box.replaceChildren(chart);
  return chart;
}

// Margins as wide as the longest label needs, and the scales between them.
function layOut(box, options, series) {
  const width = widthOf(box, 130);
  const narrow = width < 420;
  const format = { x: options.x.format || String, y: options.y.format || axisFormat(options.y.domain, 5) };
  const [low, high] = options.y.domain;
  const yTicks = ticks(options.y.domain, options.y.wanted || (narrow ? 4 : 5)).filter((value) => value >= low && value <= high);
  const left = Math.max(...yTicks.map((value) => textWidth(format.y(value))), 8) + 10;
  const room = Math.min(narrow ? 110 : 190, width * 0.36);
  const right = options.labels ? Math.min(room, Math.max(...series.map((one) => textWidth(one.name)), 0) + 20) : 12;
  const top = options.y.label ? 24 : 8;
  const foot = options.x.label ? 38 : 20;
  const plot = width - left - right;
  const height = options.square ? plot + top + foot : paper.on ? 172 : options.height || (narrow ? 250 : 300);
  const bottom = height - foot;
  const ends = options.x.reversed ? [left + plot, left] : [left, left + plot];
  const wanted = Math.min(10, plot / (options.square ? 45 : 60));
  return {
    width, height, format, left, right, top, bottom, plot, yTicks,
    xTicks: options.x.ticks || (options.x.log ? logTicks(options.x.domain) : ticks(options.x.domain, wanted)),
    x: (options.x.log ? logarithmic : linear)(options.x.domain, ends),
    y: linear(options.y.domain, [bottom, top]),
  };
}

function drawAxes(chart, options, { width, height, format, left, bottom, plot, xTicks, yTicks, x, y }) {
  for (const value of yTicks) {
    chart.append(
      svg("line", { class: "grid", x1: left, x2: left + plot, y1: y(value), y2: y(value) }),
      svg("text", { class: "quiet", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, format.y(value)),
    );
  }
  for (const value of xTicks) {
    const text = format.x(value);
    const beyond = x(value) + textWidth(text) / 2 > width + 4;
    chart.append(
      svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }),
      svg("text", { class: "quiet", x: beyond ? width : x(value), y: bottom + 17, "text-anchor": beyond ? "end" : "middle" }, text),
    );
  }
  chart.append(svg("line", { class: "axis", x1: left, x2: left + plot, y1: bottom, y2: bottom }));
  if (options.y.label) chart.append(svg("text", { class: "quiet", x: 0, y: 11 }, shorten(options.y.label, width)));
  if (options.x.label) chart.append(svg("text", { class: "quiet", x: left + plot, y: height - 3, "text-anchor": "end" }, shorten(options.x.label, left + plot)));
}

// Bands first, so that no line is covered.
function drawSeries(chart, series, x, y) {
  for (const { band, colour } of series.filter((one) => one.band)) {
    const upper = band.map(([a, , high]) => [a, high]);
    const lower = band.map(([a, low]) => [a, low]).reverse();
    const outline = `${path(upper, x, y)}${path(lower, x, y).replace("M", "L")}Z`;
    chart.append(svg("path", { d: outline, style: `fill:${colour}`, "fill-opacity": 0.1 }));
  }
  for (const { points, colour, width, dash, dots } of series) {
    chart.append(svg("path", { d: path(points, x, y), fill: "none", style: `stroke:${colour}`, "stroke-width": width || 2, "stroke-dasharray": dash, "stroke-linejoin": "round", "stroke-linecap": "round" }));
    if (dots || points.length < 3)
      for (const [a, b] of points) chart.append(svg("circle", { cx: x(a), cy: y(b), r: dots === "small" ? 2 : 3, style: `fill:${colour}` }));
  }
}

function drawEndLabels(chart, series, { x, y, top, bottom, left, right, plot }) {
  const edge = left + plot;
  const ends = series.map((one) => one.points[one.points.length - 1]);
  const places = spread(ends.map(([, b]) => y(b)), 15, top, bottom);
  series.forEach((one, k) => {
    const [a, b] = ends[k];
    chart.append(
      svg("path", { d: `M${x(a) + 2},${y(b)}L${edge + 12},${places[k]}`, fill: "none", style: `stroke:${one.colour}`, "stroke-width": 1, "stroke-opacity": 0.55 }),
      svg("text", { x: edge + 16, y: places[k] + 4 }, svg("title", {}, one.name), shorten(one.name, right - 18)),
    );
  });
}

// The values at the nearest x, beside the pointer.
function addTip(box, chart, series, area) {
  const { x, y, top, bottom, left, width, plot, format, unit, xName } = area;
  const line = svg("line", { class: "zero", y1: top, y2: bottom, visibility: "hidden" });
  chart.append(line);
  let tip = null;
  const hide = () => { line.setAttribute("visibility", "hidden"); if (tip) tip.remove(); tip = null; };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("pointermove", (event) => {
    const frame = chart.getBoundingClientRect();
    const place = ((event.clientX - frame.left) / frame.width) * width;
    if (place < left - 5 || place > left + plot + 5) { hide(); return; }
    const all = series.flatMap((one) => one.points.map(([a]) => a));
    const nearest = all.reduce((best, a) => (Math.abs(x(a) - place) < Math.abs(x(best) - place) ? a : best), all[0]);
    const rows = series
      .map((one) => ({ one, point: one.points.find(([a]) => a === nearest) }))
      .filter(({ point }) => point)
      .sort((a, b) => b.point[1] - a.point[1]);
    hide();
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", x(nearest));
    line.setAttribute("x2", x(nearest));
    tip = html("div", { class: "tip" }, html("b", {}, `${xName} ${format.x(nearest)}`.trim()),
      ...rows.map(({ one, point }) => html("div", {}, swatch(one.colour), `${one.name} ${format.y(point[1])}${unit}`)));
    box.append(tip);
    const scale = frame.width / width;
    const beyond = x(nearest) * scale + 14 + tip.offsetWidth > frame.width;
    tip.style.left = `${x(nearest) * scale + (beyond ? -14 - tip.offsetWidth : 14)}px`;
    tip.style.top = `${top + 6}px`;
  });
}

const swatch = (colour) => {
  const node = html("span", { class: "swatch" });
  node.style.setProperty("--c", colour);
  return node;
};

/* A forest plot: one row per entry {name, colour, mean, low, high, seeds, clear, text, baseline}. */
function forestChart(box, { rows, label, axis, shortAxis, format }) {
  const width = widthOf(box, 260);
  const narrow = width < 620;
  const step = narrow ? 50 : paper.on ? 26 : 34;
  const names = narrow ? 4 : Math.min(240, Math.max(...rows.map((row) => textWidth(row.name))) + 34);
  const values = narrow ? 4 : Math.max(...rows.map((row) => textWidth(row.text))) + 18;
  const top = 6;
  const bottom = 44;
  const height = top + rows.length * step + bottom;
  const [from, to] = [names + 8, width - values - 8];
  const domain = forestDomain(rows);
  const x = linear(domain, [from, to]);
  const clip = (value) => Math.min(to, Math.max(from, x(value)));
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(domain, Math.min(9, (to - from) / 70))) {
    chart.append(
      svg("line", { class: value === 0 ? "zero" : "grid", x1: x(value), x2: x(value), y1: top, y2: height - bottom + 4 }),
      svg("text", { class: "quiet", x: x(value), y: height - bottom + 20, "text-anchor": "middle" }, format(value)),
    );
  }
  chart.append(svg("text", { class: "quiet", x: (from + to) / 2, y: height - 5, "text-anchor": "middle" }, narrow ? shorten(shortAxis, width) : axis));
  rows.forEach((row, place) => {
    const y = top + place * step + (narrow ? 36 : step / 2);
    const textY = narrow ? y - 18 : y + 4;
    const style = `stroke:${row.colour}`;
    chart.append(
      svg("circle", { cx: 6, cy: textY - 4, r: 4.5, style: `fill:${row.colour}` }),
      svg("text", { class: row.baseline ? "quiet" : "strong", x: 17, y: textY }, svg("title", {}, row.name), shorten(row.name, (narrow ? width - textWidth(row.text) - 24 : names - 20))),
      svg("text", { class: row.clear ? "strong" : row.baseline ? "quiet" : null, x: width, y: textY, "text-anchor": "end" }, row.text),
    );
    if (row.mean === null) return;
    for (const value of row.seeds) chart.append(svg("circle", { cx: clip(value), cy: y + 9, r: 2.4, style: `fill:${row.colour}`, "fill-opacity": 0.6 }));
    if (row.low !== null) {
      chart.append(svg("line", { x1: clip(row.low), x2: clip(row.high), y1: y, y2: y, style, "stroke-width": row.clear ? 3 : 1.8 }));
      if (row.low < domain[0]) chart.append(svg("path", { d: `M${from + 7},${y - 5}L${from},${y}L${from + 7},${y + 5}`, fill: "none", style, "stroke-width": 1.8 }));
      if (row.high > domain[1]) chart.append(svg("path", { d: `M${to - 7},${y - 5}L${to},${y}L${to - 7},${y + 5}`, fill: "none", style, "stroke-width": 1.8 }));
    }
    chart.append(svg("circle", { cx: clip(row.mean), cy: y, r: row.baseline ? 4 : 5.5, style: row.clear || row.baseline ? `fill:${row.colour}` : `fill:var(--paper);${style};stroke-width:2.4` }));
  });
  box.replaceChildren(chart);
}
// Around 0 and all means and seeds. Intervals that are much wider are cut, and end in arrows.
function forestDomain(rows) {
  const inner = extent([0, ...rows.flatMap((row) => [row.mean, ...row.seeds]).filter((value) => value !== null)]);
  const outer = extent([...inner, ...rows.flatMap((row) => [row.low, row.high]).filter((value) => value !== null && value !== undefined)]);
  const size = inner[1] - inner[0] || 1;
  return widened([Math.max(outer[0], inner[0] - 1.2 * size), Math.min(outer[1], inner[1] + 1.2 * size)], 0.03);
}
