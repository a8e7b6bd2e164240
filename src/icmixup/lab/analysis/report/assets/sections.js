// The sections of the page, each a function of the data that draws into its own element.

const data = JSON.parse(document.getElementById("data").textContent);
const { variants } = data;
const colours = variants.map((variant) => `var(--c-${variant.colour})`);
const dashes = [null, "6 4", "2 4", "9 3 2 3"];
const dashOf = (k) => dashes[variants[k].round % dashes.length];
const at = (id) => document.getElementById(id);
const percent = (value) => `${fixed(value, 0)} %`;
const empty = (text) => html("p", { class: "empty" }, text);

function drawForest() {
  if (variants.length < 2) { at("forest").replaceChildren(empty("Differences need at least two methods.")); return; }
  const base = Number(at("baseline").value);
  const measure = data.measures.find((one) => one.key === at("measure").value);
  const values = data.values[measure.key];
  const rows = variants.map((variant, k) => {
    const row = { name: variant.name, colour: colours[k], baseline: k === base, mean: null, low: null, high: null, clear: false, seeds: [], text: "no common seed" };
    if (k === base) return { ...row, mean: 0, text: "baseline" };
    const found = difference(measure.key, k, base);
    if (!found) return row;
    const seeds = values[k].map((value, s) => (value === null || values[base][s] === null ? null : value - values[base][s]));
    return { ...row, ...found, seeds: seeds.filter((value) => value !== null), text: differenceText(found, measure.digits) };
  });
  const better = measure.higher ? "right is better" : "left is better";
  const unit = measure.unit === "points" ? "percentage points" : measure.unit;
  forestChart(at("forest"), {
    rows,
    format: (value) => (value === 0 ? "0" : signed(value, Math.abs(value) < 1 ? 2 : 0)).replace(/\.?0+$/, (zeros) => (zeros.startsWith(".") ? "" : zeros)),
    axis: `${measure.label}, difference to ${variants[base].name} in ${unit} (${better})`,
    shortAxis: `difference in ${unit} (${better})`,
    label: `Differences to ${variants[base].name} in ${measure.label}: ${rows.filter((row) => !row.baseline).map((row) => `${row.name} ${row.text}`).join("; ")}`,
  });
  const clear = rows.filter((row) => row.clear).map((row) => row.name);
  at("forest-note").textContent = measure === data.measures[0]
    ? `Filled dots are clearly different after correction for all pairs of methods: ${clear.join(", ") || "none"}. Arrows: the interval goes on beyond the chart.`
    : `Filled dots have an interval without 0: ${clear.join(", ") || "none"}. Intervals of this measure cover new seeds, not new test images, and are not corrected for the number of methods.`;
}
// Variant i minus variant j, from the half of the table that is stored.
function difference(measure, i, j) {
  const stored = data.differences[measure];
  const found = i < j ? stored[i][j - i - 1] : stored[j][i - j - 1];
  if (!found) return null;
  const [middle, low, high, clear] = found;
  const flip = (value) => (value === null ? null : -value);
  return i < j ? { mean: middle, low, high, clear: Boolean(clear) } : { mean: -middle, low: flip(high), high: flip(low), clear: Boolean(clear) };
}
function differenceText({ mean: middle, low, high, clear }, digits) {
  if (low === null) return `${signed(middle, digits)} (no interval)`;
  return `${signed(middle, digits)} [${signed(low, digits)}, ${signed(high, digits)}]${clear ? " *" : ""}`;
}

function drawSizes() {
  const { train, accuracy } = data.classes;
  const box = at("sizes");
  const lead = at("classes-lead");
  if (!train) { lead.textContent = "The number of training images of each class is not known, or not the same in all runs, so accuracies are listed by class only."; box.replaceChildren(); return; }
  const sizes = train.filter((count) => count > 0);
  const [low, high] = extent(sizes);
  if (high < 2 * low) { lead.textContent = `All classes have about the same number of training images (${low === high ? low : `${low} to ${high}`}): differences between classes are not a matter of their size.`; box.replaceChildren(); return; }
  lead.textContent = `Classes have ${high.toLocaleString("en")} to ${low.toLocaleString("en")} training images: on the right is the accuracy of rare classes, where methods for long tails should be ahead.`;
  const order = train.map((count, k) => ({ count, k })).filter(({ count }) => count > 0).sort((a, b) => b.count - a.count);
  const bins = sizeBins(order, 10);
  const groups = bins.length;
  const series = variants.map((variant, k) => ({
    name: variant.name, colour: colours[k], dash: dashOf(k), dots: true,
    points: bins.map((bin) => [Math.exp(mean(bin.map(({ count }) => Math.log(count)))), mean(bin.map(({ k: label }) => accuracy[k][label] ?? null))]).filter(([, value]) => value !== null),
  }));
  lineChart(box, {
    label: `Accuracy by class size: ${series.map((one) => `${one.name} from ${fixed((one.points[0] || [0, null])[1])} to ${fixed((one.points[one.points.length - 1] || [0, null])[1])} percent`).join("; ")}`,
    x: { label: "training images of a class (log scale)", domain: [low, high], log: true, reversed: true, format: (value) => Math.round(value).toLocaleString("en"), name: "about" },
    y: { label: `accuracy, %${groups === order.length ? "" : ` (classes in ${groups} groups by size)`}`, domain: clamp(widened(extent(series.flatMap((one) => one.points.map(([, b]) => b)))), 0, 100) },
    series, labels: true, height: 340,
  });
}
// Classes in groups of about equally many; classes of one size are never separated.
function sizeBins(order, most) {
  const wanted = order.length / Math.min(most, order.length);
  const bins = [];
  order.forEach((one, place) => {
    const last = bins[bins.length - 1];
    if (last && (last[0].count === one.count || place < Math.round(bins.length * wanted))) last.push(one);
    else bins.push([one]);
  });
  return bins;
}
const clamp = ([low, high], least, most) => [Math.max(low, least), Math.min(high, most)];

const sorting = { column: 0, down: false };
function classColumns() {
  const { names, train, test, accuracy } = data.classes;
  return [
    { heading: "class", value: (k) => names[k], text: (k) => names[k], name: true },
    ...(train ? [{ heading: "training images", value: (k) => train[k], text: (k) => train[k].toLocaleString("en") }] : []),
    ...(test ? [{ heading: "test images", value: (k) => test[k], text: (k) => test[k].toLocaleString("en") }] : []),
    ...variants.map((variant, v) => ({ heading: variant.name, value: (k) => accuracy[v][k] ?? null, text: (k) => fixed(accuracy[v][k]), variant: v })),
  ];
}
function drawClassTable() {
  const { names, accuracy } = data.classes;
  const table = at("class-table");
  const columns = classColumns();
  const wanted = at("search").value.trim().toLowerCase();
  const shown = names.map((_, k) => k).filter((k) => names[k].toLowerCase().includes(wanted));
  const { value } = columns[sorting.column];
  const sign = sorting.down ? -1 : 1;
  shown.sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null);
    return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  });
  const head = html("tr", {}, ...columns.map((column, c) => {
    const button = html("button", { type: "button" }, column.heading);
    button.addEventListener("click", () => {
      sorting.down = sorting.column === c ? !sorting.down : !column.name;
      sorting.column = c;
      drawClassTable();
      table.querySelectorAll("th button")[c].focus();
    });
    const sorted = sorting.column === c ? (sorting.down ? "descending" : "ascending") : "none";
    return html("th", { scope: "col", "aria-sort": sorted, class: column.name ? null : "number" }, column.variant === undefined ? null : swatch(colours[column.variant]), button);
  }));
  const body = shown.map((k) => {
    const best = Math.max(...variants.map((_, v) => accuracy[v][k] ?? -1));
    return html("tr", {}, ...columns.map((column) => {
      if (column.name) return html("th", { scope: "row" }, column.text(k));
      const isBest = column.variant !== undefined && variants.length > 1 && column.value(k) === best;
      return html("td", { class: isBest ? "number best" : "number" }, column.text(k));
    }));
  });
  table.replaceChildren(html("caption", { class: "visually-hidden" }, "Accuracy by class"), html("thead", {}, head), html("tbody", {}, ...body));
  at("search-note").textContent = wanted ? `${shown.length} of ${names.length} classes` : "";
}

function drawReliability() {
  const box = at("reliability");
  if (!data.calibration.some(Boolean)) { box.replaceChildren(empty(data.predictions_reason)); return; }
  const share = (value) => fixed(100 * value, 0);
  box.replaceChildren();
  data.calibration.forEach((one, k) => {
    if (!one) return;
    const chart = html("div", { "data-print": 150 });
    const caption = html("figcaption", {}, swatch(colours[k]), html("strong", {}, variants[k].name),
      html("span", { class: "sub" }, `error ${fixed(one.error)} → ${fixed(one.error_scaled)} %, T = ${fixed(one.temperature, 2)}`));
    box.append(html("figure", {}, caption, chart));
    const points = (bins) => bins.filter(([, , images]) => images > 0.002).map(([confidence, correct]) => [confidence, correct]);
    lineChart(chart, {
      label: `Reliability of ${variants[k].name}: calibration error ${fixed(one.error)} percent, ${fixed(one.error_scaled)} percent after temperature scaling`,
      x: { label: "confidence, %", domain: [0, 1], format: share, ticks: [0, 0.5, 1], name: "confidence" },
      y: { label: "right, %", domain: [0, 1], format: share, wanted: 2 },
      series: [
        { name: "before", colour: "var(--muted)", dash: "3 3", width: 1.6, points: points(one.before) },
        { name: "after", colour: colours[k], dots: "small", points: points(one.after) },
      ],
      diagonal: true, square: true, tip: false,
    });
  });
}

function drawRisk() {
  const { coverage, risk } = data.risk;
  const series = variants.map((variant, k) => ({ name: variant.name, colour: colours[k], dash: dashOf(k), points: risk[k] ? coverage.map((share, c) => [share, risk[k][c]]) : [] }));
  if (!series.some((one) => one.points.length)) { at("risk").replaceChildren(empty(data.predictions_reason)); return; }
  lineChart(at("risk"), {
    label: `Error rate against the share of test images that are answered: ${series.filter((one) => one.points.length).map((one) => `${one.name} ${fixed(one.points[Math.floor(one.points.length / 2)][1])} percent at half, ${fixed(one.points[one.points.length - 1][1])} percent at all`).join("; ")}`,
    x: { label: "answered test images, most confident first, %", domain: [0, 100], format: (value) => fixed(value, 0), name: "answered, %:" },
    y: { label: "error rate, %", domain: [0, Math.max(1, extent(series.flatMap((one) => one.points.map(([, b]) => b)))[1] * 1.05)] },
    series, labels: true, unit: " %",
  });
}

function drawMistakes(side) {
  const k = Number(at(side).value);
  const box = at(`mistakes-${side}`);
  const { names } = data.classes;
  const pairs = data.confusions[k];
  const title = html("h3", {}, swatch(colours[k]), variants[k].name);
  if (!pairs) { box.replaceChildren(title, empty(data.predictions_reason)); return; }
  const most = Math.max(...pairs.map(([, , images]) => images), 1e-9);
  const table = html("table", { class: "confusions" },
    html("caption", { class: "visually-hidden" }, `Most confused classes of ${variants[k].name}`),
    html("thead", {}, html("tr", {}, ...["true class", "taken for", "test images per run"].map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, ...pairs.map(([label, predicted, images, part]) => {
      const meter = html("span", { class: "meter" });
      meter.style.setProperty("--c", colours[k]);
      meter.style.width = `${(4.5 * images) / most}rem`;
      return html("tr", {}, html("th", { scope: "row" }, ...soft(label)), html("td", {}, ...soft(predicted)), html("td", { class: "nowrap" }, meter, `${fixed(images, Number.isInteger(images) ? 0 : 1)} (${fixed(part, 0)} %)`));
    })));
  const tiles = html("ul", { class: "tiles" }, ...data.mistakes[k].map((one) => mistakeTile(one, names)));
  box.replaceChildren(title,
    html("h4", {}, "Most confused classes"), pairs.length ? table : empty("No mistakes."),
    html("h4", {}, "Most confident mistakes"), data.mistakes[k].length ? tiles : empty("No mistakes."));
}
function mistakeTile(one, names) {
  const file = one.file_name || `test image ${one.image}`;
  const uri = data.thumbnails[one.image];
  const shown = uri ? html("img", { src: uri, alt: `${file}, ${names[one.label]}` }) : html("div", { class: "blank" }, ...soft(file));
  if (uri) shown.addEventListener("load", () => shown.classList.toggle("tiny", shown.naturalWidth <= 40));
  return html("li", {}, shown, html("strong", {}, ...soft(`says ${names[one.predicted]}, ${fixed(100 * one.confidence, one.confidence > 0.995 ? 1 : 0)}\u00a0%`)),
    html("span", { class: "sub" }, ...soft(`is ${names[one.label]}`)),
    one.others ? html("span", { class: "sub" }, `${one.right} of ${one.others} other runs right`) : null,
    uri && one.file_name ? html("span", { class: "sub file", title: one.file_name }, one.file_name.split("/").pop()) : null);
}

function drawLearning() {
  const losses = variants.map((variant, k) => {
    const points = data.learning[k].loss;
    const first = points.length ? points[0][1] : 1;
    return { name: variant.name, colour: colours[k], dash: dashOf(k), points: points.map(([epoch, loss]) => [epoch, loss / first]) };
  });
  const epochs = extent(losses.flatMap((one) => one.points.map(([a]) => a)));
  const whole = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : "");
  if (losses.some((one) => one.points.length > 1)) {
    lineChart(at("loss"), {
      label: `Training loss relative to the first epoch, at the end: ${losses.filter((one) => one.points.length).map((one) => `${one.name} ${fixed(one.points[one.points.length - 1][1], 2)}`).join("; ")}`,
      x: { label: "epoch", domain: epochs, format: whole, name: "epoch" },
      y: { label: "training loss, relative to epoch 1", domain: [0, Math.max(1, extent(losses.flatMap((one) => one.points.map(([, b]) => b)))[1])] },
      series: losses, labels: true,
    });
  } else at("loss").replaceChildren(empty("Learning curves need runs of at least two epochs."));
  const accuracies = variants.map((variant, k) => ({ name: variant.name, colour: colours[k], dash: dashOf(k), dots: data.learning[k].accuracy.length < 12, points: data.learning[k].accuracy }));
  if (accuracies.some((one) => one.points.length > 1)) {
    lineChart(at("accuracy"), {
      label: `Test accuracy at the end: ${accuracies.filter((one) => one.points.length).map((one) => `${one.name} ${fixed(one.points[one.points.length - 1][1])} percent`).join("; ")}`,
      x: { label: "epoch", domain: epochs, format: whole, name: "epoch" },
      y: { label: "test accuracy, % (the last epoch counts)", domain: clamp(widened(extent(accuracies.flatMap((one) => one.points.map(([, b]) => b)))), 0, 100) },
      series: accuracies, labels: true,
    });
  } else at("accuracy").replaceChildren(empty("These runs were tested once, at the end. With --eval-every 5, accuracies along the way are shown here."));
}

function drawCost() {
  const rows = data.cost;
  const columns = [
    ["time per run", "minutes", (value) => duration(60 * value)],
    ["images per second", "speed", (value) => Math.round(value).toLocaleString("en")],
    ["peak memory", "memory", (value) => (value < 1000 ? `${Math.round(value)} MB` : `${(value / 1000).toFixed(1)} GB`)],
  ];
  const most = Object.fromEntries(columns.map(([, key]) => [key, Math.max(...rows.map((row) => row[key] || 0), 1e-9)]));
  at("cost").replaceChildren(
    html("caption", { class: "visually-hidden" }, "Cost by method"),
    html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "method"), ...columns.map(([heading]) => html("th", { scope: "col" }, heading)))),
    html("tbody", {}, ...rows.map((row, k) => html("tr", {}, html("th", { scope: "row" }, swatch(colours[k]), variants[k].name), ...columns.map(([, key, format]) => {
      const bar = html("span", { class: "inline-bar" });
      bar.style.setProperty("--c", colours[k]);
      bar.style.width = `${(5 * (row[key] || 0)) / most[key]}rem`;
      const text = html("span", {}, row[key] === null ? "–" : format(row[key]));
      text.style.cssText = "display:inline-block;min-width:4.2rem;text-align:right";
      return html("td", {}, text, bar);
    })))));
  const shared = Math.max(...rows.map((row) => row.at_once));
  const devices = [...new Set(rows.map((row) => row.device).filter(Boolean))].join(", ");
  at("cost-note").textContent = `${devices ? `${devices}. ` : ""}Mean over seeds; memory is the largest of a run.${shared > 1 ? ` Up to ${shared} runs shared the machine, so times are longer than those of a run alone.` : ""}`;
}
// As sweep.progress.duration.
function duration(seconds) {
  if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const total = Math.round(seconds);
  const parts = [Math.floor(total / 3600), Math.floor((total % 3600) / 60), total % 60];
  const [hours, minutes, rest] = parts;
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function drawShifted() {
  const { shifted } = data;
  if (!shifted) return;
  at("shifted").hidden = false;
  at("shifted-link").hidden = false;
  const series = variants.map((variant, k) => ({ name: variant.name, colour: colours[k], dash: dashOf(k), dots: true, points: (shifted.accuracy[k] || []).map((value, strength) => [strength, value]).filter(([, value]) => value !== null) }));
  if (series.some((one) => one.points.length)) {
    at("shifted-lead").textContent = `Accuracy on test images with ${shifted.corruptions.length} corruptions, mean over all of them: a method that falls more slowly is more robust.`;
    lineChart(at("robustness"), {
      label: `Accuracy by strength of the corruption: ${series.filter((one) => one.points.length).map((one) => `${one.name} ${fixed(one.points[0][1])} to ${fixed(one.points[one.points.length - 1][1])} percent`).join("; ")}`,
      x: { label: "strength of the corruption (0: none)", domain: [0, 5], ticks: [0, 1, 2, 3, 4, 5], format: String, name: "strength" },
      y: { label: "accuracy, %", domain: clamp(widened(extent(series.flatMap((one) => one.points.map(([, b]) => b)))), 0, 100) },
      series, labels: true,
    });
  } else at("robustness").replaceChildren(empty(shifted.notes.join("; ") || "No corruptions were evaluated; icmixup evaluate adds them."));
  const folders = Object.keys(shifted.outside);
  at("outside").replaceChildren(...folders.flatMap((folder) => [
    html("h3", {}, `Images of other classes: ${folder}`),
    html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Images of ${folder}` }, html("table", { class: "data" },
      html("thead", {}, html("tr", {}, ...["method", "AUROC, % (50 is chance)", "FPR at 95 % TPR, %"].map((text, c) => html("th", { scope: "col", class: c ? "number" : null }, text)))),
      html("tbody", {}, ...variants.map((variant, k) => {
        const row = shifted.outside[folder][k];
        return html("tr", {}, html("th", { scope: "row" }, swatch(colours[k]), variant.name), html("td", { class: "number" }, row ? fixed(row.auroc) : "–"), html("td", { class: "number" }, row ? fixed(row.fpr95) : "–"));
      })))),
  ]));
}
